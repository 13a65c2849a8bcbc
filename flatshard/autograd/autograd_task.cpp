#include "flatshard/autograd/autograd_task.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace flatshard::autograd_task {

std::int64_t current_id() {
  return torch::autograd::get_current_graph_task_id();
}

bool expects(torch::autograd::Node* node) {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (exec_info != nullptr && !exec_info->empty()) {
    const auto found = exec_info->find(node);
    return found != exec_info->end() && found->second.needed_;
  }
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && nodes->count(node) > 0;
}

bool has_chosen_inputs() {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  return exec_info != nullptr && !exec_info->empty();
}

std::weak_ptr<void> at_end(std::function<void()> on_end) {
  // The engine keeps the callback until its graph task is destroyed, so the
  // token exists as long as the task.
  auto token = std::make_shared<std::function<void()>>(std::move(on_end));
  const std::weak_ptr<void> weak = token;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [token] { (*token)(); });
  return weak;
}

}  // namespace flatshard::autograd_task
