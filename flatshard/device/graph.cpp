#include "flatshard/device/graph.h"

#include "flatshard/device/device_backend.h"
#include "flatshard/device/generator_states.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <utility>

namespace flatshard {
namespace {

class CpuGraph final : public DeviceGraph {
 public:
  explicit CpuGraph(Work work) : work_(std::move(work)) {
    for (const at::Tensor& output : work_()) {
      outputs_.push_back(output.defined() ? output.detach().clone() : output);
    }
  }

  const std::vector<at::Tensor>& outputs() const override { return outputs_; }

  GraphAudit audit(const std::vector<at::Tensor>&) const override { return {}; }

  void replay() override {
    const std::vector<at::Tensor> values = work_();
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      if (outputs_[i].defined()) {
        outputs_[i].variable_data().copy_(values.at(i).detach());
      }
    }
  }

 private:
  Work work_;
  std::vector<at::Tensor> outputs_;
};

class CpuGraphPool final : public GraphPool {
 public:
  std::unique_ptr<DeviceGraph> capture(
      DeviceGraph::Work work,
      const std::vector<at::Generator>& generators) override {
    // Draws of a recording never happened.
    std::vector<at::Generator> drawn{at::detail::getDefaultCPUGenerator()};
    drawn.insert(drawn.end(), generators.begin(), generators.end());
    const RestoreGenerators when_done(states_of(drawn));
    auto graph = std::make_unique<CpuGraph>(std::move(work));
    for (const at::Tensor& output : graph->outputs()) {
      nbytes_ += output.defined() ? static_cast<std::int64_t>(output.nbytes())
                                  : std::int64_t{0};
    }
    return graph;
  }
  void make_room() override {}
  std::int64_t nbytes() const override { return nbytes_; }

 private:
  std::int64_t nbytes_ = 0;
};

}  // namespace

std::shared_ptr<GraphPool> make_graph_pool(at::Device device, bool audited) {
  if (device.is_cuda()) {
    return detail::make_cuda_graph_pool(device, audited);
  }
  return std::make_shared<CpuGraphPool>();
}

}  // namespace flatshard
