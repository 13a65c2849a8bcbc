#include "flatshard/device/capability.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>

#include "flatshard/core/error.h"
#include "flatshard/device/device_backend.h"
#include "flatshard/device/device_name.h"

namespace flatshard {
namespace {

constexpr int kAny = 1000;
constexpr std::string_view kEmulated =
    "planes are decoded to bfloat16 with emulate = true, else refused";

// Sources: cuBLASLt's scale modes (13.0), ScaledBlas.cpp and GroupedBlas.cpp of
// torch 2.11, and sdp_utils.cpp (it prefers cuDNN on sm_9x and sm_10x).
constexpr std::array<GpuFeatureRow, 8> kFeatures = {{
    {GpuFeature::bfloat16, "bfloat16", 80, kAny, kAny, "refused"},
    {GpuFeature::float8_tensorwise,
     "FP8 matmuls, tensorwise",
     89,
     kAny,
     kAny,
     kEmulated},
    {GpuFeature::float8_rowwise,
     "FP8 matmuls, rowwise",
     90,
     kAny,
     100,
     kEmulated},
    {GpuFeature::float8_blockwise,
     "FP8 matmuls, blockwise",
     90,
     kAny,
     100,
     kEmulated},
    {GpuFeature::float8_mxfp8, "FP8 matmuls, mxfp8", 100, kAny, 110, kEmulated},
    {GpuFeature::grouped_products,
     "grouped matmul for experts",
     90,
     110,
     kAny,
     "one matmul per expert, and the host waits for their sizes"},
    {GpuFeature::cudnn_attention,
     "attention by cuDNN",
     90,
     110,
     kAny,
     "attention that ATen chooses"},
    {GpuFeature::graphs, "CUDA graphs", 80, kAny, kAny, "refused"},
}};

// The generations that `all` builds for, with some of their GPUs.
struct Generation {
  int sm;
  std::string_view gpus;
};
constexpr std::array<Generation, 7> kGenerations = {{
    {80, "A100, A30"},
    {86, "RTX 3090, A40, A10"},
    {89, "RTX 4090, L40S, L4"},
    {90, "H100, H200"},
    {100, "B200"},
    {103, "B300"},
    {120, "RTX 5090"},
}};

std::string dotted(int sm) {
  return fmt::format("{}.{}", sm / 10, sm % 10);
}

// 103 of "103a-real".
struct Architecture {
  int sm = 0;
  char suffix = 0;  ///< 'a' runs only on this one, 'f' on its family
  bool machine_code = true;
  bool ptx = true;
};

Architecture parse_architecture(std::string_view text) {
  Architecture found;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), found.sm);
  std::string_view rest(end, text.data() + text.size() - end);
  if (!rest.empty() && (rest.front() == 'a' || rest.front() == 'f')) {
    found.suffix = rest.front();
    rest.remove_prefix(1);
  }
  found.machine_code = rest != "-virtual";
  found.ptx = rest != "-real";
  return found;
}

bool runs_on(const Architecture& built, int sm) {
  if (built.suffix == 'a') {
    return built.sm == sm;
  }
  const bool family = built.sm / 10 == sm / 10 && built.sm <= sm;
  return (built.machine_code && family) ||
         (built.ptx && (built.suffix == 'f' ? family : built.sm <= sm));
}

}  // namespace

const std::array<GpuFeatureRow, 8>& gpu_features() {
  return kFeatures;
}

const GpuFeatureRow& row_of(GpuFeature feature) {
  return *std::ranges::find(kFeatures, feature, &GpuFeatureRow::feature);
}

bool gpu_has(int sm, GpuFeature feature) {
  const GpuFeatureRow& row = row_of(feature);
  return row.from <= sm && sm < row.below;
}

bool gpu_is_asked(int sm, GpuFeature feature) {
  return gpu_has(sm, feature) && sm >= row_of(feature).asked_from;
}

std::string gpus_with(GpuFeature feature) {
  const GpuFeatureRow& row = row_of(feature);
  return row.below == kAny
             ? fmt::format("sm_{} or later", row.from)
             : fmt::format("sm_{} to sm_{}", row.from, row.below - 1);
}

std::string describe_gpu_features(int sm) {
  std::string text;
  for (const GpuFeatureRow& row : kFeatures) {
    text += fmt::format(
        "  {:<28}{}\n",
        row.name,
        gpu_is_asked(sm, row.feature) ? "where cuBLASLt has them"
        : gpu_has(sm, row.feature)    ? std::string("yes")
                                      : fmt::format(
                                         "no ({}): {}",
                                         gpus_with(row.feature),
                                         row.otherwise));
  }
  return text;
}

