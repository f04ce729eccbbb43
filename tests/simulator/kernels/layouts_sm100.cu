// Layout test: out[kM, 128] = A[kM, 64] B[128, 64]^T by tcgen05, with every address made by CuTe's
// layout algebra: the canonical shared layouts, descriptors, the operand's and the accumulator's
// tensor-memory layouts and their copies. The tiles come by ordinary stores from row-major A and B
// (kernels `stored_...`; `in_tensor_memory` stores A to tensor memory), or by TMA through tensor
// maps that CuTe makes (functions `tma_...`), from A and B that are contiguous where the shared
// layout is.
#include <cutlass/arch/barrier.h>
#include <cutlass/bfloat16.h>

#include <cute/arch/tmem_allocator_sm100.hpp>
#include <cute/tensor.hpp>

using namespace cute;
using Element = cutlass::bfloat16_t;
using UMMA::Major;
using ShapeB = Shape<_128, _64>;

constexpr int kThreads = 128;
constexpr int kTensorColumns = 256;
template <int kM>
constexpr int kSharedBytes = (kM + 128) * 64 * sizeof(Element);

template <int kM, Major kMajor>
using Mma = decltype(make_tiled_mma(
    SM100_MMA_F16BF16_SS<Element, Element, float, kM, 128, kMajor, kMajor>{}));

// A and B of shared memory, as the MMA partitions them.
template <class Atom, int kM, Major kMajor>
__device__ auto shared_tensors() {
  extern __shared__ __align__(1024) uint8_t bytes[];
  Element* data = reinterpret_cast<Element*>(bytes);
  auto mma = Mma<kM, kMajor>{};
  auto layout_a = UMMA::tile_to_mma_shape(Atom{}, partition_shape_A(mma, Shape<Int<kM>, _64>{}));
  auto layout_b = UMMA::tile_to_mma_shape(Atom{}, partition_shape_B(mma, ShapeB{}));
  return make_tuple(make_tensor(make_smem_ptr(data), layout_a),
                    make_tensor(make_smem_ptr(data + kM * 64), layout_b));
}

// Barriers and tensor memory of a CTA; `tensor_base` is known after the next __syncthreads.
struct Setup {
  uint64_t& full;
  uint64_t& done;
  uint32_t& tensor_base;

