#include "flatshard/train/metrics/profile.h"

#include "flatshard/core/file_writer.h"
#include "flatshard/device/stream.h"

#include <ATen/record_function.h>
#include <fmt/format.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <utility>

namespace flatshard {

using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

namespace {

std::vector<KernelInterval> kernels_of(
    const torch::autograd::profiler::ProfilerResult& result) {
  std::vector<KernelInterval> kernels;
  for (const auto& event : result.events()) {
    const auto type =
        static_cast<libkineto::ActivityType>(event.activityType());
    if (type == libkineto::ActivityType::CONCURRENT_KERNEL ||
        type == libkineto::ActivityType::GPU_MEMCPY ||
        type == libkineto::ActivityType::GPU_MEMSET) {
      kernels.push_back(
          {.name = event.name(),
           .begin_ns = static_cast<std::int64_t>(event.startNs()),
           .end_ns = static_cast<std::int64_t>(event.endNs()),
           .stream = event.deviceResourceId()});
    }
  }
  return kernels;
}

/// Returns the operators by name, the one with the most self time first.
std::vector<HostOperator> by_own_time(
    const torch::autograd::profiler::ProfilerResult& result) {
  struct Call {
    std::int64_t begin_ns;
    std::int64_t end_ns;
    std::string name;
  };
  std::map<std::uint64_t, std::vector<Call>> threads;
  for (const auto& event : result.events()) {
    if (static_cast<libkineto::ActivityType>(event.activityType()) ==
        libkineto::ActivityType::CPU_OP) {
      threads[event.startThreadId()].push_back(
          {static_cast<std::int64_t>(event.startNs()),
           static_cast<std::int64_t>(event.endNs()),
           event.name()});
    }
  }
  std::map<std::string, HostOperator> by_name;
  for (auto& [thread, calls] : threads) {
    // A caller is sorted before its callees.
    std::sort(calls.begin(), calls.end(), [](const Call& a, const Call& b) {
      return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns
                                      : a.end_ns > b.end_ns;
    });
    std::vector<const Call*> open;
    for (const Call& call : calls) {
      while (!open.empty() && open.back()->end_ns <= call.begin_ns) {
        open.pop_back();
      }
      const std::int64_t ns = call.end_ns - call.begin_ns;
      if (!open.empty()) {
        by_name[open.back()->name].own_ns -= ns;
      }
      HostOperator& op = by_name[call.name];
      op.name = call.name;
      ++op.calls;
      op.own_ns += ns;
      op.all_ns += ns;
      open.push_back(&call);
    }
  }
  std::vector<HostOperator> sorted;
  for (auto& [name, op] : by_name) {
    sorted.push_back(std::move(op));
  }
  std::stable_sort(
      sorted.begin(),
      sorted.end(),
      [](const HostOperator& a, const HostOperator& b) {
        return a.own_ns > b.own_ns;
      });
  return sorted;
}

// Kineto calls a stream "stream 7 ", and Flatshard adds the rest.
void name_streams(
    const std::filesystem::path& path,
    const StepProfile& profile) {
  if (profile.streams.empty()) {
    return;
  }
  std::ostringstream read;
  read << std::ifstream(path).rdbuf();
  std::string text = std::move(read).str();
  for (const auto& [stream, role] : profile.streams) {
    const std::string old = fmt::format("\"name\": \"stream {} \"", stream);
    const std::string name =
        fmt::format("\"name\": \"stream {}: {}\"", stream, role);
    for (auto at = text.find(old); at != std::string::npos;
         at = text.find(old, at + name.size())) {
      text.replace(at, old.size(), name);
    }
  }
  write_file_atomic(path, text);
}

}  // namespace

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
      {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE});
}

StepProfile TraceRecorder::stop(const std::filesystem::path& path) {
  current_stream(device_)->synchronize();
  const auto result = torch::autograd::profiler::disableProfiler();
  std::filesystem::create_directories(path.parent_path());
  result->save(path.string());
  host_operators_ = by_own_time(*result);
  const StepProfile profile = profile_step(kernels_of(*result));
  name_streams(path, profile);
  return profile;
}

void TraceRecorder::discard() {
  torch::autograd::profiler::disableProfiler();
}

}  // namespace flatshard
