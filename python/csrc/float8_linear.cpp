#include "python/csrc/float8_linear.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/matmul.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace flatshard::python {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Float8Parameter {
  at::Tensor tensor;  ///< the runtime's tensor
  nn::ModuleContextPtr context;
  std::shared_ptr<SharedRows> rows;
};

/// Whether the calls of this thread may share what they quantize.
thread_local bool shares = false;

class SharingScope {
 public:
  explicit SharingScope(bool value) : before_(std::exchange(shares, value)) {}
  ~SharingScope() { shares = before_; }
  SharingScope(const SharingScope&) = delete;
  SharingScope& operator=(const SharingScope&) = delete;

 private:
  bool before_;
};

SharedRows::Rows rows_of(
    const Float8Parameter& parameter,
    const at::Tensor& x,
    bool in_backward) {
  return shares ? parameter.rows->of(x, in_backward)
                : std::make_shared<const nn::MatmulRows>(nn::as_rows(x));
}

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Float8Parameter> parameters;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

Float8Parameter find(const at::Tensor& weight) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  const auto found = weight.has_storage()
                         ? known.parameters.find(storage_of(weight))
                         : known.parameters.end();
  FLATSHARD_CHECK(
      found != known.parameters.end(),
      usage,
      "float8_linear: expected an unsharded weight [{}] that "
      "fully_shard(fp8=...) stores in FP8, of a model that still exists, got "
      "another tensor",
      fmt::join(weight.sizes(), ", "));
  return found->second;
}

void check_input(const at::Tensor& x, const at::Tensor& weight) {
  FLATSHARD_CHECK(
      x.dim() >= 1 && x.size(-1) == weight.size(1),
      usage,
      "Float8Linear: expected an input [..., {}], got [{}]",
      weight.size(1),
      fmt::join(x.sizes(), ", "));
  FLATSHARD_CHECK(
      x.scalar_type() == weight.scalar_type(),
      usage,
      "Float8Linear: expected an input of {}, the dtype of its weight, got {}: "
      "mp_policy casts the inputs of units, and autocast the inputs of layers",
      c10::toString(weight.scalar_type()),
      c10::toString(x.scalar_type()));
}

at::Tensor forward(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias) {
  check_input(x, weight);
  const Float8Parameter parameter = find(weight);
  const at::Tensor y = nn::matmul_forward(
      *rows_of(parameter, x, /*in_backward=*/false),
      parameter.tensor,
      parameter.context,
      bias.value_or(at::Tensor()));
  return nn::reshape_result(y, nn::with_last(x, weight.size(0)));
}

at::Tensor backward(
    const at::Tensor& grad,
    const std::optional<at::Tensor>& x,
    const at::Tensor& weight,
    bool needs_input) {
  const Float8Parameter parameter = find(weight);
  const nn::MatmulRows g =
      nn::gradient_rows(nn::as_rows(grad), needs_input && x.has_value());
  at::Tensor dx;
  if (needs_input) {
    nn::add_input_gradient(dx, g, parameter.tensor, parameter.context);
    dx = nn::reshape_result(dx, nn::with_last(grad, weight.size(1)));
  } else {
    dx = at::empty({0}, grad.options());
  }
  if (x) {
    // The result is not needed.
    nn::deliver_matmul_wgrad(
        parameter.context,
        parameter.tensor,
        g,
        *rows_of(parameter, *x, /*in_backward=*/true));
  }
  return dx;
}

at::Tensor
shaped_like(const at::Tensor& rows, const c10::SymInt& last, bool none) {
  auto sizes = rows.sym_sizes().vec();
  sizes.back() = last;
  return rows.new_empty_symint(none ? std::vector<c10::SymInt>{0} : sizes);
}

at::Tensor forward_meta(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& /*bias*/) {
  return shaped_like(x, weight.sym_size(0), false);
}

at::Tensor backward_meta(
    const at::Tensor& grad,
    const std::optional<at::Tensor>& /*x*/,
    const at::Tensor& weight,
    bool needs_input) {
  return shaped_like(grad, weight.sym_size(1), !needs_input);
}

