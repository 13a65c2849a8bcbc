#include "flatshard/nn/recompute.h"

#include "flatshard/core/log.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/module_generators.h"
#include "flatshard/nn/second_run.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <limits>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

thread_local int first_runs = 0;  // open on this thread
thread_local KeptTensors* kept_now = nullptr;
thread_local bool second_run_now = false;

// The state of the node, in addition to its saved inputs.
struct Recipe : torch::CustomClassHolder {
  std::shared_ptr<torch::nn::Module> keep_alive;
  Module* owner = nullptr;  // kept alive by the line above, or by the caller
  RecomputeFn fn;
  GeneratorStates states;
  bool keeps = false;
  KeptTensors kept;  // without tensors between both runs
  SecondRunTensors tensors;
  std::ptrdiff_t num_inputs = 0;
};

std::vector<std::uint32_t> versions_of(const TensorList& tensors) {
  std::vector<std::uint32_t> versions;
  for (const at::Tensor& tensor : tensors) {
    const bool has_one = tensor.defined() && !tensor.is_inference();
    versions.push_back(has_one ? tensor._version() : 0);
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
      const KeptTensors::Scope scope(recipe->keeps ? &recipe->kept : nullptr);
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
    recipe->num_inputs = static_cast<std::ptrdiff_t>(args.size());
    TensorList saved = args;
    for (at::Tensor& tensor : recipe->kept.take_tensors()) {
      saved.push_back(std::move(tensor));
    }
    recipe->tensors.keep(*ctx, *recipe->owner, inputs, std::move(saved));
    ctx->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_nested_backward();
    const auto capsule = ctx->saved_data["recipe"].toCapsule();
    auto& recipe = static_cast<Recipe&>(*capsule);
    TensorList args = recipe.tensors.take(*ctx);
    const auto kept = args.begin() + recipe.num_inputs;
    recipe.kept.set_tensors({kept, args.end()});
    args.erase(kept, args.end());
    notify_recompute(*recipe.owner);
    variable_list out = differentiate_again(
        [&recipe](const TensorList& in) {
          const RestoreGenerators before = redraw_numbers(recipe.states);
          const KeptTensors::Scope scope(recipe.keeps ? &recipe.kept : nullptr);
          recipe.kept.begin_second_run();
          TensorList outputs = recipe.fn(in);
          recipe.kept.take_tensors();
          return outputs;
        },
        std::move(args),
        grads);
    recipe.tensors.done();
    out.resize(out.size() + 3);  // anchor, recipe, preserve_rng
    return out;
  }
};

