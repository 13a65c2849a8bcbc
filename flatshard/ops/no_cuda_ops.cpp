#include "flatshard/core/error.h"
#include "flatshard/ops/cuda_ops.h"

namespace flatshard::nn::cuda {
namespace {

[[noreturn]] void refuse() {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}

}  // namespace

bool supports(const at::Tensor&) {
  return false;
}
bool has_cudnn_attention(at::Device) {
  return false;
}
std::optional<at::Generator> default_generator(at::Device) {
  return {};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_forward(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    double,
    const RmsNormExtras&) {
  refuse();
}
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    at::Tensor*,
    const at::Tensor&,
    bool) {
  refuse();
}
void rms_norm_weight_gradient(const at::Tensor&, at::Tensor&, bool) {
  refuse();
}
void rope(
    const at::Tensor&,
    at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    bool,
    const at::Tensor&) {
  refuse();
}
at::Tensor
swiglu_forward(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  refuse();
}
std::tuple<at::Tensor, at::Tensor> swiglu_backward(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    at::Tensor*,
    const at::Tensor&,
    bool) {
  refuse();
}
void cross_entropy(
    at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    at::Tensor&,
    at::Tensor&,
    const CrossEntropyArgs&) {
  refuse();
}
void add_token_rows(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  refuse();
}
void sample_dropout(
    const at::Tensor&,
    const at::Tensor&,
    at::Tensor&,
    const SampleDropoutArgs&) {
  refuse();
}

}  // namespace flatshard::nn::cuda
