// Layout test: out[64, 128] = A[64, 64] B[128, 64]^T with every address made by CuTe's layout
// algebra. A and B are row-major in global memory; their shared layouts are the eight canonical
// ones.
#include <cutlass/arch/barrier.h>
#include <cutlass/bfloat16.h>

#include <cute/tensor.hpp>

using namespace cute;

namespace GMMA = cute::SM90::GMMA;
using Element = cutlass::bfloat16_t;

template <class Atom, GMMA::Major kMajor>
__device__ void multiply(const Element* a, const Element* b, float* out) {
  using Mma = SM90_64x128x16_F32BF16BF16_SS<kMajor, kMajor>;
  auto layout_a = tile_to_shape(Atom{}, Shape<_64, _64>{});
  auto layout_b = tile_to_shape(Atom{}, Shape<_128, _64>{});
  extern __shared__ __align__(1024) Element shared[];
  Tensor s_a = make_tensor(make_smem_ptr(shared), layout_a);
  Tensor s_b = make_tensor(make_smem_ptr(shared + 64 * 64), layout_b);
  for (int i = threadIdx.x; i < 64 * 64; i += 128) s_a(i / 64, i % 64) = a[i];
  for (int i = threadIdx.x; i < 128 * 64; i += 128) s_b(i / 64, i % 64) = b[i];
  cutlass::arch::fence_view_async_shared();
  __syncthreads();

  auto mma = make_tiled_mma(Mma{});
  auto thread_mma = mma.get_thread_slice(threadIdx.x);
  Tensor g_out = make_tensor(make_gmem_ptr(out), Shape<_64, _128>{}, Stride<_128, _1>{});
  Tensor t_out = thread_mma.partition_C(g_out);
  Tensor acc = thread_mma.make_fragment_C(t_out);
  Tensor f_a = thread_mma.make_fragment_A(thread_mma.partition_A(s_a));
  Tensor f_b = thread_mma.make_fragment_B(thread_mma.partition_B(s_b));
  clear(acc);
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  gemm(mma, f_a, f_b, acc);
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  warpgroup_fence_operand(acc);
  copy(acc, t_out);
}

#define LAYOUT(name, atom, major)                                                   \
  extern "C" __global__ void name(const Element* a, const Element* b, float* out) { \
    multiply<GMMA::atom<Element>, GMMA::Major::major>(a, b, out);                   \
  }
LAYOUT(k_none, Layout_K_INTER_Atom, K)
LAYOUT(k_32, Layout_K_SW32_Atom, K)
LAYOUT(k_64, Layout_K_SW64_Atom, K)
LAYOUT(k_128, Layout_K_SW128_Atom, K)
LAYOUT(mn_none, Layout_MN_INTER_Atom, MN)
LAYOUT(mn_32, Layout_MN_SW32_Atom, MN)
LAYOUT(mn_64, Layout_MN_SW64_Atom, MN)
LAYOUT(mn_128, Layout_MN_SW128_Atom, MN)
