#pragma once

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/group/group_options.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace flatshard {

/// The gradient that a group's optimizer reads, [shard] like main: who owns its
/// memory, its dtype, and what is kept between steps. Its values come from
/// GradientPipeline, on the reduce stream.
class ReducedGradient {
 public:
  /// @param context  outlives this.
  explicit ReducedGradient(const GroupContext& context) : context_(context) {}

  /// Returns whether it exists since the last drop().
  bool exists() const;
  /// exists(), or it did when others got it.
  bool is_somebodys() const { return owner_ != Owner::none; }
  /// Returns whether others own it: take_back() comes first.
  bool is_given() const { return owner_ == Owner::others; }
  /// In main_grads, or see ParamGroupOptions::grads_in_reduce_dtype. Undefined
  /// from drop() to the next reduction.
  /// @throws Error{internal} while others own it.
  const FlatBuffer& buffer() const;
  at::Tensor local() const { return buffer().local(); }

  /// Leaves it to the other owners of its tensor: it is freed when the last of
  /// them drops it. Called between steps, when users see gradients as their own
  /// tensors. A gradient in host memory stays, since pinning it again is slower
  /// than a step.
  void give_up();
  /// Recovers what is left of it: before a reduction and before buffer().
  void take_back();
  /// It is gone; what was accumulated without a reduction joins the next one.
  void drop();

  struct Space {
    bool add = false;    ///< to the existing one
    bool widen = false;  ///< convert the existing one from the reduce dtype
                         ///< first
  };
  /// Room for the sum of one reduction more, allocated on the current stream.
  /// @param is_last  of the step.
  Space make_space(bool is_last);
  /// Space::widen, on the reduce stream.
  void widen() const;
  /// On the current stream.
  void scale(double factor);

  /// For graphs of steps: its memory, and its memory before it was widened;
  /// undefined if not allocated.
  struct Contents {
    at::Tensor reduced, in_reduce_dtype;
    bool exists = false;
  };
  Contents contents() const;
  void put(const Contents& contents);

  std::int64_t nbytes() const;

 private:
  enum class Owner {
    none,    ///< there is none
    us,      ///< `reduced_`
    others,  ///< `given_`, for as long as they keep it
  };
  void check_owned() const;
  FlatBuffer wrap(at::Tensor tensor) const;

  const GroupContext& context_;
  Owner owner_ = Owner::none;
  FlatBuffer reduced_;
  FlatBuffer in_reduce_dtype_;   ///< what reduced_ was before it was widened
  FlatBuffer kept_host_memory_;  ///< offload: reduced_'s between steps
  std::optional<
      c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>>
      given_;
};

}  // namespace flatshard
