#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace flatshard {

/// Properties of the running backward. Source of the rules: torch's autograd
/// engine (torch/csrc/autograd/engine.cpp, graph_task.h).
namespace autograd_task {

/// Id of the graph task that runs on this thread, -1 outside any backward.
std::int64_t current_id();

/// Returns whether the running graph task will run `node`. Known exactly at the
/// task's first event: the engine has collected its nodes by then. False for
/// the accumulator of a parameter whose gradient autograd::grad hands out
/// instead.
bool expects(torch::autograd::Node* node);

/// Returns whether the caller chose what gets gradients: backward(inputs=) or
/// grad().
bool has_chosen_inputs();

/// Runs `on_end` when the current graph task ends. After an exception it does
/// not run; then the returned token expires without it.
std::weak_ptr<void> at_end(std::function<void()> on_end);

}  // namespace autograd_task
}  // namespace flatshard
