#include "flatshard/nn/lora/adapter.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/matmul.h"
#include "flatshard/nn/parallel/parallel_products.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::vector<std::int64_t> ranks_of(const std::vector<at::Tensor>& all_a) {
  std::vector<std::int64_t> ranks;
  for (const at::Tensor& a : all_a) {
    ranks.push_back(a.size(0));
  }
  return ranks;
}

// Returns the columns of each adapter.
std::vector<at::Tensor> columns_of(
    const at::Tensor& low,
    const std::vector<at::Tensor>& all_a) {
  return low.split_with_sizes(ranks_of(all_a), 1);
}

at::Tensor dropped(const AdapterCalls::Call& call, const at::Tensor& x) {
  return call.dropout
             ? call.dropout->apply(x, call.dropout_key, call.dropout_column)
             : x;
}

// sum += a b. An undefined sum is set.
void add_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (sum.defined()) {
    at::addmm_out(sum, sum, a, b);
  } else {
    sum = at::mm(a, b);
  }
}

// out = scale * a b, scaled inside the matmul.
void scaled_product(
    at::Tensor out,
    double scale,
    const at::Tensor& a,
    const at::Tensor& b) {
  at::addmm_out(out, out, a, b, /*beta=*/0, /*alpha=*/scale);
}

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
  keep_part(weight_, part);
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

bool AdapterCalls::are_joint() const {
  return calls_.size() > 1 &&
         std::ranges::all_of(calls_, [&](const Call& call) {
           return !call.dropout && call.scale == calls_.front().scale;
         });
}

AdapterForward::AdapterForward(
    const AdapterCallsPtr& calls,
    at::TensorList factors,
    const MatmulRows& x)
    : calls_(calls), factors_(factors), x_(x) {
  if (!calls_) {
    return;
  }
  std::vector<at::Tensor> all_a;
  std::int64_t ranks = 0;
  for (std::size_t i = 0; i < factors_.size(); i += 2) {
    all_a.push_back(factors_[i]);
    ranks += factors_[i].size(0);
  }
  const at::Tensor& rows = x.tensor();
  low_ = at::empty({rows.size(0), ranks}, rows.options());
  if (calls_->are_joint()) {
    scaled_product(low_, calls_->all().front().scale, rows, at::cat(all_a).t());
    return;
  }
  const std::vector<at::Tensor> lows = columns_of(low_, all_a);
  for (std::size_t i = 0; i < lows.size(); ++i) {
    const AdapterCalls::Call& call = calls_->all()[i];
    scaled_product(lows[i], call.scale, dropped(call, rows), all_a[i].t());
  }
}

void AdapterForward::add(std::size_t layer, at::Tensor& y) const {
  std::int64_t begin = 0;
  for (std::size_t i = 0; calls_ && i < calls_->all().size(); ++i) {
    const at::Tensor& b = factors_[2 * i + 1];
    if (calls_->all()[i].layer == layer) {
      add_product(y, low_.narrow(1, begin, b.size(1)), b.t());
    }
    begin += b.size(1);
  }
}

at::Tensor AdapterForward::matmul(
    std::size_t layer,
    const at::Tensor& weight,
    const ModuleContextPtr& context,
    const at::Tensor& bias,
    const at::Tensor& residual) const {
  at::Tensor y;
  if (!bias.defined() && !residual.defined()) {
    add(layer, y);
  }
  if (y.defined()) {
    add_matmul(y, x_, weight, context);
  } else {
    y = matmul_forward(x_, weight, context, bias, residual);
    add(layer, y);
  }
  return y;
}

at::Tensor AdapterForward::matmul_and_scatter(
    const TensorParallelPtr& ranks,
    const at::Tensor& weight,
    const ModuleContextPtr& context,
    const at::Tensor& bias,
    const at::Tensor& residual) const {
  if (ranks && !calls_ && !is_float8(weight, context)) {
    return multiply_and_scatter(*ranks, x_.tensor(), weight.t());
  }
  const at::Tensor y = matmul(0, weight, context, bias, residual);
  return ranks ? ranks->reduce_scatter(y) : y;
}

