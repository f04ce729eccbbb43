// Copies the shared-memory image of one TMA box of query slots to global memory.
#include "device/ptx.cuh"
#include "host/error.h"
#include "host/tensor_map.h"

namespace {

constexpr uint32_t kMaxBytes = 4096;

__global__ void probe_kernel(const __grid_constant__ CUtensorMap map, int token, int first_group8,
                             uint32_t bytes, uint4* image) {
  __shared__ __align__(1024) uint4 box[kMaxBytes / 16];
  __shared__ uint64_t bar;
  for (int i = threadIdx.x; i < kMaxBytes / 16; i += blockDim.x)
    box[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  if (threadIdx.x == 0) {
    msa::mbarrier_init(&bar, 1);
    msa::fence_mbarrier_init();
  }
  msa::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    msa::mbarrier_arrive_expect_tx(&bar, bytes);
    msa::tma_load_5d(box, &map, &bar, 0, 0, 0, first_group8, token);
  }
  msa::mbarrier_wait(&bar, 0);
  for (int i = threadIdx.x; i < kMaxBytes / 16; i += blockDim.x) image[i] = box[i];
}

}  // namespace

// q BF16 [num_tokens, num_heads, 128], rows `row_stride` elements apart; image: 4096 bytes. 0 on
// success.
extern "C" int tma_probe(const void* q, int64_t num_tokens, int num_heads, int group,
                         int64_t row_stride, int token, int index_head, void* image) {
  try {
    const msa::StridedOperand operand{static_cast<const __nv_bfloat16*>(q), row_stride,
                                      msa::kHeadDim};
    CUtensorMap map;
    msa::make_tensor_map(msa::slot_map(operand, num_tokens, num_heads, group), map);
    probe_kernel<<<1, 32>>>(map, token, index_head * group / 8, group * msa::kHeadDim * 2,
                            static_cast<uint4*>(image));
    msa::check_cuda(cudaDeviceSynchronize(), "tma probe");
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
