#include "flatshard/core/error.h"
#include "flatshard/moe/cuda_moe.h"

namespace flatshard::nn::cuda {
namespace {

[[noreturn]] void refuse_moe() {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}

}  // namespace

void router_forward(const RouterForward&) {
  refuse_moe();
}
void router_backward(const RouterBackward&) {
  refuse_moe();
}
at::Tensor count_experts(const at::Tensor&, std::int64_t) {
  refuse_moe();
}
std::tuple<at::Tensor, at::Tensor> sort_by_expert(
    const at::Tensor&,
    const at::Tensor&) {
  refuse_moe();
}
void permute_rows(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    std::int64_t,
    std::int64_t,
    const at::Tensor&,
    const at::Tensor&) {
  refuse_moe();
}
void sum_rows(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&) {
  refuse_moe();
}
void row_places(
    const at::Tensor&,
    const at::Tensor&,
    std::int64_t,
    at::Tensor&,
    at::Tensor&) {
  refuse_moe();
}
bool has_gate_kernel(const Gate&, const at::Tensor&) {
  return false;
}
void weighted_gate_forward(
    const Gate&,
    const at::Tensor&,
    const at::Tensor&,
    at::Tensor&) {
  refuse_moe();
}
void weighted_gate_backward(
    const Gate&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    at::Tensor&,
    at::Tensor&,
    at::Tensor&) {
  refuse_moe();
}
void add_expert_biases(
    const at::Tensor&,
    const at::Tensor&,
    std::int64_t,
    const at::Tensor&,
    const at::Tensor&) {
  refuse_moe();
}
void add_expert_bias_dots(
    const at::Tensor&,
    const at::Tensor&,
    std::int64_t,
    const at::Tensor&,
    const at::Tensor&) {
  refuse_moe();
}
bool multiplies_groups(
    const at::Tensor&,
    const at::Tensor&,
    std::int64_t,
    std::int64_t) {
  return false;
}
void grouped_mm(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    at::Tensor&) {
  refuse_moe();
}

}  // namespace flatshard::nn::cuda