  __device__ void begin() const {
    if (threadIdx.x >= 32) return;
    TMEM::Allocator1Sm{}.allocate(kTensorColumns, &tensor_base);
    if (elect_one_sync()) {
      initialize_barrier(full, 1);
      initialize_barrier(done, 1);
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
  }

  __device__ void end() const {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    if (threadIdx.x >= 32) return;
    TMEM::Allocator1Sm allocator;
    allocator.release_allocation_lock();
    allocator.free(tensor_base, kTensorColumns);
  }
};

// The product of fragments, from tensor memory to `out` by copies of kind `Load`.
template <int kM, class Load, class TiledMma, class FragmentA, class FragmentB>
__device__ void multiply(TiledMma mma, FragmentA const& f_a, FragmentB const& f_b, Setup setup,
                         float* out) {
  Tensor g_out = make_tensor(make_gmem_ptr(out), Shape<Int<kM>, _128>{}, Stride<_128, _1>{});
  Tensor t_out = mma.get_slice(0).partition_C(g_out);
  Tensor acc = mma.get_slice(0).make_fragment_C(t_out);
  acc.data() = setup.tensor_base;
  if (threadIdx.x < 32) {
    mma.accumulate_ = UMMA::ScaleOut::Zero;
    for (int k = 0; k < size<2>(f_a); ++k) {
      gemm(mma, f_a(_, _, k), f_b(_, _, k), acc);
      mma.accumulate_ = UMMA::ScaleOut::One;
    }
    cutlass::arch::umma_arrive(&setup.done);
  }
  wait_barrier(setup.done, 0);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");

  auto load = make_tmem_copy(Load{}, acc);
  auto thread_load = load.get_slice(threadIdx.x);
  Tensor target = thread_load.partition_D(t_out);
  Tensor registers = make_tensor<float>(shape(target));
  copy(load, thread_load.partition_S(acc), registers);
  cutlass::arch::fence_view_async_tmem_load();
  copy(registers, target);
}

template <class Atom, int kM, Major kMajor, class Load>
__device__ void multiply_stored(const Element* a, const Element* b, float* out) {
  __shared__ uint64_t full, done;
  __shared__ uint32_t tensor_base;
  const Setup setup{full, done, tensor_base};
  setup.begin();
  auto mma = Mma<kM, kMajor>{};
  auto thread_mma = mma.get_slice(0);
  auto [s_a, s_b] = shared_tensors<Atom, kM, kMajor>();
  Tensor g_a = make_tensor(make_gmem_ptr(a), Shape<Int<kM>, _64>{}, Stride<_64, _1>{});
  Tensor g_b = make_tensor(make_gmem_ptr(b), ShapeB{}, Stride<_64, _1>{});
  Tensor t_a = thread_mma.partition_A(g_a);
  Tensor t_b = thread_mma.partition_B(g_b);
#pragma unroll 1
  for (int i = threadIdx.x; i < size(t_a); i += kThreads) s_a(i) = t_a(i);
#pragma unroll 1
  for (int i = threadIdx.x; i < size(t_b); i += kThreads) s_b(i) = t_b(i);
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  multiply<kM, Load>(mma, thread_mma.make_fragment_A(s_a), thread_mma.make_fragment_B(s_b), setup,
                     out);
  setup.end();
}

template <class Atom, Major kMajor, class TmaA, class TmaB>
__global__ void __launch_bounds__(kThreads)
    multiply_loaded(const __grid_constant__ TmaA tma_a, const __grid_constant__ TmaB tma_b,
                    float* out) {
  __shared__ uint64_t full, done;
  __shared__ uint32_t tensor_base;
  const Setup setup{full, done, tensor_base};
  setup.begin();
  __syncthreads();
  auto mma = Mma<128, kMajor>{};
  auto thread_mma = mma.get_slice(0);
  auto [s_a, s_b] = shared_tensors<Atom, 128, kMajor>();
  if (threadIdx.x == 0) {
    Tensor t_a = thread_mma.partition_A(tma_a.get_tma_tensor(Shape<_128, _64>{}));
    Tensor t_b = thread_mma.partition_B(tma_b.get_tma_tensor(ShapeB{}));
    auto [from_a, to_a] = tma_partition(tma_a, group_modes<0, 3>(s_a), group_modes<0, 3>(t_a));
    auto [from_b, to_b] = tma_partition(tma_b, group_modes<0, 3>(s_b), group_modes<0, 3>(t_b));
    set_barrier_transaction_bytes(full, kSharedBytes<128>);
    copy(tma_a.with(full), from_a, to_a);
    copy(tma_b.with(full), from_b, to_b);
  }
  wait_barrier(full, 0);
  multiply<128, SM100_TMEM_LOAD_32dp32b32x>(mma, thread_mma.make_fragment_A(s_a),
                                            thread_mma.make_fragment_B(s_b), setup, out);
  setup.end();
}

// A goes through registers to tensor memory.
extern "C" __global__ void in_tensor_memory(const Element* a, const Element* b, float* out) {
  __shared__ uint64_t full, done;
  __shared__ uint32_t tensor_base;
  const Setup setup{full, done, tensor_base};
  setup.begin();
  auto mma =
      make_tiled_mma(SM100_MMA_F16BF16_TS<Element, Element, float, 128, 128, Major::K, Major::K>{});
  auto thread_mma = mma.get_slice(0);
  auto [s_a, s_b] = shared_tensors<UMMA::Layout_K_SW128_Atom<Element>, 128, Major::K>();
  Tensor g_a = make_tensor(make_gmem_ptr(a), Shape<_128, _64>{}, Stride<_64, _1>{});
  Tensor g_b = make_tensor(make_gmem_ptr(b), ShapeB{}, Stride<_64, _1>{});
  Tensor t_a = thread_mma.partition_A(g_a);
  Tensor t_b = thread_mma.partition_B(g_b);
#pragma unroll 1
  for (int i = threadIdx.x; i < size(t_b); i += kThreads) s_b(i) = t_b(i);
  cutlass::arch::fence_view_async_shared();
  __syncthreads();

  Tensor f_a = thread_mma.make_fragment_A(shape(t_a));
  f_a.data() = tensor_base + 128;
  auto store = make_tmem_copy(SM100_TMEM_STORE_32dp32b8x{}, f_a);
  auto thread_store = store.get_slice(threadIdx.x);
  Tensor source = thread_store.partition_S(t_a);
  Tensor registers = make_tensor<Element>(shape(source));
  copy(source, registers);
  copy(store, registers, thread_store.partition_D(f_a));
  cutlass::arch::fence_view_async_tmem_store();
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  multiply<128, SM100_TMEM_LOAD_32dp32b32x>(mma, f_a, thread_mma.make_fragment_B(s_b), setup, out);
  setup.end();
}

// Returns a cudaError_t.
template <class Atom, Major kMajor>
int run_loaded(const Element* a, const Element* b, float* out) {
  const auto global = [](const Element* data) {
    using Order = conditional_t<kMajor == Major::K, GenRowMajor, GenColMajor>;
    return make_tensor(make_gmem_ptr(data), make_layout(Shape<_128, _64>{}, Order{}));
  };
  auto mma = Mma<128, kMajor>{};
  auto layout = UMMA::tile_to_mma_shape(Atom{}, partition_shape_A(mma, Shape<_128, _64>{}));
  auto tile = make_shape(_128{}, _128{}, _64{});
  auto cluster = make_shape(_1{}, _1{}, _1{}, _1{});
  auto tma_a = make_tma_atom_A_sm100(SM90_TMA_LOAD{}, global(a), layout, tile, mma, cluster);
  auto tma_b = make_tma_atom_B_sm100(SM90_TMA_LOAD{}, global(b), layout, tile, mma, cluster);
  constexpr int kBytes = kSharedBytes<128>;
  multiply_loaded<Atom, kMajor><<<1, kThreads, kBytes>>>(tma_a, tma_b, out);
  return cudaDeviceSynchronize();
}

#define STORED(name, atom, m, major, load)                                                   \
  extern "C" __global__ void stored_##name(const Element* a, const Element* b, float* out) { \
    multiply_stored<UMMA::atom<Element>, m, Major::major, load>(a, b, out);                  \
  }
