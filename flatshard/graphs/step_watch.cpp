#include "flatshard/graphs/step_watch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

namespace flatshard {

RegionGraph::Input StepWatch::describe(const at::Tensor& input) const {
  RegionGraph::Input in{
      .sizes = input.sizes().vec(),
      .strides = input.strides().vec(),
      .options = input.options(),
      .requires_grad = input.requires_grad()};
  const auto source = sources_.find(input.const_data_ptr());
  // Another tensor may have been allocated at this address since.
  if (source != sources_.end() && source->second.storage.lock().get() ==
                                      input.storage().unsafeGetStorageImpl()) {
    in.source = source->second.graph;
    in.source_output = source->second.output;
  }
  if (input.grad_fn()) {
    const auto producer =
        producers_.find({input.grad_fn().get(), input.output_nr()});
    if (producer != producers_.end() &&
        producer->second.node.lock() == input.grad_fn()) {
      in.producer = producer->second.graph;
      in.producer_output = producer->second.output;
    }
  }
  return in;
}

void StepWatch::forward_begins(
    const std::shared_ptr<RegionGraph>& graph,
    RegionGraph::Call call,
    const nn::TensorList& inputs) {
  for (const at::Tensor& input : inputs) {
    call.inputs.push_back(describe(input));
  }
  graph->learn(std::move(call));
  ran(graph, /*backward=*/false);
}

void StepWatch::ran(const std::shared_ptr<RegionGraph>& graph, bool backward) {
  const bool again =
      std::any_of(order_.begin(), order_.end(), [&](const Run& run) {
        return run.graph == graph && run.backward == backward;
      });
  if (!again) {
    order_.push_back(
        {graph,
         backward,
         current_slots_ ? current_slots_(graph->unit()) : nullptr});
  }
}

void StepWatch::forward_ended(
    const std::shared_ptr<RegionGraph>& graph,
    const nn::TensorList& inputs,
    const nn::TensorList& outputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].grad_fn()) {
      // The gradient arrives just before the region's backward.
      outputs[i].register_hook(std::function<void(at::Tensor)>(
          [weak = weak_from_this(), graph](const at::Tensor&) {
            const auto self = weak.lock();
            if (self && !self->stopped_) {
              self->ran(graph, /*backward=*/true);
            }
          }));
      producers_.insert_or_assign(
          {outputs[i].grad_fn().get(), outputs[i].output_nr()},
          Producer{outputs[i].grad_fn(), graph, i});
    }
    if (std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& in) {
          return in.const_data_ptr() == outputs[i].const_data_ptr();
        })) {
      continue;  // somebody else wrote it
    }
    sources_.insert_or_assign(
        outputs[i].const_data_ptr(),
        Source{outputs[i].storage().getWeakStorageImpl(), graph, i});
  }
}

std::vector<RegionGraph::Consumer> StepWatch::consumers_of(
    const std::shared_ptr<RegionGraph>& graph) const {
  std::vector<RegionGraph::Consumer> consumers(graph->num_outputs());
  for (std::size_t output = 0; output < consumers.size(); ++output) {
    int count = 0;
    for (const auto& [other, backward, slots] : order_) {
      if (backward || !other->with_grad()) {
        continue;
      }
      const auto& inputs = other->call().inputs;
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (inputs[i].producer == graph &&
            inputs[i].producer_output == output) {
          consumers[output] = {other, i};
          ++count;
        }
      }
    }
    if (count != 1) {
      consumers[output] = {};
    }
  }
  return consumers;
}

void StepWatch::forget() {
  order_.clear();
  sources_.clear();
  producers_.clear();
}

}  // namespace flatshard
