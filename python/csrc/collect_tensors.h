#pragma once

#include "flatshard/nn/visit.h"
#include "python/csrc/bind.h"

#include <vector>

namespace flatshard::python {

/// Collects the tensors inside `object`: a tensor, any nesting of tuples,
/// lists, dicts and dataclasses, and the containers of torch.utils._pytree
/// (ModelOutput). In order. Called with the GIL.
/// @param opaque  gets the objects of other types. They may contain tensors,
/// too.
void collect_tensors(
    py::handle object,
    nn::TensorList& out,
    std::vector<py::object>* opaque = nullptr);

}  // namespace flatshard::python
