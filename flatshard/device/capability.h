#pragma once

#include <c10/core/Device.h>

#include <array>
#include <string>
#include <string_view>

// The features of GPUs of each compute capability, in one place. Errors,
// `flatshard doctor`, `flatshard info` and docs/reference/gpus.md print this
// table.
namespace flatshard {

enum class GpuFeature {
  bfloat16,
  float8_tensorwise,
  float8_rowwise,
  float8_blockwise,
  float8_mxfp8,
  grouped_products,
  cudnn_attention,
  graphs,
};

/// A row of the table. Compute capabilities are 10 * major + minor: 89 is 8.9.
struct GpuFeatureRow {
  GpuFeature feature;
  std::string_view name;
  int from;   ///< the lowest compute capability that has it
  int below;  ///< GPUs from this one on have it no more
  /// From this GPU on support is unknown: cuBLASLt is queried.
  int asked_from;
  std::string_view otherwise;  ///< what happens on other GPUs
};

const std::array<GpuFeatureRow, 8>& gpu_features();
const GpuFeatureRow& row_of(GpuFeature feature);

/// Returns whether GPUs of a compute capability have it, according to the
/// table.
bool gpu_has(int sm, GpuFeature feature);
/// Returns whether the answer of `gpu_has` has to be confirmed by cuBLASLt.
bool gpu_is_asked(int sm, GpuFeature feature);
/// Returns which GPUs have it: "sm_80 or later", "sm_90 to sm_109".
std::string gpus_with(GpuFeature feature);
/// Returns a line for each feature: what a GPU of this compute capability does.
std::string describe_gpu_features(int sm);
/// Returns the full table in Markdown, with one column for each GPU that `all`
/// builds for.
std::string gpu_features_markdown();

/// Returns whether code for `architectures` ("80-real,90a,120", CMake's names)
/// runs on a GPU of compute capability `sm`.
bool build_fits(std::string_view architectures, int sm);
/// Returns the architectures that this build's CUDA code is for; empty without
/// CUDA.
std::string_view built_for_gpus();
/// Returns why a GPU cannot be used, for an error; empty: it can.
///
/// @param name    the driver's name of the GPU.
/// @param sm      the compute capability that Flatshard uses for it.
/// @param real    its compute capability.
std::string why_gpu_is_unfit(
    std::string_view name,
    int sm,
    int real,
    std::string_view architectures);
/// `sm`, or the lower one that FLATSHARD_PRETEND_SM names in `text`.
/// @param text  null or empty: nothing is pretended.
/// @throws Error{config} for a text that is not a compute capability.
int pretended_sm(int sm, const char* text);

/// Returns the compute capability of a GPU, or FLATSHARD_PRETEND_SM where that
/// is lower: then each fallback of an older GPU can be tried.
/// @throws Error{config} for another device than a GPU.
int compute_capability(at::Device device);
inline bool gpu_has(at::Device device, GpuFeature feature) {
  return gpu_has(compute_capability(device), feature);
}
/// Does nothing for a CPU and for a GPU that this build runs on.
/// @throws Error{config} that names the GPU, what it lacks and what to do.
void check_gpu(at::Device device);

}  // namespace flatshard
