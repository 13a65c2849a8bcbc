#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace flatshard {

/// While it exists, tensor operations of this thread belong to no transform of
/// torch.func (jvp, vjp, vmap): weights that are unsharded inside one belong to
/// the model, and not to the function that is transformed.
class OutsideOfTransforms {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

}  // namespace flatshard
