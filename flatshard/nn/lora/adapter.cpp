#include "flatshard/nn/lora/adapter.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/matmul.h"

#include <ATen/ATen.h>

#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kCalls = "adapters";
constexpr std::size_t kSavedEach = 3;  // A, B, low

}  // namespace

LoraFactorImpl::LoraFactorImpl(std::int64_t out, std::int64_t in, InitSpec init)
    : Module("LoraFactor") {
  weight_ = declare_parameter("weight", {out, in}, init);
}

LoraFactorImpl::LoraFactorImpl(const LoraFactorImpl& shared)
    : Module("LoraFactor") {
  weight_ = share_parameter("weight", shared, "weight");
}

void LoraFactorImpl::take(const ParameterPart& part) {
  weight_.set_data(weight_.detach()
                       .narrow(part.dim, part.part.begin, part.part.size())
                       .contiguous());
  parts_["weight"] = part;
}

AdapterCallsPtr AdapterCalls::of(const std::vector<const Adapter*>& layers) {
  AdapterCallsPtr calls;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] == nullptr) {
      continue;
    }
    if (!calls) {
      calls = c10::make_intrusive<AdapterCalls>();
    }
    const Adapter& adapter = *layers[i];
    calls->calls_.push_back(
        {.layer = i,
         .scale = adapter.scale,
         .a_context = adapter.a->context(),
         .b_context = adapter.b->context(),
         .dropout = adapter.dropout,
         .dropout_key = adapter.dropout_key,
         .dropout_column = adapter.dropout_column});
  }
  return calls;
}

std::vector<at::Tensor> adapter_factors(
    const std::vector<const Adapter*>& layers) {
  std::vector<at::Tensor> factors;
  for (const Adapter* adapter : layers) {
    if (adapter != nullptr) {
      factors.push_back(adapter->a->weight());
      factors.push_back(adapter->b->weight());
    }
  }
  return factors;
}

AdapterForward::AdapterForward(
    const AdapterCallsPtr& calls,
    at::TensorList factors)
    : calls_(calls), factors_(factors) {
}

void AdapterForward::add(
    std::size_t layer,
    const at::Tensor& x,
    at::Tensor& y) {
  // Layers come in order, and so do their adapters.
  const std::size_t i = low_.size();
  if (!calls_ || i == calls_->all().size() || calls_->all()[i].layer != layer) {
    return;
  }
  const AdapterCalls::Call& call = calls_->all()[i];
  const at::Tensor dropped =
      call.dropout
          ? call.dropout->apply(x, call.dropout_key, call.dropout_column)
          : x;
  const at::Tensor low = at::mm(dropped, factors_[2 * i].t()).mul_(call.scale);
  at::addmm_out(y, y, low, factors_[2 * i + 1].t());
  low_.push_back(low);
}

void AdapterForward::save(AutogradContext* ctx, variable_list& saved) {
  if (!calls_) {
    return;
  }
  ctx->saved_data[kCalls] = c10::IValue::make_capsule(calls_);
  for (std::size_t i = 0; i < low_.size(); ++i) {
    saved.push_back(factors_[2 * i]);
    saved.push_back(factors_[2 * i + 1]);
    saved.push_back(low_[i]);
  }
}

AdapterBackward::AdapterBackward(AutogradContext* ctx, variable_list& saved)
    : ctx_(ctx) {
  const auto found = ctx->saved_data.find(kCalls);
  if (found == ctx->saved_data.end()) {
    return;
  }
  refuse_create_graph("a layer with an adapter");
  calls_ = AdapterCallsPtr::reclaim_copy(
      static_cast<AdapterCalls*>(found->second.toCapsule().get()));
  const std::size_t first = saved.size() - kSavedEach * calls_->all().size();
  for (std::size_t at = first; at < saved.size(); at += kSavedEach) {
    parts_.push_back({saved[at], saved[at + 1], saved[at + 2], {}});
  }
  saved.resize(first);
}

int AdapterBackward::find(std::size_t layer) const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (calls_->all()[i].layer == layer) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

bool AdapterBackward::wants(int call, std::size_t factor) const {
  return ctx_->needs_input_grad(
      places_.edge + 2 * static_cast<std::size_t>(call) + factor);
}

void AdapterBackward::begin(
    std::size_t layer,
    const at::Tensor& g,
    variable_list& out) {
  const int i = find(layer);
  if (i < 0) {
    return;
  }
  const AdapterCalls::Call& call = calls_->all()[i];
  Part& part = parts_[i];
  const at::Tensor rows = as_rows(g);
  part.low_gradient = at::mm(rows, part.b).mul_(call.scale);
  if (wants(i, 1)) {
    out[places_.out + 2 * i + 1] = deliver_matmul_wgrad(
        call.b_context,
        part.b,
        gradient_rows(rows, /*both=*/false),
        MatmulRows(part.low));
  }
}

void AdapterBackward::add_input_gradient(std::size_t layer, at::Tensor& dx) {
  const int i = find(layer);
  if (i < 0) {
    return;
  }
  const AdapterCalls::Call& call = calls_->all()[i];
  const Part& part = parts_[i];
  if (call.dropout) {
    call.dropout->add(
        at::mm(part.low_gradient, part.a),
        call.dropout_key,
        dx,
        call.dropout_column);
  } else {
    at::addmm_out(dx, dx, part.low_gradient, part.a);
  }
}

bool AdapterBackward::wants_input(std::size_t layer) const {
  const int i = find(layer);
  return i >= 0 && wants(i, 0);
}

void AdapterBackward::end(
    std::size_t layer,
    const at::Tensor& x,
    variable_list& out) {
  const int i = find(layer);
  if (i < 0 || !wants(i, 0) || !parts_[i].low_gradient.defined()) {
    return;
  }
  const AdapterCalls::Call& call = calls_->all()[i];
  const at::Tensor rows = as_rows(x);
  out[places_.out + 2 * i] = deliver_matmul_wgrad(
      call.a_context,
      parts_[i].a,
      gradient_rows(parts_[i].low_gradient, /*both=*/false),
      MatmulRows(
          call.dropout
              ? call.dropout->apply(rows, call.dropout_key, call.dropout_column)
              : rows));
}

}  // namespace flatshard::nn
