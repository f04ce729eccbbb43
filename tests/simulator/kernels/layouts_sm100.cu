// Layout test: out[128, 128] = A[128, 64] B[128, 64]^T by tcgen05, with every address made by
// CuTe's layout algebra: shared layouts (the eight canonical ones), descriptors, the accumulator's
// tensor-memory layout and its copy.
#include <cutlass/arch/barrier.h>
#include <cutlass/bfloat16.h>

#include <cute/arch/tmem_allocator_sm100.hpp>
#include <cute/tensor.hpp>

using namespace cute;
using Element = cutlass::bfloat16_t;

template <class Atom, UMMA::Major kMajor>
__device__ void multiply(const Element* a, const Element* b, float* out) {
  auto mma =
      make_tiled_mma(SM100_MMA_F16BF16_SS<Element, Element, float, 128, 128, kMajor, kMajor>{});
  auto cta_mma = mma.get_slice(0);
  auto layout_a = UMMA::tile_to_mma_shape(Atom{}, partition_shape_A(mma, Shape<_128, _64>{}));
  auto layout_b = UMMA::tile_to_mma_shape(Atom{}, partition_shape_B(mma, Shape<_128, _64>{}));
  extern __shared__ __align__(1024) uint8_t bytes[];
  __shared__ uint64_t done;
  __shared__ uint32_t tensor_base;
  Tensor s_a = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(bytes)), layout_a);
  Tensor s_b = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(bytes) + 128 * 64), layout_b);
  Tensor g_a = make_tensor(make_gmem_ptr(a), Shape<_128, _64>{}, Stride<_64, _1>{});
  Tensor g_b = make_tensor(make_gmem_ptr(b), Shape<_128, _64>{}, Stride<_64, _1>{});
  Tensor g_out = make_tensor(make_gmem_ptr(out), Shape<_128, _128>{}, Stride<_128, _1>{});
  Tensor t_a = cta_mma.partition_A(g_a);
  Tensor t_b = cta_mma.partition_B(g_b);
  Tensor t_out = cta_mma.partition_C(g_out);
  for (int i = threadIdx.x; i < size(t_a); i += 128) s_a(i) = t_a(i);
  for (int i = threadIdx.x; i < size(t_b); i += 128) s_b(i) = t_b(i);

  const uint32_t warp = threadIdx.x / 32;
  TMEM::Allocator1Sm allocator;
  if (warp == 0) {
    allocator.allocate(128, &tensor_base);
    if (elect_one_sync()) {
      initialize_barrier(done, 1);
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
  }
  cutlass::arch::fence_view_async_shared();
  __syncthreads();

  Tensor f_a = cta_mma.make_fragment_A(s_a);
  Tensor f_b = cta_mma.make_fragment_B(s_b);
  Tensor acc = cta_mma.make_fragment_C(t_out);
  acc.data() = tensor_base;
  if (warp == 0) {
    mma.accumulate_ = UMMA::ScaleOut::Zero;
    for (int k = 0; k < size<2>(f_a); ++k) {
      gemm(mma, f_a(_, _, k), f_b(_, _, k), acc);
      mma.accumulate_ = UMMA::ScaleOut::One;
    }
    cutlass::arch::umma_arrive(&done);
  }
  wait_barrier(done, 0);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");

  auto load = make_tmem_copy(SM100_TMEM_LOAD_32dp32b1x{}, acc);
  auto thread_load = load.get_slice(threadIdx.x);
  Tensor source = thread_load.partition_S(acc);
  Tensor target = thread_load.partition_D(t_out);
  Tensor registers = make_tensor<float>(shape(target));
  copy(load, source, registers);
  cutlass::arch::fence_view_async_tmem_load();
  copy(registers, target);
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  if (warp == 0) {
    allocator.release_allocation_lock();
    allocator.free(tensor_base, 128);
  }
}

#define LAYOUT(name, atom, major)                                                   \
  extern "C" __global__ void name(const Element* a, const Element* b, float* out) { \
    multiply<UMMA::atom<Element>, UMMA::Major::major>(a, b, out);                   \
  }
LAYOUT(k_none, Layout_K_INTER_Atom, K)
LAYOUT(k_32, Layout_K_SW32_Atom, K)
LAYOUT(k_64, Layout_K_SW64_Atom, K)
LAYOUT(k_128, Layout_K_SW128_Atom, K)
LAYOUT(mn_none, Layout_MN_INTER_Atom, MN)
LAYOUT(mn_32, Layout_MN_SW32_Atom, MN)
LAYOUT(mn_64, Layout_MN_SW64_Atom, MN)
LAYOUT(mn_128, Layout_MN_SW128_Atom, MN)
