#pragma once

#include "flatshard/nn/visit.h"
#include "python/csrc/bind.h"

namespace flatshard::python {

/// The tensors inside `object`: a tensor, any nesting of tuples, lists, dicts
/// and dataclasses, and what torch.utils._pytree knows (ModelOutput). In order.
/// With the GIL.
void collect_tensors(py::handle object, nn::TensorList& out);

}  // namespace flatshard::python
