#include "flatshard/device/stream_word.h"

#include "flatshard/device/device_backend.h"

#include <atomic>

namespace flatshard {
namespace {

class CpuWord final : public StreamWord {
 public:
  void write(std::uint32_t value) override { value_ = value; }
  std::uint32_t read() const override { return value_; }

 private:
  std::atomic<std::uint32_t> value_ = 0;
};

}  // namespace

std::unique_ptr<StreamWord> make_stream_word(at::Device device) {
  if (device.is_cuda()) {
    return detail::make_cuda_stream_word(device);
  }
  return std::make_unique<CpuWord>();
}

bool current_stream_records(at::Device device) {
  return device.is_cuda() && detail::current_cuda_stream_records(device);
}

}  // namespace flatshard
