#include "flatshard/nn/recompute.h"

#include "flatshard/core/log.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cuda_ops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor state_of(const at::Generator& generator) {
  at::Generator g = generator;
  const std::lock_guard lock(g.mutex());
  return g.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

using GeneratorStates = std::vector<std::pair<at::Generator, at::Tensor>>;

// Everything that fn may draw from.
GeneratorStates capture(Module& owner, const TensorList& inputs) {
  GeneratorStates states;
  const auto add = [&](const at::Generator& generator) {
    for (const auto& [seen, state] : states) {
      if (seen == generator) {
        return;
      }
    }
    states.emplace_back(generator, state_of(generator));
  };
  add(at::detail::getDefaultCPUGenerator());
  for (const at::Tensor& input : inputs) {
    if (const auto generator = cuda::default_generator(input.device())) {
      add(*generator);
    }
  }
  for (const auto& module : owner.modules()) {
    if (const auto* ours = dynamic_cast<const Module*>(module.get())) {
      for (const at::Generator& generator : ours->own_generators()) {
        add(generator);
      }
    }
  }
  return states;
}

// Drops generators that fn did not move: nothing to replay there, and the
// default one is shared with other threads.
void keep_moved(GeneratorStates& states) {
  std::erase_if(states, [](const auto& entry) {
    return at::equal(entry.second, state_of(entry.first));
  });
}

// Sets generators back to saved states and restores them when it ends.
class Replay {
 public:
  explicit Replay(const GeneratorStates& states) {
    for (const auto& [generator, state] : states) {
      before_.emplace_back(generator, state_of(generator));
      set_state(generator, state);
    }
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;
  ~Replay() {
    for (const auto& [generator, state] : before_) {
      set_state(generator, state);
    }
  }

 private:
  GeneratorStates before_;
};

// What the node keeps beside the saved inputs.
struct Recipe : torch::CustomClassHolder {
  std::shared_ptr<torch::nn::Module> keep_alive;
  Module* owner = nullptr;  // kept alive by the line above, or by the caller
  RecomputeFn fn;
  GeneratorStates states;
};

// recompute_end also comes after an exception.
class Notice {
 public:
  explicit Notice(Module& owner)
      : owner_(owner), listener_(owner.context()->recompute_listener.lock()) {
    if (listener_) {
      listener_->recompute_begin(owner_);
    }
  }
  Notice(const Notice&) = delete;
  Notice& operator=(const Notice&) = delete;
  ~Notice() {
    if (!listener_) {
      return;
    }
    try {
      listener_->recompute_end(owner_);
    } catch (const std::exception& e) {
      log_error("recompute_end of {} threw: {}", owner_.name(), e.what());
    }
  }

 private:
  Module& owner_;
  std::shared_ptr<RecomputeListener> listener_;
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
      recipe->states = capture(*recipe->owner, args);
    }
    const auto versions = versions_of(args);
    TensorList outputs = recipe->fn(args);
    FLATSHARD_CHECK(
        versions_of(args) == versions,
        usage,
        "checkpoint: the function wrote into its inputs (an in-place "
        "operation), which its second run would see; let it work on a copy");
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
        "expected backward() over all leaves, got an inputs= list: recompute "
        "cannot honour it; turn activation checkpointing off");
    const auto capsule = ctx->saved_data["recipe"].toCapsule();
    auto& recipe = static_cast<Recipe&>(*capsule);
    TensorList args = ctx->get_saved_variables();
    for (at::Tensor& arg : args) {
      const bool wants_grad = arg.requires_grad();
      arg = arg.detach();
      arg.set_requires_grad(wants_grad);
    }
    const Notice notice(*recipe.owner);
    TensorList outputs;
    {
      const Replay replay(recipe.states);
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

TensorList checkpoint(
    Module& owner,
    RecomputeFn fn,
    const TensorList& inputs,
    RecomputeOptions options) {
  if (!at::GradMode::is_enabled()) {
    return fn(inputs);
  }
  // With inputs that need no gradient the node would not be part of the graph
  // and the parameters inside would silently get none.
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