std::string gpu_features_markdown() {
  std::string text = "| compute capability |";
  std::string line = "|---|";
  for (const Generation& generation : kGenerations) {
    text += fmt::format(" {} |", dotted(generation.sm));
    line += "---|";
  }
  text += " otherwise |\n" + line + "---|\n| GPUs |";
  for (const Generation& generation : kGenerations) {
    text += fmt::format(" {} |", generation.gpus);
  }
  text += " |\n";
  for (const GpuFeatureRow& row : kFeatures) {
    text += fmt::format("| {} |", row.name);
    for (const Generation& generation : kGenerations) {
      text += gpu_is_asked(generation.sm, row.feature) ? " asked |"
              : gpu_has(generation.sm, row.feature)    ? " yes |"
                                                       : " - |";
    }
    text += fmt::format(" {} |\n", row.otherwise);
  }
  return text;
}

bool build_fits(std::string_view architectures, int sm) {
  while (!architectures.empty()) {
    const std::size_t comma = architectures.find(',');
    if (runs_on(parse_architecture(architectures.substr(0, comma)), sm)) {
      return true;
    }
    architectures.remove_prefix(
        comma == std::string_view::npos ? architectures.size() : comma + 1);
  }
  return false;
}

std::string_view built_for_gpus() {
  return FLATSHARD_BUILT_FOR_GPUS;
}

std::string why_gpu_is_unfit(
    std::string_view name,
    int sm,
    int real,
    std::string_view architectures) {
  if (!gpu_has(sm, GpuFeature::bfloat16)) {
    return fmt::format(
        "{} has compute capability {} (sm_{}), and bfloat16 matmuls require "
        "{}, such as an A100 or an RTX 3090. Use another GPU "
        "(CUDA_VISIBLE_DEVICES) or the CPU",
        name,
        dotted(sm),
        sm,
        gpus_with(GpuFeature::bfloat16));
  }
  if (!build_fits(architectures, real)) {
    return fmt::format(
        "{} is sm_{}, and this build of Flatshard has CUDA code only for {}; "
        "rebuild with FLATSHARD_GPUS={} (or all)",
        name,
        real,
        architectures,
        real);
  }
  return {};
}

int pretended_sm(int sm, const char* text) {
  if (text == nullptr || *text == 0) {
    return sm;
  }
  const std::string_view view(text);
  int pretended = 0;
  const auto [end, error] =
      std::from_chars(view.data(), view.data() + view.size(), pretended);
  FLATSHARD_CHECK(
      error == std::errc() && end == view.data() + view.size() &&
          pretended >= 10 && pretended < kAny,
      config,
      "FLATSHARD_PRETEND_SM: expected a compute capability without its dot, "
      "such as 80 or 89, got '{}'",
      view);
  return std::min(sm, pretended);
}

int compute_capability(at::Device device) {
  FLATSHARD_CHECK(
      device.is_cuda(),
      config,
      "expected a GPU, got device '{}'",
      device.str());
  // Called for each matmul; a GPU without an index is the current one.
  static std::array<std::atomic<int>, 128> known{};
  if (!device.has_index()) {
    return pretended_sm(
        detail::cuda_compute_capability(device),
        std::getenv("FLATSHARD_PRETEND_SM"));
  }
  std::atomic<int>& sm = known.at(device.index());
  if (sm.load(std::memory_order_relaxed) == 0) {
    sm.store(
        pretended_sm(
            detail::cuda_compute_capability(device),
            std::getenv("FLATSHARD_PRETEND_SM")),
        std::memory_order_relaxed);
  }
  return sm.load(std::memory_order_relaxed);
}

void check_gpu(at::Device device) {
  if (!device.is_cuda()) {
    return;
  }
  // Called for each stream request, and GPUs do not change.
  static std::array<std::atomic<bool>, 128> fit{};
  const std::size_t index = device.has_index() ? device.index() : 0;
  if (fit.at(index).load(std::memory_order_relaxed)) {
    return;
  }
  const std::string why = why_gpu_is_unfit(
      cuda_device_name(device),
      compute_capability(device),
      detail::cuda_compute_capability(device),
      built_for_gpus());
  FLATSHARD_CHECK(why.empty(), config, "device '{}': {}", device.str(), why);
  fit.at(index).store(true, std::memory_order_relaxed);
}

}  // namespace flatshard
