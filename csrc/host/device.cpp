#include "host/device.h"

#include <map>
#include <mutex>

#include "host/error.h"

namespace msa {

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

const DeviceInfo& device_info(int index) {
  static std::mutex mutex;
  static std::map<int, DeviceInfo> devices;
  const std::lock_guard lock(mutex);
  const auto known = devices.find(index);
  if (known != devices.end()) return known->second;

  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, index), concat("properties of device ", index));
  DeviceInfo info{index,
                  properties.name,
                  properties.major,
                  properties.minor,
                  properties.multiProcessorCount,
                  static_cast<int>(properties.sharedMemPerBlockOptin)};
  return devices.emplace(index, info).first->second;
}

}  // namespace msa
