#include "flatshard/nn/token_runs.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/second_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct TokenRuns : torch::CustomClassHolder {
  std::shared_ptr<torch::nn::Module> keep_alive;
  Module* owner = nullptr;  // kept alive by the line above, or by the caller
  RecomputeFn fn;
  TokenRunsOptions options;
  SecondRunTensors tensors;
};

/// Calls visit(first, n) for each run.
template <class F>
void for_each_run(std::int64_t tokens, std::int64_t of_run, F&& visit) {
  for (std::int64_t first = 0; first < tokens; first += of_run) {
    visit(first, std::min(of_run, tokens - first));
  }
}

/// [..., dim] as [1, tokens, dim]
at::Tensor in_one_row(const at::Tensor& x) {
  return as_rows(x).unsqueeze(0);
}

TensorList
run_of(const TensorList& inputs, std::int64_t first, std::int64_t n) {
  TensorList run;
  for (const at::Tensor& input : inputs) {
    run.push_back(input.narrow(1, first, n));
  }
  return run;
}

at::Tensor one_after_the_other(
    const TokenRuns& runs,
    const TensorList& inputs) {
  TensorList rows;
  for (const at::Tensor& input : inputs) {
    rows.push_back(in_one_row(input));
  }
  const KeptTensors::Scope none(nullptr);  // each run is a part of its own
  at::Tensor out = at::empty(inputs[0].sizes(), inputs[0].options());
  const at::Tensor out_row = in_one_row(out);
  for_each_run(
      rows[0].size(1),
      runs.options.tokens,
      [&](std::int64_t first, std::int64_t n) {
        out_row.narrow(1, first, n)
            .copy_(runs.fn(run_of(rows, first, n)).at(0));
      });
  return out;
}

/// Adds gradients of runs in float32 that a sink stores in 16 bits. The sink
/// gets them in the last run.
class SumSink : public WgradSink {
 public:
  explicit SumSink(std::shared_ptr<WgradSink> sink) : sink_(std::move(sink)) {}

  void begin_last_run() { is_last_run_ = true; }
  const std::shared_ptr<WgradSink>& sink() const { return sink_; }

  std::optional<WgradTarget> begin_wgrad(const at::Tensor& parameter) override {
    auto target = sink_->begin_wgrad(parameter);
    constexpr auto kWidest = static_cast<std::int64_t>(sizeof(at::BFloat16));
    if (!target || target->grad.element_size() > kWidest) {
      return target;
    }
    Sum& sum = sums_[parameter.unsafeGetTensorImpl()];
    const bool adds = sum.grad.defined();
    if (!adds) {
      sum.grad = at::empty(
          target->grad.sizes(),
          target->grad.options().dtype(at::kFloat));
    }
    sum.target = *std::move(target);
    return WgradTarget{.grad = sum.grad, .accumulate = adds};
  }

  void end_wgrad(const at::Tensor& parameter) override {
    const auto found = sums_.find(parameter.unsafeGetTensorImpl());
    if (found == sums_.end()) {
      sink_->end_wgrad(parameter);
      return;
    }
    if (!is_last_run_) {
      return;
    }
    const auto& [sum, target] = found->second;
    target.accumulate ? target.grad.add_(sum) : target.grad.copy_(sum);
    sink_->end_wgrad(parameter);
    sums_.erase(found);
  }

 private:
  struct Sum {
    at::Tensor grad;
    WgradTarget target;
  };
  std::shared_ptr<WgradSink> sink_;
  std::unordered_map<const c10::TensorImpl*, Sum> sums_;
  bool is_last_run_ = false;
};

/// While it exists, the layers of some modules use a SumSink.
class SumScope {
 public:
  explicit SumScope(const TokenRuns& runs) {
    add(*runs.owner);
    for (Module* module : runs.options.others) {
      add(*module);
    }
  }
  ~SumScope() {
    for (const ModuleContextPtr& context : contexts_) {
      context->wgrad_sink = sum_->sink();
    }
  }
  SumScope(const SumScope&) = delete;
  SumScope& operator=(const SumScope&) = delete;

