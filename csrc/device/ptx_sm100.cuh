// tcgen05 (PTX ISA 9.0, "TensorCore 5th Generation Family Instructions", sm_100a) and 16-byte
// reductions. Tensor-memory copies and descriptors come from CuTe; the MMA and commit are ours,
// because CuTe's elect a thread at every instruction.
#pragma once

#include <cutlass/bfloat16.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>
#include <utility>

#include "device/ptx.cuh"
#include "params.h"

namespace msa {

using cute::UMMA::Major;

// ---- ordering between tcgen05 operations and threads (9.7.16.6) ---------------------------------

// Before an arrive that hands tensor memory over; the waits below come first.
__device__ __forceinline__ void tmem_fence_before_arrive() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
// After the wait that took it over.
__device__ __forceinline__ void tmem_fence_after_wait() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
// Waits for a phase, then takes over the tensor memory it guards.
__device__ __forceinline__ void mbarrier_wait_tmem(uint64_t* bar, uint32_t parity) {
  mbarrier_wait(bar, parity);
  tmem_fence_after_wait();
}

// ---- tensor memory -> registers -> tensor memory ------------------------------------------------

namespace detail {

template <size_t... kIndex>
__device__ __forceinline__ void tmem_load(uint32_t (&x)[32], uint32_t address,
                                          std::index_sequence<kIndex...>) {
  cute::SM100::TMEM::LOAD::SM100_TMEM_LOAD_32dp32b32x::copy(address, x[kIndex]...);
}

template <size_t... kIndex>
__device__ __forceinline__ void tmem_store(uint32_t address, const uint32_t (&x)[16],
                                           std::index_sequence<kIndex...>) {
  cute::SM100::TMEM::STORE::SM100_TMEM_STORE_32dp32b16x::copy(x[kIndex]..., address);
}

}  // namespace detail

// 32 columns of the thread's lane; the registers hold them after tmem_wait_load.
__device__ __forceinline__ void tmem_load(uint32_t (&x)[32], uint32_t address) {
  detail::tmem_load(x, address, std::make_index_sequence<32>{});
}
// Waits for all of the warp's loads; no read of `loaded` moves above it.
template <int kNumLoads>
__device__ __forceinline__ void tmem_wait_loads(uint32_t (&loaded)[kNumLoads][32],
                                                float (&x)[kNumLoads][32]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
  for (int load = 0; load < kNumLoads; ++load) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      asm volatile("" : "+r"(loaded[load][i]));
      x[load][i] = __uint_as_float(loaded[load][i]);
    }
  }
}
__device__ __forceinline__ void tmem_wait_load(uint32_t (&loaded)[32], float (&x)[32]) {
  tmem_wait_loads(reinterpret_cast<uint32_t (&)[1][32]>(loaded),
                  reinterpret_cast<float (&)[1][32]>(x));
}
__device__ __forceinline__ void tmem_store(uint32_t address, const uint32_t (&x)[16]) {
  detail::tmem_store(address, x, std::make_index_sequence<16>{});
}
__device__ __forceinline__ void tmem_wait_store() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// ---- MMA ----------------------------------------------------------------------------------------

// kind::f16 with BF16 operands and FP32 accumulators, M = N = 128.
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ uint32_t mma_instruction() {
  using Element = cutlass::bfloat16_t;
  return static_cast<uint32_t>(
      cute::UMMA::make_instr_desc<Element, Element, float, 128, 128, kMajorA, kMajorB>());
}

// A shared-memory operand with 128-byte swizzle, as the matrix descriptor ("Shared memory
// descriptor") wants it. The strides are those between 8-row swizzle atoms: K-major: kStrideBytes
// along M/N (kLeadingBytes unused); MN-major: kLeadingBytes along M/N, kStrideBytes along K.
template <Major kMajorOfTile, uint32_t kLeadingBytes, uint32_t kStrideBytes>
struct SmemOperand {
  static constexpr Major kMajor = kMajorOfTile;
  uint32_t address;

  // Of the tile `offset_bytes` further.
  __device__ __forceinline__ uint64_t descriptor(uint32_t offset_bytes) const {
    cute::UMMA::SmemDescriptor descriptor;
    descriptor.version_ = 1;
    descriptor.layout_type_ = static_cast<uint8_t>(cute::UMMA::LayoutType::SWIZZLE_128B);
    descriptor.leading_byte_offset_ = kLeadingBytes >> 4;
    descriptor.stride_byte_offset_ = kStrideBytes >> 4;
    // Shared addresses are below 2^18: no carry leaves the start-address field, so the halves stay
    // apart, which saves instructions.
    const uint32_t low = descriptor.lo + (address >> 4) + (offset_bytes >> 4);
    uint64_t packed;
    asm("mov.b64 %0, {%1, %2};" : "=l"(packed) : "r"(low), "r"(descriptor.hi));
    return packed;
  }
};

// acc[128, 128] = or += A[128, 16] B[16, 128], by one thread.
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ void mma_ss(uint32_t acc, uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, accumulate;\n"
      "}" ::"r"(acc),
      "l"(a), "l"(b), "r"(mma_instruction<kMajorA, kMajorB>()),
      "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// As above, A in tensor memory: pairs of BF16, a lane a row.
template <Major kMajorB>
__device__ __forceinline__ void mma_ts(uint32_t acc, uint32_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, accumulate;\n"
      "}" ::"r"(acc),
      "r"(a), "l"(b), "r"(mma_instruction<Major::K, kMajorB>()),
      "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// Arrives once all MMAs this thread has issued are complete.
__device__ __forceinline__ void mma_commit(uint64_t* bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   smem_address(bar))
               : "memory");
}

// ---- reductions into L2 -------------------------------------------------------------------------

// Keeps a line in L2 longer than others.
__device__ __forceinline__ uint64_t l2_evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes of the dQ pool += x, relaxed, element by element in the pool's type ("red": .v4 of
// .bf16x2, .f16x2 and .f32, sm_90 on).
template <DqAccum kDqAccum>
__device__ __forceinline__ void red_add_16_bytes(void* pool, const uint32_t (&x)[4],
                                                 uint64_t policy) {
  const size_t address = __cvta_generic_to_global(pool);
  if constexpr (kDqAccum == DqAccum::kBf16) {
    asm volatile(
        "red.relaxed.gpu.global.add.noftz.L2::cache_hint.v4.bf16x2 [%0], {%1, %2, %3, %4}, %5;" ::
            "l"(address),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(policy)
        : "memory");
  } else if constexpr (kDqAccum == DqAccum::kFp16) {
    asm volatile(
        "red.relaxed.gpu.global.add.noftz.L2::cache_hint.v4.f16x2 [%0], {%1, %2, %3, %4}, %5;" ::
            "l"(address),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(
            address),
        "f"(__uint_as_float(x[0])), "f"(__uint_as_float(x[1])), "f"(__uint_as_float(x[2])),
        "f"(__uint_as_float(x[3])), "l"(policy)
        : "memory");
  }
}

}  // namespace msa
