#include "flatshard/train/run/expert_loads.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "flatshard/comm/collective_scope.h"

namespace flatshard {
namespace {

// Returns this rank's ExpertLoads::loads_. All routers ran in the same
// forwards, with the same options. A few kernels serve all of them: in a logged
// step nothing else is queued.
at::Tensor rows_of(const std::vector<models::RouterLoad>& loads) {
  const auto of_all = [&](at::Tensor models::RouterLoad::*member) {
    std::vector<at::Tensor> tensors;
    for (const models::RouterLoad& load : loads) {
      tensors.push_back(load.*member);
    }
    return at::stack(tensors).to(at::kDouble);
  };
  const models::RouterLoad& first = loads.front();
  const at::Tensor counts = of_all(&models::RouterLoad::counts);
  const std::int64_t n = counts.size(0);
  const at::Tensor kept =
      first.kept.defined() ? of_all(&models::RouterLoad::kept) : counts.sum(1);
  const at::Tensor balance = first.balance.defined()
                                 ? of_all(&models::RouterLoad::balance)
                                 : at::zeros({n}, counts.options());
  const at::Tensor measured =
      at::full({n}, static_cast<double>(first.measured), counts.options());
  return at::cat({counts, at::stack({kept, balance, measured}, 1)}, 1);
}

}  // namespace

ExpertLoads::ExpertLoads(
    double balance_rate,
    models::Llama model,
    std::shared_ptr<StreamExchange> exchange,
    std::shared_ptr<Mesh> mesh)
    : balance_rate_(balance_rate),
      mesh_(std::move(mesh)),
      model_(std::move(model)),
      exchange_(std::move(exchange)),
      routers_(model_->routers()) {
}

std::vector<WholeTensor> ExpertLoads::buffers() const {
  std::vector<WholeTensor> found;
  for (const models::RouterOf& of : routers_) {
    if (of.router->bias().defined()) {
      found.push_back({of.bias_name(), of.router->bias()});
    }
  }
  return found;
}

void ExpertLoads::begin_step(bool logged) {
  for (const models::RouterOf& of : routers_) {
    of.router->set_measures_balance(logged);
  }
  if (exchange_) {
    exchange_->measure(logged);
  }
}

void ExpertLoads::discard_step() {
  loads_ = at::Tensor();
  for (const models::RouterOf& of : routers_) {
    of.router->take_load();
  }
}

void ExpertLoads::end_step(bool logged) {
  if (routers_.empty() || (!logged && balance_rate_ == 0)) {
    discard_step();
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<models::RouterLoad> taken;
  for (const models::RouterOf& of : routers_) {
    taken.push_back(of.router->take_load());
  }
  const at::Tensor loads = rows_of(taken);
  if (mesh_->size() > 1) {
    const CollectiveScope scope("experts' loads");
    mesh_->world(Purpose::reduce).all_reduce(loads, ReduceOp::sum);
  }
  for (std::size_t i = 0; balance_rate_ > 0 && i < routers_.size(); ++i) {
    models::RouterImpl& router = *routers_[i].router;
    router.update_bias(
        loads[static_cast<std::int64_t>(i)].narrow(0, 0, router.num_experts()),
        balance_rate_);
  }
  if (logged) {
    loads_ = loads;
  }
}

std::optional<ExpertMetrics> ExpertLoads::metrics() {
  if (!loads_.defined()) {
    return std::nullopt;
  }
  const at::Tensor loads = loads_.cpu();
  mesh_->check();  // an aborted collective ends without a result
  const std::int64_t n = loads.size(1) - 3;
  const at::Tensor counts = loads.narrow(1, 0, n);
  const at::Tensor chosen = counts.sum(1);
  const at::Tensor dropped = 1 - loads.select(1, n) / chosen;
  ExpertMetrics metrics{
      .load = (counts.amax(1) / counts.mean(1)).max().item<double>(),
      .dropped = dropped.max().item<double>(),
      .balance = (loads.select(1, n + 1) / loads.select(1, n + 2))
                     .mean()
                     .item<double>()};
  if (exchange_) {
    exchange_->measure(false);
    metrics.exchange_ms = exchange_->wait_and_take_exposed_ms();
  }
  std::vector<at::Tensor> biases;
  for (const models::RouterOf& of : routers_) {
    if (of.router->bias().defined()) {
      biases.push_back(of.router->bias().abs().max());
    }
  }
  if (!biases.empty()) {  // at::max keeps a NaN, std::max may drop it
    metrics.bias = at::stack(biases).max().item<double>();
  }
  return metrics;
}

}  // namespace flatshard
