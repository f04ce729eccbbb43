// Warpgroup MMA (PTX ISA 9.7.15, sm_90a) on plain register arrays. The instructions come from
// CUTLASS.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

namespace msa {

// Which dimension of an operand tile is contiguous in shared memory.
enum class Major { kK, kMn };

// Shared-memory matrix descriptor, 128-byte swizzle. The strides are those between 8-row swizzle
// atoms: K-major: stride_bytes along M/N (leading_bytes unused); MN-major: leading_bytes along M/N,
// stride_bytes along K.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, uint32_t leading_bytes,
                                                    uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128B = 1ull << 62;
  return kSwizzle128B | static_cast<uint64_t>(stride_bytes >> 4) << 32 |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

__device__ __forceinline__ void wgmma_fence() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void wgmma_commit() { cute::warpgroup_commit_batch(); }
// Until at most `kPending` committed groups of this warpgroup are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  cute::warpgroup_wait<kPending>();
}

// Pins registers to this place in the program: no read of an accumulator moves above the wait that
// completes it, no computation of an operand sinks below.
template <class T, int kSize>
__device__ __forceinline__ void keep(T (&registers)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) cute::warpgroup_fence_operand(registers[i]);
}

namespace detail {

constexpr cute::SM90::GMMA::Major to_gmma(Major major) {
  return major == Major::kK ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;
}

template <class Mma, size_t... kIndex>
__device__ __forceinline__ void fma_ss(float (&acc)[sizeof...(kIndex)], uint64_t a, uint64_t b,
                                       std::index_sequence<kIndex...>) {
  Mma::fma(a, b, acc[kIndex]...);
}

template <class Mma, size_t... kIndex>
__device__ __forceinline__ void fma_rs(float (&acc)[sizeof...(kIndex)], uint32_t a0, uint32_t a1,
                                       uint32_t a2, uint32_t a3, uint64_t b, bool accumulate,
                                       std::index_sequence<kIndex...>) {
  using cute::SM90::GMMA::ScaleOut;
  Mma::fma(a0, a1, a2, a3, b, acc[kIndex]..., accumulate ? ScaleOut::One : ScaleOut::Zero);
}

}  // namespace detail

// acc[64, 64] = A[64, 16] B[16, 64], both operands BF16 in shared memory. Unlike an accumulating
// instruction with scale-d = 0 it does not read `acc`, which therefore costs no registers before.
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ void wgmma_m64n64k16_ss_set(float (&acc)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%"
      "25,%26,%27,%28,%29,%30,%31}, %32, %33, 0, 1, 1, %34, %35;"
      : "=f"(acc[0]), "=f"(acc[1]), "=f"(acc[2]), "=f"(acc[3]), "=f"(acc[4]), "=f"(acc[5]),
        "=f"(acc[6]), "=f"(acc[7]), "=f"(acc[8]), "=f"(acc[9]), "=f"(acc[10]), "=f"(acc[11]),
        "=f"(acc[12]), "=f"(acc[13]), "=f"(acc[14]), "=f"(acc[15]), "=f"(acc[16]), "=f"(acc[17]),
        "=f"(acc[18]), "=f"(acc[19]), "=f"(acc[20]), "=f"(acc[21]), "=f"(acc[22]), "=f"(acc[23]),
        "=f"(acc[24]), "=f"(acc[25]), "=f"(acc[26]), "=f"(acc[27]), "=f"(acc[28]), "=f"(acc[29]),
        "=f"(acc[30]), "=f"(acc[31])
      : "l"(a), "l"(b), "n"(kMajorA == Major::kMn), "n"(kMajorB == Major::kMn));
}

// acc[64, 64] += A[64, 16] B[16, 64]
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ void wgmma_m64n64k16_ss_add(float (&acc)[32], uint64_t a, uint64_t b) {
  using Mma = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<detail::to_gmma(kMajorA),
                                                            detail::to_gmma(kMajorB)>;
  detail::fma_ss<Mma>(acc, a, b, std::make_index_sequence<32>{});
}

// acc[64, 64] = or += A[64, 16] B[16, 64]; `accumulate` is a constant after unrolling.
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ void wgmma_m64n64k16_ss(float (&acc)[32], uint64_t a, uint64_t b,
                                                   bool accumulate) {
  if (accumulate) {
    wgmma_m64n64k16_ss_add<kMajorA, kMajorB>(acc, a, b);
  } else {
    wgmma_m64n64k16_ss_set<kMajorA, kMajorB>(acc, a, b);
  }
}

// acc[64, 128] = or += A[64, 16] B[16, 128], A BF16 pairs in registers, B in shared memory.
template <Major kMajorB>
__device__ __forceinline__ void wgmma_m64n128k16_rs(float (&acc)[64], uint32_t a0, uint32_t a1,
                                                    uint32_t a2, uint32_t a3, uint64_t b,
                                                    bool accumulate) {
  using Mma = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K,
                                                             detail::to_gmma(kMajorB)>;
  detail::fma_rs<Mma>(acc, a0, a1, a2, a3, b, accumulate, std::make_index_sequence<64>{});
}

}  // namespace msa
