#include "flatshard/nn/recompute.h"

#include "flatshard/core/log.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/first_run.h"
#include "flatshard/nn/module_generators.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

thread_local int first_runs = 0;  // open on this thread

// The state of the node, in addition to its saved inputs.
struct Recipe : torch::CustomClassHolder {
  std::shared_ptr<torch::nn::Module> keep_alive;
  Module* owner = nullptr;  // kept alive by the line above, or by the caller
  RecomputeFn fn;
  GeneratorStates states;
};

std::vector<std::uint32_t> versions_of(const TensorList& tensors) {
  std::vector<std::uint32_t> versions;
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(tensor.is_inference() ? 0 : tensor._version());
  }
  return versions;
}

struct CheckpointFunction : torch::autograd::Function<CheckpointFunction> {
  // inputs ends with an anchor; see checkpoint().
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList inputs,
      const c10::intrusive_ptr<Recipe>& recipe,
      bool preserve_rng) {
    const TensorList args(inputs.begin(), inputs.end() - 1);
    if (preserve_rng) {
      recipe->states = generator_states(*recipe->owner, args);
    }
    const auto versions = versions_of(args);
    TensorList outputs = [&] {
      const FirstRun first;
      return recipe->fn(args);
    }();
    FLATSHARD_CHECK(
        versions_of(args) == versions,
        usage,
        "checkpoint: the function modified its inputs in place, so its "
        "recomputation would see other values; let it work on a copy");
    if (preserve_rng) {
      keep_moved(recipe->states);
    }
    // An output that is an input would make autograd see an identity; hand
    // out another tensor over the same memory.
    for (at::Tensor& output : outputs) {
      for (const at::Tensor& arg : args) {
        if (output.is_same(arg)) {
          output = reshape_result(output, output.sizes());
          break;
        }
      }
    }
    ctx->saved_data["recipe"] = c10::IValue::make_capsule(recipe);
    ctx->save_for_backward(args);
    ctx->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("checkpoint");
    FLATSHARD_CHECK(
        torch::autograd::Engine::get_default_engine().is_checkpoint_valid(),
        usage,
        "expected backward() over all leaves, got an inputs= list: "
        "recomputation does not support it; turn activation checkpointing off");
    const auto capsule = ctx->saved_data["recipe"].toCapsule();
    auto& recipe = static_cast<Recipe&>(*capsule);
    TensorList args = ctx->get_saved_variables();
    // The accumulators stay alive because a listener identifies an argument
    // that a module returns unchanged by its node.
    using torch::autograd::impl::grad_accumulator;
    std::vector<decltype(grad_accumulator(args[0]))> accumulators;
    for (at::Tensor& arg : args) {
      const bool wants_grad = arg.requires_grad();
      arg = arg.detach();
      arg.set_requires_grad(wants_grad);
      if (wants_grad) {
        accumulators.push_back(grad_accumulator(arg));
      }
    }
    if (const auto listener =
            recipe.owner->context()->recompute_listener.lock()) {
      listener->recompute_begin(*recipe.owner);
    }
    TensorList outputs;
    {
      const RestoreGenerators before = redraw_numbers(recipe.states);
      const at::AutoGradMode grad_mode(true);
      outputs = recipe.fn(args);
    }
    FLATSHARD_CHECK(
        outputs.size() == grads.size(),
        usage,
        "recompute: expected {} outputs as in forward, got {}",
        grads.size(),
        outputs.size());
    TensorList roots;
    TensorList root_grads;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (grads[i].defined() && outputs[i].requires_grad()) {
        roots.push_back(outputs[i]);
        root_grads.push_back(grads[i]);
      }
    }
    outputs.clear();
    if (!roots.empty()) {
      torch::autograd::backward(roots, root_grads);
    }
    variable_list out;
    for (const at::Tensor& arg : args) {
      out.push_back(arg.requires_grad() ? arg.grad() : at::Tensor());
    }
    out.resize(args.size() + 3);  // anchor, recipe, preserve_rng
    return out;
  }
};

bool any_requires_grad(const TensorList& tensors) {
  return std::any_of(
      tensors.begin(),
      tensors.end(),
      [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

}  // namespace

FirstRun::FirstRun() {
  ++first_runs;
}

FirstRun::~FirstRun() {
  --first_runs;
}

bool in_checkpointed_forward() {
  return first_runs > 0;
}

TensorList checkpoint(
    Module& owner,
    RecomputeFn fn,
    const TensorList& inputs,
    RecomputeOptions options) {
  if (!at::GradMode::is_enabled()) {
    return fn(inputs);
  }
  // If no input needed a gradient, the node would not be part of the graph and
  // the parameters inside would silently get none.
  const bool needs_anchor =
      !any_requires_grad(inputs) && any_requires_grad(owner.parameters());
  at::Tensor anchor = at::empty({0});
  anchor.set_requires_grad(needs_anchor);
  TensorList all = inputs;
  all.push_back(anchor);
  auto recipe = c10::make_intrusive<Recipe>();
  recipe->keep_alive = owner.weak_from_this().lock();
  recipe->owner = &owner;
  recipe->fn = std::move(fn);
  return CheckpointFunction::apply(
      at::TensorList(all),
      recipe,
      options.preserve_rng);
}

at::Tensor checkpoint(
    Module& owner,
    std::function<at::Tensor(const at::Tensor&)> fn,
    const at::Tensor& input,
    RecomputeOptions options) {
  return checkpoint(
      owner,
      RecomputeFn([fn = std::move(fn)](const TensorList& in) {
        return TensorList{fn(in.at(0))};
      }),
      TensorList{input},
      options)[0];
}

}  // namespace flatshard::nn