void AdapterForward::save(AutogradContext* ctx, variable_list& saved) const {
  if (!calls_) {
    return;
  }
  node_state(ctx).adapters = calls_;
  saved.insert(saved.end(), factors_.begin(), factors_.end());
  saved.push_back(low_);
}

AdapterBackward::AdapterBackward(AutogradContext* ctx, variable_list& saved)
    : ctx_(ctx) {
  const NodeState* const state = find_node_state(ctx);
  if (state == nullptr || !state->adapters) {
    return;
  }
  refuse_create_graph("a layer with an adapter");
  calls_ = AdapterCallsPtr::reclaim_copy(
      static_cast<AdapterCalls*>(state->adapters.get()));
  low_ = saved.back();
  const std::size_t first = saved.size() - 1 - 2 * calls_->all().size();
  for (std::size_t at = first; at + 1 < saved.size(); at += 2) {
    parts_.push_back({.a = saved[at], .b = saved[at + 1]});
  }
  const std::vector<at::Tensor> lows = columns_of(low_, factors_a());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    parts_[i].low = lows[i];
  }
  saved.resize(first);
}

std::vector<at::Tensor> AdapterBackward::factors_a() const {
  std::vector<at::Tensor> all;
  for (const Part& part : parts_) {
    all.push_back(part.a);
  }
  return all;
}

bool AdapterBackward::wants(std::size_t call, std::size_t factor) const {
  return ctx_->needs_input_grad(places_.edge + 2 * call + factor);
}

void AdapterBackward::begin(at::TensorList g, variable_list& out) {
  if (!calls_) {
    return;
  }
  low_gradient_ = at::empty_like(low_);
  const std::vector<at::Tensor> gradients =
      columns_of(low_gradient_, factors_a());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const AdapterCalls::Call& call = calls_->all()[i];
    Part& part = parts_[i];
    part.low_gradient = gradients[i];
    part.has_gradient = g[call.layer].defined();
    if (!part.has_gradient) {
      part.low_gradient.zero_();
      continue;
    }
    const at::Tensor rows = as_rows(g[call.layer]);
    scaled_product(part.low_gradient, call.scale, rows, part.b);
    if (wants(i, 1)) {
      out[places_.out + 2 * i + 1] = deliver_matmul_wgrad(
          call.b_context,
          part.b,
          gradient_rows(rows, /*both=*/false),
          MatmulRows(part.low));
    }
  }
}

void AdapterBackward::add_input_gradient(at::Tensor& dx) const {
  if (!calls_) {
    return;
  }
  if (calls_->are_joint()) {
    add_product(dx, low_gradient_, at::cat(factors_a()));
    return;
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const AdapterCalls::Call& call = calls_->all()[i];
    const Part& part = parts_[i];
    if (!part.has_gradient) {
      continue;
    }
    if (!call.dropout) {
      add_product(dx, part.low_gradient, part.a);
      continue;
    }
    const at::Tensor read = at::mm(part.low_gradient, part.a);
    if (dx.defined()) {
      call.dropout->add(read, call.dropout_key, dx, call.dropout_column);
    } else {
      dx = dropped(call, read);
    }
  }
}

bool AdapterBackward::wants_input(std::size_t layer) const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (calls_->all()[i].layer == layer) {
      return wants(i, 0);
    }
  }
  return false;
}

void AdapterBackward::end(const at::Tensor& x, variable_list& out) const {
  std::vector<at::Tensor> joint;
  at::Tensor rows;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    if (!part.has_gradient || !wants(i, 0)) {
      continue;
    }
    if (!rows.defined()) {
      rows = as_rows(x);
      if (calls_->are_joint()) {
        joint = at::mm(low_gradient_.t(), rows)
                    .split_with_sizes(ranks_of(factors_a()), 0);
      }
    }
    const AdapterCalls::Call& call = calls_->all()[i];
    out[places_.out + 2 * i] =
        !joint.empty()
            ? deliver_wgrad(call.a_context, part.a, [&] { return joint[i]; })
            : deliver_matmul_wgrad(
                  call.a_context,
                  part.a,
                  gradient_rows(part.low_gradient, /*both=*/false),
                  MatmulRows(dropped(call, rows)));
  }
}

}  // namespace flatshard::nn
