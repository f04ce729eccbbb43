// Layout test: out[64, 128] = A[64, 64] B[128, 64]^T with every address made by CuTe's layout
// algebra, for the eight canonical shared layouts of A and B. Their tiles come by ordinary stores
// from row-major A and B (kernels `stored_...`), or by TMA through tensor maps that CuTe makes
// (functions `tma_...`), from A and B that are contiguous where the shared layout is.
#include <cutlass/arch/barrier.h>
#include <cutlass/bfloat16.h>

#include <cute/tensor.hpp>

using namespace cute;

namespace GMMA = cute::SM90::GMMA;
using Element = cutlass::bfloat16_t;
using ShapeA = Shape<_64, _64>;
using ShapeB = Shape<_128, _64>;

constexpr int kThreads = 128;
constexpr int kSharedBytes = (64 + 128) * 64 * sizeof(Element);

// The product of what is in shared memory.
template <GMMA::Major kMajor, class TensorA, class TensorB>
__device__ void multiply(TensorA const& s_a, TensorB const& s_b, float* out) {
  auto mma = make_tiled_mma(SM90_64x128x16_F32BF16BF16_SS<kMajor, kMajor>{});
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

template <class Atom>
__device__ auto shared_tensors() {
  extern __shared__ __align__(1024) Element shared[];
  return make_tuple(
      make_tensor(make_smem_ptr(shared), tile_to_shape(Atom{}, ShapeA{})),
      make_tensor(make_smem_ptr(shared + size(ShapeA{})), tile_to_shape(Atom{}, ShapeB{})));
}

template <class Atom, GMMA::Major kMajor>
__device__ void multiply_stored(const Element* a, const Element* b, float* out) {
  auto [s_a, s_b] = shared_tensors<Atom>();
#pragma unroll 1
  for (int i = threadIdx.x; i < size(ShapeA{}); i += kThreads) s_a(i / 64, i % 64) = a[i];
#pragma unroll 1
  for (int i = threadIdx.x; i < size(ShapeB{}); i += kThreads) s_b(i / 64, i % 64) = b[i];
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  multiply<kMajor>(s_a, s_b, out);
}

template <class Atom, GMMA::Major kMajor, class TmaA, class TmaB>
__global__ void __launch_bounds__(kThreads)
    multiply_loaded(const __grid_constant__ TmaA tma_a, const __grid_constant__ TmaB tma_b,
                    float* out) {
  __shared__ uint64_t full;
  auto [s_a, s_b] = shared_tensors<Atom>();
  if (threadIdx.x == 0) {
    initialize_barrier(full, 1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    set_barrier_transaction_bytes(full, kSharedBytes);
    auto slice_a = tma_a.get_slice(0);
    auto slice_b = tma_b.get_slice(0);
    copy(tma_a.with(full), slice_a.partition_S(tma_a.get_tma_tensor(ShapeA{})),
         slice_a.partition_D(s_a));
    copy(tma_b.with(full), slice_b.partition_S(tma_b.get_tma_tensor(ShapeB{})),
         slice_b.partition_D(s_b));
  }
  wait_barrier(full, 0);
  multiply<kMajor>(s_a, s_b, out);
}

// Returns a cudaError_t.
template <class Atom, GMMA::Major kMajor>
int run_loaded(const Element* a, const Element* b, float* out) {
  const auto global = [](const Element* data, auto shape) {
    using Order = conditional_t<kMajor == GMMA::Major::K, GenRowMajor, GenColMajor>;
    return make_tensor(make_gmem_ptr(data), make_layout(shape, Order{}));
  };
  auto tma_a = make_tma_copy(SM90_TMA_LOAD{}, global(a, ShapeA{}), tile_to_shape(Atom{}, ShapeA{}));
  auto tma_b = make_tma_copy(SM90_TMA_LOAD{}, global(b, ShapeB{}), tile_to_shape(Atom{}, ShapeB{}));
  multiply_loaded<Atom, kMajor><<<1, kThreads, kSharedBytes>>>(tma_a, tma_b, out);
  return cudaDeviceSynchronize();
}

#define STORED(name, atom, major)                                                            \
  extern "C" __global__ void stored_##name(const Element* a, const Element* b, float* out) { \
    multiply_stored<GMMA::atom<Element>, GMMA::Major::major>(a, b, out);                     \
  }
#define LOADED(name, atom, major)                                             \
  extern "C" int tma_##name(const Element* a, const Element* b, float* out) { \
    return run_loaded<GMMA::atom<Element>, GMMA::Major::major>(a, b, out);    \
  }
STORED(k_none, Layout_K_INTER_Atom, K)
STORED(k_32, Layout_K_SW32_Atom, K)
STORED(k_64, Layout_K_SW64_Atom, K)
STORED(k_128, Layout_K_SW128_Atom, K)
STORED(mn_none, Layout_MN_INTER_Atom, MN)
STORED(mn_32, Layout_MN_SW32_Atom, MN)
STORED(mn_64, Layout_MN_SW64_Atom, MN)
STORED(mn_128, Layout_MN_SW128_Atom, MN)
LOADED(k_none, Layout_K_INTER_Atom, K)
LOADED(k_32, Layout_K_SW32_Atom, K)
LOADED(k_64, Layout_K_SW64_Atom, K)
LOADED(k_128, Layout_K_SW128_Atom, K)
LOADED(mn_128, Layout_MN_SW128_Atom, MN)
