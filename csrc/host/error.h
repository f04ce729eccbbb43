// Errors of the host layer: thrown, never printed.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace msa {

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Throws std::runtime_error with the CUDA error's name and what was being done.
inline void check_cuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a failed launch must not surface again in an unrelated call
  throw std::runtime_error(
      concat(what, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")"));
}

// Throws std::invalid_argument; `message` says what was expected and what came.
template <class... Parts>
void require(bool condition, const Parts&... message) {
  if (!condition) throw std::invalid_argument(concat(message...));
}

}  // namespace msa
