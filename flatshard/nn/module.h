#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "flatshard/core/init_spec.h"
#include "flatshard/nn/hooks.h"
#include "flatshard/nn/visit.h"
#include "flatshard/nn/wgrad.h"

#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::nn {

/// A module's data about one of its parameters in addition to the tensor.
struct ParameterInfo {
  InitSpec init;
  /// Layers read it through nn::WeightSource, so it may be FP8.
  bool reads_planes = false;
  /// Free text of the user, e.g. {"weight_decay", "none"}.
  std::map<std::string, std::string> attributes;
};

/// torch::nn::Module with parameters that are declared before they have memory,
/// forward hooks, and a way for layers to hand out weight gradients. It is
/// independent of sharding. Not copyable; use the holders of FLATSHARD_MODULE.
class Module : public torch::nn::Module {
 public:
  using PreHook = std::function<void(Module&, const TensorList& inputs)>;
  using Hook = std::function<
      void(Module&, const TensorList& inputs, const TensorList& outputs)>;
  using ErrorHook = std::function<void(Module&, std::exception_ptr& error)>;

  Module();
  explicit Module(std::string name);
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// Registers a float32 parameter on the meta device: it has a shape but no
  /// memory until `set_parameter_data`. That call keeps the tensor object, so a
  /// layer may keep the returned tensor as a member.
  at::Tensor declare_parameter(
      std::string name,
      std::vector<std::int64_t> shape,
      InitSpec init,
      bool requires_grad = true);

  /// Registers `owner`'s parameter here too (tied weights): one tensor, two
  /// names, one ParameterInfo (a copy).
  at::Tensor share_parameter(
      std::string name,
      const Module& owner,
      const std::string& owner_name);

  /// Accepts this module's own parameters (names without dots).
  /// @throws Error{usage} for a name that was not declared here.
  const ParameterInfo& parameter_info(const std::string& name) const;
  /// Returns the same, or null for an unknown name or one that was registered
  /// with plain `register_parameter`.
  const ParameterInfo* find_parameter_info(const std::string& name) const;
  const InitSpec& init_spec(const std::string& name) const {
    return parameter_info(name).init;
  }
  void set_init_spec(const std::string& name, InitSpec init);
  /// See ParameterInfo::reads_planes.
  void set_reads_planes(const std::string& name);
  void
  set_attribute(const std::string& name, std::string key, std::string value);

  /// Runs before forward when the module is called through its holder. A call
  /// of `forward` itself runs no hooks. `inputs` are the defined tensors of
  /// the arguments (see for_each_tensor), never wrapped or copied.
  HookHandle add_forward_pre_hook(PreHook hook);
  /// Runs after forward with the tensors of its result.
  /// @param reads_values  of the result; false: it uses only the graph. In the
  ///   second run of a recomputed part, the module that makes the part's own
  ///   result, and the last layer in it, compute no values. Their hooks that
  ///   read them run in the first run only.
  HookHandle add_forward_hook(Hook hook, bool reads_values = true);
  /// Runs when a pre-hook, forward or a forward hook throws; the exception
  /// then continues, or the one that the hook puts in its place. An exception
  /// of an error hook itself is logged.
  HookHandle add_forward_error_hook(ErrorHook hook);

  /// The sink for this module's own parameters (not its children's), as a weak
  /// reference; nullptr removes it. Also reaches graphs that exist already.
  void set_wgrad_sink(const std::shared_ptr<WgradSink>& sink);
  /// Gives this module's own layers the FP8 planes of their weights. The
  /// reference is weak.
  void set_weight_source(const std::shared_ptr<WeightSource>& source);
  /// Is notified of recomputations that this module owns. A weak reference.
  void set_recompute_listener(
      const std::shared_ptr<RecomputeListener>& listener);

  /// Runs the regions that this module owns (nn/region.h). A weak reference.
  void set_region_runner(const std::shared_ptr<RegionRunner>& runner);

  /// Explicit generators that this module's own forward draws from, without its
  /// children. Recomputation replays them.
  virtual std::vector<at::Generator> own_generators() const { return {}; }

  /// Returns the context that autograd nodes of layers keep.
  const ModuleContextPtr& context() const { return context_; }

