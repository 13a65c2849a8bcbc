#include "flatshard/train/profile.h"

#include "flatshard/device/stream.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>

namespace flatshard {

using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

void TraceRecorder::start() {
  std::set<ActivityType> activities{ActivityType::CPU};
  if (device_.is_cuda()) {
    activities.insert(ActivityType::CUDA);
  }
  const ProfilerConfig config(ProfilerState::KINETO);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(
      config,
      activities,
      {at::RecordScope::FUNCTION});
}

void TraceRecorder::stop(const std::filesystem::path& path) {
  current_stream(device_)->synchronize();
  const auto result = torch::autograd::profiler::disableProfiler();
  std::filesystem::create_directories(path.parent_path());
  result->save(path.string());
}

void TraceRecorder::discard() {
  torch::autograd::profiler::disableProfiler();
}

}  // namespace flatshard
