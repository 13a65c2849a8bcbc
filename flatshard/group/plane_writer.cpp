#include "flatshard/group/plane_writer.h"

#include <ATen/ATen.h>

namespace flatshard {

void PlaneWriter::upload(at::Device device) {
  const auto nbytes =
      static_cast<std::int64_t>(runs.size() * sizeof(float8::FlatRun));
  if (nbytes > 0 && device.is_cuda()) {
    device_runs =
        at::from_blob(runs.data(), {nbytes}, at::TensorOptions(at::kByte))
            .to(device);
  }
}

}  // namespace flatshard