  void begin_last_run() {
    if (sum_) {
      sum_->begin_last_run();
    }
  }

 private:
  void add(Module& root) {
    for (const auto& module : root.modules()) {
      auto* const ours = dynamic_cast<Module*>(module.get());
      const auto sink = ours ? ours->context()->wgrad_sink.lock() : nullptr;
      if (!sink) {
        continue;
      }
      if (!sum_) {
        sum_ = std::make_shared<SumSink>(sink);
      }
      if (sink == sum_->sink()) {
        contexts_.push_back(ours->context());
        ours->context()->wgrad_sink = sum_;
      }
    }
  }

  std::shared_ptr<SumSink> sum_;
  std::vector<ModuleContextPtr> contexts_;
};

struct TokenRunsFunction : torch::autograd::Function<TokenRunsFunction> {
  // inputs ends with an anchor, see `checkpoint`.
  static at::Tensor forward(
      AutogradContext* ctx,
      at::TensorList inputs,
      const c10::intrusive_ptr<TokenRuns>& runs) {
    const TensorList args(inputs.begin(), inputs.end() - 1);
    runs->tensors.keep(*ctx, *runs->owner, inputs, args);
    ctx->saved_data["runs"] = c10::IValue::make_capsule(runs);
    if (in_second_run() && runs->options.is_result_of_part) {
      return without_values(args[0].sizes(), args[0].options());
    }
    const FirstRun first;
    return one_after_the_other(*runs, args);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_nested_backward();
    const auto capsule = ctx->saved_data["runs"].toCapsule();
    auto& runs = static_cast<TokenRuns&>(*capsule);
    const TensorList args = runs.tensors.take(*ctx);
    notify_recompute(*runs.owner);
    TensorList rows;
    variable_list out;
    TensorList out_rows;
    for (const at::Tensor& arg : args) {
      const bool wants_grad = arg.requires_grad();
      rows.push_back(in_one_row(arg.detach()));
      out.push_back(
          wants_grad ? at::empty(arg.sizes(), arg.options()) : at::Tensor());
      out_rows.push_back(wants_grad ? in_one_row(out.back()) : at::Tensor());
    }
    const at::Tensor grad = in_one_row(grads[0]);
    const std::int64_t tokens = rows[0].size(1);
    std::optional<SumScope> sums;
    if (tokens > runs.options.tokens) {
      sums.emplace(runs);
    }
    for_each_run(
        tokens,
        runs.options.tokens,
        [&](std::int64_t first, std::int64_t n) {
          if (sums && first + n == tokens) {
            sums->begin_last_run();
          }
          TensorList run = run_of(rows, first, n);
          for (std::size_t i = 0; i < run.size(); ++i) {
            run[i] = run[i].detach().set_requires_grad(out[i].defined());
          }
          const TensorList of_run = differentiate_again(
              runs.fn,
              std::move(run),
              {grad.narrow(1, first, n)});
          for (std::size_t i = 0; i < of_run.size(); ++i) {
            if (out[i].defined()) {
              at::Tensor to = out_rows[i].narrow(1, first, n);
              of_run[i].defined() ? to.copy_(of_run[i]) : to.zero_();
            }
          }
        });
    runs.tensors.done();
    out.resize(args.size() + 2);  // anchor, runs
    return out;
  }
};

}  // namespace

at::Tensor in_token_runs(
    Module& owner,
    RecomputeFn fn,
    const TensorList& inputs,
    TokenRunsOptions options) {
  FLATSHARD_CHECK(
      options.tokens > 0,
      usage,
      "in_token_runs: expected runs of at least one token, got {}",
      options.tokens);
  auto runs = c10::make_intrusive<TokenRuns>();
  runs->keep_alive = owner.weak_from_this().lock();
  runs->owner = &owner;
  runs->fn = std::move(fn);
  runs->options = options;
  if (!at::GradMode::is_enabled()) {
    const SecondRun not_second(false);
    return one_after_the_other(*runs, inputs);
  }
  return TokenRunsFunction::apply(
      at::TensorList(with_anchor(owner, inputs)),
      runs);
}

}  // namespace flatshard::nn
