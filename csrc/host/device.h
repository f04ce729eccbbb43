// What the host layer needs to know of a device, queried once.
#pragma once

#include <string>

namespace msa {

struct DeviceInfo {
  int index;
  std::string name;
  int major;
  int minor;
  int num_sms;
  int max_shared_bytes;  // of a CTA, after opting in
};

// 0 where there is no driver or no device.
int device_count();

// Cached per device; throws std::runtime_error with the CUDA error.
const DeviceInfo& device_info(int index);

}  // namespace msa