bool any_requires_grad(at::TensorList tensors) {
  return std::any_of(
      tensors.begin(),
      tensors.end(),
      [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

}  // namespace

FirstRun::FirstRun() : not_second_(false) {
  ++first_runs;
}

FirstRun::~FirstRun() {
  --first_runs;
}

SecondRun::SecondRun(bool is_one)
    : outer_(std::exchange(second_run_now, is_one)) {
}

SecondRun::~SecondRun() {
  second_run_now = outer_;
}

bool in_checkpointed_forward() {
  return first_runs > 0;
}

bool in_second_run() {
  return second_run_now;
}

at::Tensor without_values(
    at::IntArrayRef sizes,
    const at::TensorOptions& options) {
  const at::Tensor nan =
      at::full({1}, std::numeric_limits<double>::quiet_NaN(), options);
  return nan.expand(sizes);
}

TensorList with_anchor(Module& owner, const TensorList& inputs) {
  const bool needs_anchor =
      !any_requires_grad(inputs) && any_requires_grad(owner.parameters());
  at::Tensor anchor = at::empty({0});
  anchor.set_requires_grad(needs_anchor);
  TensorList all = inputs;
  all.push_back(anchor);
  return all;
}

void check_nested_backward() {
  refuse_create_graph("checkpoint");
  FLATSHARD_CHECK(
      torch::autograd::Engine::get_default_engine().is_checkpoint_valid(),
      usage,
      "expected backward() over all leaves, got an inputs= list: "
      "recomputation does not support it; turn activation checkpointing off");
}

void notify_recompute(Module& owner) {
  if (const auto listener = owner.context()->recompute_listener.lock()) {
    listener->recompute_begin(owner);
  }
}

void SecondRunTensors::keep(
    AutogradContext& ctx,
    Module& owner,
    at::TensorList inputs,
    TensorList tensors) {
  require_grad_.clear();
  for (const at::Tensor& tensor : tensors) {
    require_grad_.push_back(tensor.defined() && tensor.requires_grad());
  }
  const auto listener = owner.context()->recompute_listener.lock();
  if (listener && any_requires_grad(inputs)) {
    stored_ = listener->store(tensors);
  }
  ctx.save_for_backward(std::move(tensors));
}

TensorList SecondRunTensors::take(AutogradContext& ctx) {
  TensorList tensors = ctx.get_saved_variables();
  if (stored_) {
    stored_->restore(tensors);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (require_grad_[i] && !tensors[i].requires_grad()) {
        tensors[i].set_requires_grad(true);
      }
    }
  }
  return tensors;
}

void SecondRunTensors::done() {
  // With retain_graph another backward may follow.
  if (stored_ && !torch::autograd::get_current_graph_task_keep_graph()) {
    stored_->done();
    stored_.reset();
  }
}

TensorList differentiate_again(
    const RecomputeFn& fn,
    TensorList args,
    const TensorList& grads) {
  // The accumulators stay alive because a listener identifies an argument that
  // a module returns unchanged by its node.
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
  TensorList outputs;
  {
    const at::AutoGradMode grad_mode(true);
    const SecondRun second;
    outputs = fn(args);
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
  TensorList found;
  for (const at::Tensor& arg : args) {
    found.push_back(arg.requires_grad() ? arg.grad() : at::Tensor());
  }
  return found;
}

KeptTensors::Scope::Scope(KeptTensors* kept)
    : outer_(std::exchange(kept_now, kept)) {
}

KeptTensors::Scope::~Scope() {
  kept_now = outer_;
}

void KeptTensors::begin_first_run() {
  *this = KeptTensors();
}

void KeptTensors::check_unchanged() const {
  FLATSHARD_CHECK(
      is_second_run_ || tensors_.empty() || versions_of(tensors_) == versions_,
      usage,
      "recompute: the first run wrote into a kept result of attention. The "
      "second run needs the result from before the write; write into a copy, "
      "or "
      "remove attention from activation_checkpoint.save");
}

void KeptTensors::set_tensors(TensorList tensors) {
  tensors_ = std::move(tensors);
  // Their owner checked for writes; a stored copy has other versions.
  versions_ = versions_of(tensors_);
}

TensorList KeptTensors::take_tensors() {
  check_unchanged();
  return std::exchange(tensors_, {});
}

void KeptTensors::begin_second_run() {
  check_unchanged();
  is_second_run_ = true;
  next_entry_ = 0;
  next_tensor_ = 0;
}

bool keeps_results() {
  return kept_now != nullptr;
}

TensorList keep_once(
    const char* what,
    const std::function<TensorList()>& compute) {
  KeptTensors* const kept = kept_now;
  if (kept == nullptr) {
    return compute();
  }
  if (!kept->is_second_run_) {
    TensorList results = compute();
    kept->entries_.push_back({what, results.size()});
    kept->tensors_.insert(kept->tensors_.end(), results.begin(), results.end());
    const auto versions = versions_of(results);
    kept->versions_.insert(
        kept->versions_.end(),
        versions.begin(),
        versions.end());
    return results;
  }
  const bool has_one = kept->next_entry_ < kept->entries_.size();
  const KeptTensors::Entry found = has_one ? kept->entries_[kept->next_entry_++]
                                           : KeptTensors::Entry{"nothing", 0};
  FLATSHARD_CHECK(
      has_one && std::strcmp(found.what, what) == 0,
      usage,
      "recompute: the second run asks for the kept result of {}, the first run "
      "kept {}; let both runs call the same layers",
      what,
      found.what);
  TensorList results;
  for (std::size_t i = 0; i < found.num_tensors; ++i) {
    const at::Tensor& result = kept->tensors_[kept->next_tensor_++];
    // Another tensor over the same memory, because autograd writes into its
    // users' results.
    results.push_back(result.defined() ? result.variable_data() : at::Tensor());
  }
  return results;
}

TensorList checkpoint(
    Module& owner,
    RecomputeFn fn,
    const TensorList& inputs,
    RecomputeOptions options) {
  if (!at::GradMode::is_enabled()) {
    // It may be inside a part that keeps results. The second run of that part
    // comes here with gradients, and asks for none of this part.
    const KeptTensors::Scope none(nullptr);
    const SecondRun not_second(false);
    return fn(inputs);
  }
  auto recipe = c10::make_intrusive<Recipe>();
  recipe->keep_alive = owner.weak_from_this().lock();
  recipe->owner = &owner;
  recipe->fn = std::move(fn);
  recipe->keeps = options.keep_attention;
  return CheckpointFunction::apply(
      at::TensorList(with_anchor(owner, inputs)),
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
