#include "flatshard/diagnostics/step_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <initializer_list>
#include <string_view>
#include <utility>

namespace flatshard {
namespace {

struct Rule {
  std::string_view name;
  std::initializer_list<std::string_view> words;  // any of them, in lower case
};

// The first rule that fits counts. The names come from cuBLAS, cuDNN, NCCL,
// ATen and Flatshard's own kernels.
const std::array<Rule, 15> kRules{{
    {"all-gather", {"allgather"}},
    {"reduce-scatter", {"reducescatter"}},
    {"other communication", {"nccl"}},
    {"peer copies", {"ptop"}},
    {"sums of gradients", {"sum_rows", "add_scaled"}},
    {"attention", {"fmha", "flash", "sdpa", "attention", "cudnn"}},
    {"GEMM", {"gemm", "nvjet", "cutlass", "splitk"}},
    {"norm", {"rms_norm"}},
    {"RoPE", {"rope"}},
    {"SwiGLU", {"swiglu", "gated_"}},
    {"permute",
     {"permute_rows", "sum_token_rows", "row_places", "narrow_rows"}},
    {"router",
     {"router_", "count_experts", "sort_count", "sort_scan", "sort_place"}},
    {"cross-entropy", {"cross_entropy"}},
    {"optimizer", {"update_kernel"}},
    {"copies and fills", {"memcpy", "memset", "copy", "fill"}},
}};

bool communicates(const std::string& name) {
  return name == "all-gather" || name == "reduce-scatter" ||
         name == "other communication" || name == "peer copies" ||
         name == "sums of gradients";
}

using Intervals = std::vector<std::pair<std::int64_t, std::int64_t>>;

// Nanoseconds that the intervals cover together.
std::int64_t covered(Intervals intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::int64_t sum = 0;
  std::int64_t end = 0;
  for (const auto& [from, to] : intervals) {
    const std::int64_t begin = std::max(from, end);
    if (to > begin) {
      sum += to - begin;
      end = to;
    }
  }
  return sum;
}

double ms(std::int64_t ns) {
  return static_cast<double>(ns) * 1e-6;
}

std::string stream_role(const std::map<std::string, std::int64_t>& ns) {
  const auto most =
      std::max_element(ns.begin(), ns.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      });
  if (!communicates(most->first)) {
    return "compute";
  }
  return ns.contains("reduce-scatter") || ns.contains("sums of gradients")
             ? "reduce"
             : "gather";
}

}  // namespace

std::string kernel_class(const std::string& kernel_name) {
  std::string lower = kernel_name;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](char c) {
    return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  });
  for (const Rule& rule : kRules) {
    for (const std::string_view word : rule.words) {
      if (lower.find(word) != std::string::npos) {
        return std::string(rule.name);
      }
    }
  }
  return "other";
}

StepProfile profile_step(const std::vector<KernelInterval>& kernels) {
  StepProfile profile;
  if (kernels.empty()) {
    return profile;
  }
  std::map<std::string, KernelClass> classes;
  std::map<std::int64_t, std::map<std::string, std::int64_t>> streams;
  std::vector<std::string> names;  // the class of each kernel
  Intervals all;
  std::int64_t begin = kernels.front().begin_ns;
  std::int64_t end = begin;
  for (const KernelInterval& kernel : kernels) {
    const std::string& name = names.emplace_back(kernel_class(kernel.name));
    const std::int64_t ns = kernel.end_ns - kernel.begin_ns;
    KernelClass& sum = classes[name];
    sum.name = name;
    sum.ms += ms(ns);
    ++sum.kernels;
    streams[kernel.stream][name] += ns;
    all.emplace_back(kernel.begin_ns, kernel.end_ns);
    begin = std::min(begin, kernel.begin_ns);
    end = std::max(end, kernel.end_ns);
  }
  for (const auto& [stream, ns] : streams) {
    profile.streams[stream] = stream_role(ns);
  }
  Intervals compute;
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    const KernelInterval& kernel = kernels[i];
    if (profile.streams[kernel.stream] == "compute" &&
        !communicates(names[i])) {
      compute.emplace_back(kernel.begin_ns, kernel.end_ns);
    }
  }
  const std::int64_t busy = covered(std::move(all));
  const std::int64_t computing = covered(std::move(compute));
  profile.span_ms = ms(end - begin);
  profile.compute_ms = ms(computing);
  profile.exposed_ms = ms(busy - computing);
  profile.idle_ms = ms(end - begin - busy);
  for (auto& [name, sum] : classes) {
    profile.classes.push_back(std::move(sum));
  }
  std::sort(
      profile.classes.begin(),
      profile.classes.end(),
      [](const KernelClass& a, const KernelClass& b) { return a.ms > b.ms; });
  return profile;
}

std::string to_string(const StepProfile& profile, const SpeedOfLight& light) {
  const double span = profile.span_ms > 0 ? profile.span_ms : 1;
  // " 650 TFLOP/s, 65.7 % of the peak" for work that is known.
  const auto speed = [&](double flops, double ms) {
    if (light.peak_flops <= 0 || flops <= 0 || ms <= 0) {
      return std::string();
    }
    const double per_second = flops / (ms * 1e-3);
    return fmt::format(
        "  {:.0f} TFLOP/s, {:.1f} % of the peak",
        per_second * 1e-12,
        100 * per_second / light.peak_flops);
  };
  std::string text = "where the GPU's time went, ms of the step\n";
  double total_flops = 0;
  for (const KernelClass& c : profile.classes) {
    const auto flops = light.flops.find(c.name);
    const double work = flops == light.flops.end() ? 0 : flops->second;
    total_flops += work;
    text += fmt::format(
        "  {:<21} {:>9.2f}  {:>5.1f} %  {:>5} kernels{}\n",
        c.name,
        c.ms,
        100 * c.ms / span,
        c.kernels,
        speed(work, c.ms));
  }
  const auto line =
      [&](const char* name, double value, const std::string& more) {
        text += fmt::format(
            "  {:<21} {:>9.2f}  {:>5.1f} %{}\n",
            name,
            value,
            100 * value / span,
            more);
      };
  line("computing", profile.compute_ms, "");
  line("exposed communication", profile.exposed_ms, "");
  line("idle", profile.idle_ms, "");
  line("the step", profile.span_ms, speed(total_flops, profile.span_ms));
  text.pop_back();
  return text;
}

}  // namespace flatshard
