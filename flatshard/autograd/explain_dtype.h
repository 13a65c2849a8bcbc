#pragma once

#include "flatshard/autograd/autograd_events.h"

#include <exception>

namespace flatshard {

/// torch's error about two dtypes that do not fit names no parameter. Puts an
/// Error{usage} that names one, and the option to change, in the place of
/// `error` if that is what it is about.
///
/// @param unit  whose forward ended with `error`; one of `units`.
/// @param events  finds the parameters of `units` by their tensors.
void explain_dtype(
    std::exception_ptr& error,
    UnitId unit,
    const AutogradEvents::Units& units,
    const AutogradEvents& events);

}  // namespace flatshard
