// Kernels whose memory nvcc lays out: local arrays, printf's arguments, pointers in initial values.

#include <cstdint>
#include <cstdio>

extern "C" __global__ void local_array(int* out, const int* in, int steps) {
  int a[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = in[i * blockDim.x + threadIdx.x];
  }
  for (int i = 0; i < steps; ++i) {
    int k = a[i & 7] & 7;
    int old = a[k];
    a[k] = a[(k + 3) & 7] + threadIdx.x;
    a[i & 7] = old;
  }
  out[threadIdx.x] = a[steps & 7];
}

extern "C" __global__ void print(int* out, double x, long long big) {
  if (threadIdx.x % 2 == 1 && threadIdx.x < 6) {
    char c = 'A' + threadIdx.x;
    int n = printf("%d %-4u|%5.2f|%e %g %s %c %lld %#x %zu %05d %.*f %%\n", -int(threadIdx.x), 7u,
                   x, x, x, "text", c, big, 255, size_t(1) << 40, 42, 1, x);
    out[threadIdx.x] = 100 * n + printf("none\n");
  }
}

struct Entry {
  int number;
  int* pointer;
};

__device__ int table[4] = {1, 2, 3, 4};
__device__ int* pointers[3] = {table + 1, table, table + 3};
__constant__ int* constant_pointer = table + 2;
__device__ Entry entry = {5, table + 1};

extern "C" __global__ void follow(int* out) {
  int sum = *pointers[threadIdx.x % 3] * 1000 + *constant_pointer * 100 + *entry.pointer * 10 +
            entry.number;
  out[threadIdx.x] = sum;
}
