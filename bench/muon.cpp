// Times updates of Muon for matrices of layers on one GPU, see muon.py.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "flatshard/group/initializer.h"
#include "flatshard/group/param_group.h"
#include "flatshard/optim/optimizer.h"

namespace flatshard {
namespace {

/// Returns the matrices of one layer of Llama-3-8B (`experts` false) or of
/// Qwen3-30B-A3B.
std::vector<GroupParameter> layer(bool experts) {
  using Shape = std::vector<std::int64_t>;
  const std::vector<Shape> shapes =
      experts
          ? std::vector<
                Shape>{{4096, 2048}, {512, 2048}, {512, 2048}, {2048, 4096}, {128, 2 * 768, 2048}, {128, 2048, 768}}
          : std::vector<Shape>{
                {4096, 4096},
                {1024, 4096},
                {1024, 4096},
                {4096, 4096},
                {14336, 4096},
                {14336, 4096},
                {4096, 14336}};
  std::vector<GroupParameter> parameters;
  for (const Shape& shape : shapes) {
    parameters.push_back(
        {.names = {fmt::format("matrix{}", parameters.size())},
         .shape = shape,
         .init = InitSpec::normal(0, 0.02F)});
  }
  return parameters;
}

std::vector<MatrixShape> matrices_of(const GroupParameter& parameter) {
  const std::vector<std::int64_t>& shape = parameter.shape;
  if (shape.size() == 2) {
    return one_matrix(parameter);
  }
  constexpr std::int64_t kWidth = 768;  // gate and up are separate
  const std::int64_t rows = shape[1] == 2 * kWidth ? kWidth : shape[1];
  return std::vector<MatrixShape>(
      shape[0] * shape[1] / rows,
      {.rows = rows, .columns = shape[2]});
}

void measure(bool experts, int num_layers, int num_updates) {
  const at::Device device(at::kCUDA, 0);
  set_current_device(device);
  const auto mesh = Mesh::single(device);
  std::vector<std::unique_ptr<ParamGroup>> groups;
  std::vector<ParamGroup*> pointers;
  for (int i = 0; i < num_layers; ++i) {
    groups.push_back(std::make_unique<ParamGroup>(
        GroupSpec{
            .name = fmt::format("layer{}", i),
            .parameters = layer(experts),
            .mesh = mesh,
            .strategy = Strategy::named("zero3", 1)},
        ParamGroupOptions{},
        Initializer(1)));
    pointers.push_back(groups.back().get());
    ParamGroup& group = *groups.back();
    group.gradients().reduce(
        at::randn(
            {group.layout().numel()},
            at::TensorOptions(device).dtype(group.options().precision.reduce)),
        group.plan_reduction(true, true));
  }
  Optimizer optimizer(
      pointers,
      ParameterRules{
          .rest =
              {.algorithm = Algorithm::muon,
               .weight_decay = 0.1,
               .momentum = 0.95},
          .muon = {.matrices_of = matrices_of}});
  std::vector<double> ms;
  for (int i = 0; i < num_updates + 2; ++i) {
    current_stream(device)->synchronize();
    const auto begin = std::chrono::steady_clock::now();
    optimizer.step(1e-3);
    current_stream(device)->synchronize();
    ms.push_back(std::chrono::duration<double, std::milli>(
                     std::chrono::steady_clock::now() - begin)
                     .count());
  }
  ms.erase(ms.begin(), ms.begin() + 2);
  std::sort(ms.begin(), ms.end());
  fmt::print("{{\"ms\": {:.2f}}}\n", ms[ms.size() / 2]);
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  using namespace flatshard;
  if (!cuda_available()) {
    fmt::print(stderr, "flatshard_muon: expected a GPU, found none\n");
    return 77;
  }
  if (argc != 4) {
    fmt::print(stderr, "usage: flatshard_muon 8B|30B-A3B LAYERS UPDATES\n");
    return 2;
  }
  measure(
      std::string_view(argv[1]) == "30B-A3B",
      std::atoi(argv[2]),
      std::atoi(argv[3]));
  return 0;
}