  /// Used by the holder's operator().
  bool has_forward_hooks() const {
    return !pre_hooks_.empty() || !hooks_.empty() || !error_hooks_.empty();
  }
  std::size_t num_forward_hooks() const {
    return pre_hooks_.size() + hooks_.size() + error_hooks_.size();
  }
  /// Returns true if only pre-forward hooks are registered.
  bool has_only_pre_hooks() const {
    return hooks_.empty() && error_hooks_.empty();
  }
  /// Returns whether hooks follow its calls, like hooks of units, that read
  /// no values.
  bool is_followed() const {
    return !error_hooks_.empty() || !hooks_.all_read_values();
  }
  /// A forward calls it if nothing reads the values of its result.
  void set_result_unread(bool is_unread) { result_is_unread_ = is_unread; }
  void run_forward_pre_hooks(const TensorList& inputs) {
    pre_hooks_.run(*this, inputs);
  }
  void run_forward_hooks(const TensorList& inputs, const TensorList& outputs) {
    hooks_.run_some(!result_is_unread_, *this, inputs, outputs);
  }
  /// @return  what continues.
  std::exception_ptr run_forward_error_hooks(std::exception_ptr error) noexcept;
  /// Returns whether a call has found memory for all parameters below.
  bool has_memory() const { return has_memory_; }
  /// @throws Error{usage} naming a parameter that was declared and never got
  /// memory, when `inputs` have some.
  void check_memory(const TensorList& inputs);

 private:
  std::map<std::string, ParameterInfo> infos_;
  HookList<Module&, const TensorList&> pre_hooks_;
  HookList<Module&, const TensorList&, const TensorList&> hooks_;
  HookList<Module&, std::exception_ptr&> error_hooks_;
  bool has_memory_ = false;
  bool result_is_unread_ = false;
  ModuleContextPtr context_;
};

/// Makes `parameter` (also a meta one) show `data`'s storage, shape, dtype and
/// device. The tensor object, requires_grad and every copy of the handle stay.
/// Unlike `set_data` it accepts a parameter on the meta device.
void set_parameter_data(at::Tensor parameter, const at::Tensor& data);

/// One parameter under one of its names.
struct NamedParameter {
  std::string name;  ///< dotted, from the root
  at::Tensor tensor;
  /// Null for parameters of plain torch modules. The module owns it.
  const ParameterInfo* info = nullptr;
  /// The module that registered it. The root owns it.
  torch::nn::Module* owner = nullptr;
};

/// Returns all parameters below `root` in registration order, a module's own
/// before its children's. A tied one appears under each of its names (the first
/// is its main name).
std::vector<NamedParameter> named_parameters(torch::nn::Module& root);

using ParameterFill =
    std::function<void(const std::string&, const InitSpec&, at::Tensor&)>;

/// Gives every parameter without memory its own tensor, for unsharded use, and
/// fills it (under no_grad): fill(main name, InitSpec, tensor).
void materialize(
    torch::nn::Module& root,
    at::Device device,
    at::ScalarType dtype,
    const ParameterFill& fill);

/// Fills from `generator` (or the default one): a ParameterFill for programs
/// that need no world-size independent values.
ParameterFill random_fill(std::optional<at::Generator> generator = {});

/// forward(args...) with hooks around it.
template <std::derived_from<Module> M, class... Args>
decltype(auto) call_with_hooks(M& module, Args&&... args) {
  if (!module.has_memory()) [[unlikely]] {
    module.check_memory(collect_tensors(args...));
  }
  if (!module.has_forward_hooks()) {
    return module.forward(std::forward<Args>(args)...);
  }
  using Result = decltype(module.forward(std::forward<Args>(args)...));
  try {
    const TensorList inputs = collect_tensors(args...);
    module.run_forward_pre_hooks(inputs);
    if constexpr (std::is_void_v<Result>) {
      module.forward(std::forward<Args>(args)...);
      module.run_forward_hooks(inputs, {});
    } else {
      decltype(auto) result = module.forward(std::forward<Args>(args)...);
      module.run_forward_hooks(inputs, collect_tensors(result));
      return static_cast<Result>(std::forward<Result>(result));
    }
  } catch (...) {
    std::rethrow_exception(
        module.run_forward_error_hooks(std::current_exception()));
  }
}

/// Like torch::nn::ModuleHolder (a shared_ptr with value syntax); its call
/// operator runs the module's hooks.
template <class Impl>
class ModuleHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    return call_with_hooks(
        const_cast<Impl&>(*this->get()),
        std::forward<Args>(args)...);
  }
};

}  // namespace flatshard::nn

/// After `class BlockImpl : public flatshard::nn::Module`: defines the holder
/// `Block`. `block(x)` runs hooks and forward.
#define FLATSHARD_MODULE(Name)                                     \
  class Name : public ::flatshard::nn::ModuleHolder<Name##Impl> {  \
   public:                                                         \
    using ::flatshard::nn::ModuleHolder<Name##Impl>::ModuleHolder; \
    using Impl [[maybe_unused]] = Name##Impl;                      \
  }