struct Float8LinearFunction : torch::autograd::Function<Float8LinearFunction> {
  enum Input { kX, kWeight, kBias };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({weight.requires_grad() ? x : at::Tensor()});
    // Hooks on saved tensors would copy it, and it cannot be read.
    ctx->saved_data["weight"] = weight;
    ctx->saved_data["bias"] = bias.has_value();
    ctx->saved_data["shares"] = shares;
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("flatshard::float8_linear", "")
            .typed<decltype(python::forward)>();
    const at::AutoDispatchBelowAutograd below;
    return op.call(x, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    nn::refuse_create_graph("a linear layer with FP8 weights");
    const at::Tensor& grad = grads[0];
    const at::Tensor x = ctx->get_saved_variables()[0];
    const at::Tensor weight = ctx->saved_data["weight"].toTensor();
    variable_list out(3);
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("flatshard::float8_linear_backward", "")
            .typed<decltype(python::backward)>();
    const bool needs_weight = ctx->needs_input_grad(kWeight);
    if (ctx->needs_input_grad(kX) || needs_weight) {
      const at::AutoDispatchBelowAutograd below;
      const SharingScope sharing(ctx->saved_data["shares"].toBool());
      const at::Tensor dx = op.call(
          grad,
          needs_weight ? std::optional(x) : std::nullopt,
          weight,
          ctx->needs_input_grad(kX));
      if (ctx->needs_input_grad(kX)) {
        out[kX] = dx;
      }
    }
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(kBias)) {
      out[kBias] = grad.dim() > 1 ? grad.flatten(0, -2).sum(0) : grad;
    }
    return out;
  }
};

at::Tensor forward_autograd(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias) {
  return Float8LinearFunction::apply(x, weight, bias);
}

}  // namespace

at::Tensor float8_linear_sharing(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("flatshard::float8_linear", "")
                             .typed<decltype(python::forward)>();
  const SharingScope sharing(true);
  return op.call(x, weight, bias);
}

Float8Weights::Float8Weights(
    const Runtime& runtime,
    const nn::ModuleContextPtr& context,
    const std::shared_ptr<SharedRows>& rows) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  for (const auto& unit : runtime.units()) {
    for (const UnitParameter& p : unit->parameters()) {
      if (!p.storage.has_values()) {
        storages_.push_back(storage_of(p.tensor));
        known.parameters[storages_.back()] = {p.tensor, context, rows};
      }
    }
  }
}

Float8Weights::~Float8Weights() {
  Registry& known = registry();
  std::vector<Float8Parameter> dropped;  // destroyed without the lock
  const std::lock_guard lock(known.mutex);
  for (const c10::StorageImpl* storage : storages_) {
    auto node = known.parameters.extract(storage);
    if (!node.empty()) {
      dropped.push_back(std::move(node.mapped()));
    }
  }
}

TORCH_LIBRARY(flatshard, m) {
  const std::vector<at::Tag> tags{
      at::Tag::pt2_compliant_tag,
      at::Tag::cudagraph_unsafe};
  m.def("float8_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags);
  m.def(
      "float8_linear_backward(Tensor grad, Tensor? x, Tensor weight, "
      "bool needs_input) -> Tensor",
      tags);
}

TORCH_LIBRARY_IMPL(flatshard, CPU, m) {
  m.impl("float8_linear", &forward);
  m.impl("float8_linear_backward", &backward);
}

TORCH_LIBRARY_IMPL(flatshard, CUDA, m) {
  m.impl("float8_linear", &forward);
  m.impl("float8_linear_backward", &backward);
}

TORCH_LIBRARY_IMPL(flatshard, Meta, m) {
  m.impl("float8_linear", &forward_meta);
  m.impl("float8_linear_backward", &backward_meta);
}

TORCH_LIBRARY_IMPL(flatshard, Autograd, m) {
  m.impl("float8_linear", &forward_autograd);
}

}  // namespace flatshard::python
