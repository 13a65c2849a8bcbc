#pragma once

#include "flatshard/nn/visit.h"
#include "python/csrc/bind.h"

namespace flatshard::python {

/// Collects the tensors inside `object`: a tensor, any nesting of tuples,
/// lists, dicts and dataclasses, and the containers of torch.utils._pytree
/// (ModelOutput). In order. Called with the GIL.
void collect_tensors(py::handle object, nn::TensorList& out);

}  // namespace flatshard::python
