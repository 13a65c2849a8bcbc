#include "flatshard/nn/module.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/ops/parameter_check.h"

#include <algorithm>

namespace flatshard::nn {

Module::Module() : context_(c10::make_intrusive<ModuleContext>()) {
}

Module::Module(std::string name)
    : torch::nn::Module(std::move(name)),
      context_(c10::make_intrusive<ModuleContext>()) {
}

at::Tensor Module::declare_parameter(
    std::string name,
    std::vector<std::int64_t> shape,
    InitSpec init,
    bool requires_grad) {
  at::Tensor parameter =
      at::empty(shape, at::TensorOptions().device(at::kMeta).dtype(at::kFloat));
  register_parameter(name, parameter, requires_grad);
  infos_[name] = ParameterInfo{.init = init, .attributes = {}};
  has_memory_ = false;
  return parameter;
}

at::Tensor Module::share_parameter(
    std::string name,
    const Module& owner,
    const std::string& owner_name) {
  const ParameterInfo& info = owner.parameter_info(owner_name);
  const at::Tensor* parameter =
      const_cast<Module&>(owner).parameters_.find(owner_name);
  FLATSHARD_CHECK(
      parameter != nullptr,
      internal,
      "parameter '{}' is gone",
      owner_name);
  register_parameter(name, *parameter, parameter->requires_grad());
  infos_[name] = info;
  // Whether its sharer does is unknown.
  infos_[name].reads_planes = false;
  return *parameter;
}

const ParameterInfo& Module::parameter_info(const std::string& name) const {
  const ParameterInfo* info = find_parameter_info(name);
  FLATSHARD_CHECK(
      info != nullptr,
      usage,
      "expected a parameter declared by module {}, got '{}'",
      this->name(),
      name);
  return *info;
}

const ParameterInfo* Module::find_parameter_info(
    const std::string& name) const {
  const auto found = infos_.find(name);
  return found == infos_.end() ? nullptr : &found->second;
}

void Module::set_init_spec(const std::string& name, InitSpec init) {
  const_cast<ParameterInfo&>(parameter_info(name)).init = init;
}

void Module::set_reads_planes(const std::string& name) {
  const_cast<ParameterInfo&>(parameter_info(name)).reads_planes = true;
}

void Module::set_attribute(
    const std::string& name,
    std::string key,
    std::string value) {
  const_cast<ParameterInfo&>(parameter_info(name)).attributes[std::move(key)] =
      std::move(value);
}

HookHandle Module::add_forward_pre_hook(PreHook hook) {
  return pre_hooks_.add(std::move(hook));
}

HookHandle Module::add_forward_hook(Hook hook, bool reads_values) {
  return hooks_.add(std::move(hook), reads_values);
}

HookHandle Module::add_forward_error_hook(ErrorHook hook) {
  return error_hooks_.add(std::move(hook));
}

void Module::set_wgrad_sink(const std::shared_ptr<WgradSink>& sink) {
  context_->wgrad_sink = sink;
}

void Module::set_weight_source(const std::shared_ptr<WeightSource>& source) {
  context_->weight_source = source;
}

void Module::set_recompute_listener(
    const std::shared_ptr<RecomputeListener>& listener) {
  context_->recompute_listener = listener;
}

void Module::set_region_runner(const std::shared_ptr<RegionRunner>& runner) {
  context_->region_runner = runner;
}

std::exception_ptr Module::run_forward_error_hooks(
    std::exception_ptr error) noexcept {
  try {
    error_hooks_.run(*this, error);
  } catch (const std::exception& e) {
    // The first exception is on its way to the caller. It must not be lost.
    log_error("forward error hook of {} threw: {}", name(), e.what());
  }
  return error;
}

void Module::check_memory(const TensorList& inputs) {
  const bool has_inputs =
      std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& input) {
        return !input.is_meta();
      });
  for (const NamedParameter& p : nn::named_parameters(*this)) {
    if (!p.tensor.is_meta()) {
      continue;
    }
    if (has_inputs) {
      refuse_without_memory(p.name, name(), p.tensor);
    }
    return;  // only shapes were requested
  }
  has_memory_ = true;
}

void set_parameter_data(at::Tensor parameter, const at::Tensor& data) {
  FLATSHARD_CHECK(
      parameter.sizes() == data.sizes(),
      usage,
      "expected data of the parameter's shape {}, got {}",
      c10::str(parameter.sizes()),
      c10::str(data.sizes()));
  if (parameter.is_meta() && !data.is_meta()) {
    // set_data does not allow a change of tensor type from meta, though its own
    // work is this same shallow copy. The set_data below then drops a gradient
    // accumulator that was made for the meta device.
    parameter.unsafeGetTensorImpl()->shallow_copy_from(
        data.detach().getIntrusivePtr());
  }
  parameter.set_data(data.detach());
}

namespace {

void collect(
    torch::nn::Module& module,
    const std::string& prefix,
    std::vector<NamedParameter>& found) {
  const auto* ours = dynamic_cast<const Module*>(&module);
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    found.push_back(
        {.name = prefix + item.key(),
         .tensor = item.value(),
         .info = ours ? ours->find_parameter_info(item.key()) : nullptr,
         .owner = &module});
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", found);
  }
}

}  // namespace

std::vector<NamedParameter> named_parameters(torch::nn::Module& root) {
  std::vector<NamedParameter> found;
  collect(root, "", found);
  return found;
}

void materialize(
    torch::nn::Module& root,
    at::Device device,
    at::ScalarType dtype,
    const ParameterFill& fill) {
  const at::NoGradGuard no_grad;
  for (NamedParameter& parameter : named_parameters(root)) {
    if (!parameter.tensor.is_meta()) {
      continue;  // filled before, under its main name
    }
    FLATSHARD_CHECK(
        parameter.info != nullptr,
        usage,
        "expected a declared parameter, got '{}' of a plain torch module on "
        "the meta device",
        parameter.name);
    set_parameter_data(
        parameter.tensor,
        at::empty(
            parameter.tensor.sizes(),
            at::TensorOptions().device(device).dtype(dtype)));
    fill(parameter.name, parameter.info->init, parameter.tensor);
  }
}

ParameterFill random_fill(std::optional<at::Generator> generator) {
  return [generator](const std::string&, const InitSpec& init, at::Tensor& t) {
    switch (init.kind) {
      case InitSpec::Kind::zeros:
        t.zero_();
        return;
      case InitSpec::Kind::ones:
        t.fill_(1);
        return;
      case InitSpec::Kind::normal:
        t.normal_(init.mean, init.stddev, generator);
        return;
      case InitSpec::Kind::uniform:
        t.uniform_(init.low, init.high, generator);
        return;
    }
  };
}

}  // namespace flatshard::nn
