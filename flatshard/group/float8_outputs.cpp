#include "flatshard/group/float8_outputs.h"

#include <ATen/ATen.h>

namespace flatshard {

void Float8Outputs::upload(at::Device device) {
  const auto nbytes =
      static_cast<std::int64_t>(runs.size() * sizeof(float8::FlatRun));
  if (nbytes > 0 && device.is_cuda()) {
    device_runs =
        at::from_blob(runs.data(), {nbytes}, at::TensorOptions(at::kByte))
            .to(device);
  }
}

}  // namespace flatshard