#define LOADED(name, atom, major)                                             \
  extern "C" int tma_##name(const Element* a, const Element* b, float* out) { \
    return run_loaded<UMMA::atom<Element>, Major::major>(a, b, out);          \
  }
STORED(k_none, Layout_K_INTER_Atom, 128, K, SM100_TMEM_LOAD_32dp32b1x)
STORED(k_32, Layout_K_SW32_Atom, 128, K, SM100_TMEM_LOAD_32dp32b32x)
STORED(k_64, Layout_K_SW64_Atom, 128, K, SM100_TMEM_LOAD_32dp32b32x)
STORED(k_128, Layout_K_SW128_Atom, 128, K, SM100_TMEM_LOAD_32dp32b32x)
STORED(mn_none, Layout_MN_INTER_Atom, 128, MN, SM100_TMEM_LOAD_32dp32b32x)
STORED(mn_32, Layout_MN_SW32_Atom, 128, MN, SM100_TMEM_LOAD_32dp32b32x)
STORED(mn_64, Layout_MN_SW64_Atom, 128, MN, SM100_TMEM_LOAD_32dp32b32x)
STORED(mn_128, Layout_MN_SW128_Atom, 128, MN, SM100_TMEM_LOAD_32dp32b32x)
STORED(half_k_128, Layout_K_SW128_Atom, 64, K, SM100_TMEM_LOAD_16dp32b16x)
LOADED(k_64, Layout_K_SW64_Atom, K)
LOADED(mn_128, Layout_MN_SW128_Atom, MN)
