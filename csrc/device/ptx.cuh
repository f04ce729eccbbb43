// PTX instructions as functions: barriers, bulk copies, vector reductions. Sections are those of
// the PTX ISA 9.0.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "params.h"

namespace msa {

// Address in the shared window.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier (9.7.13.15) -----------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals)
               : "memory");
}

// Between this thread's mbarrier_init and asynchronous operations that complete there (9.7.13.4).
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}

// Arrives and makes the phase wait for `bytes` of bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)),
               "r"(bytes)
               : "memory");
}

// Blocks until the phase of the given parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(smem_address(bar)), "r"(parity)
        : "memory");
  } while (done == 0);
}

// Index and phase parity of a ring of barriers.
template <uint32_t kStages>
struct PipelineState {
  uint32_t index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Generic-proxy writes to shared memory before it are seen by asynchronous operations after it
// (9.7.13.4).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- bulk copies (9.7.9.25) ---------------------------------------------------------------------

// Global -> shared, `bytes` a multiple of 16, both addresses 16-byte aligned.
__device__ __forceinline__ void bulk_load(void* target, const void* source, uint32_t bytes,
                                          uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(target)),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(smem_address(bar))
      : "memory");
}

// A box of a 4-D tensor -> shared; elements outside the tensor arrive as zeros and count as bytes.
__device__ __forceinline__ void tma_load_4d(void* target, const CUtensorMap* map, uint64_t* bar,
                                            int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(target)),
      "l"(map), "r"(smem_address(bar)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

__device__ __forceinline__ void tma_load_5d(void* target, const CUtensorMap* map, uint64_t* bar,
                                            int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem_address(target)),
      "l"(map), "r"(smem_address(bar)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

// pool[0 .. bytes) += shared[0 .. bytes), element by element, in the pool's type.
template <DqAccum kDqAccum>
__device__ __forceinline__ void bulk_reduce_add(void* pool, const void* shared, uint32_t bytes) {
  static_assert(kDqAccum == DqAccum::kFp32 || kDqAccum == DqAccum::kBf16);
  if constexpr (kDqAccum == DqAccum::kFp32) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(pool)),
                 "r"(smem_address(shared)), "r"(bytes)
                 : "memory");
  } else {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(
            __cvta_generic_to_global(pool)),
        "r"(smem_address(shared)), "r"(bytes)
        : "memory");
  }
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most `kPending` of this thread's bulk groups still read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ---- vector reductions, matrix stores, registers ------------------------------------------------

// pool[0..4) += x, relaxed, 16-byte aligned (9.7.13.6).
__device__ __forceinline__ void red_add_v4(float* pool, float x0, float x1, float x2, float x3) {
  asm volatile(
      "red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(pool)),
      "f"(x0), "f"(x1), "f"(x2), "f"(x3)
      : "memory");
}

// Four 8x8 matrices of 16-bit elements; lanes 8i .. 8i+7 give the row addresses of matrix i
// (9.7.14.5.16).
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, uint32_t x0, uint32_t x1,
                                            uint32_t x2, uint32_t x3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

// 2^x; 2^-inf = +0 (9.7.3.21).
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Programmatic dependent launch: the next grid of the stream may start once all CTAs have called
// this or ended (9.7.13.13).
__device__ __forceinline__ void grid_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the grid before has completed and its writes are visible.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Registers of every thread of the executing warpgroup, a multiple of 8 in [24, 256] (9.7.19.5).
template <int kRegisters>
__device__ __forceinline__ void warpgroup_release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace msa
