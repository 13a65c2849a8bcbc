#include "flatshard/autograd/explain_dtype.h"

#include "flatshard/core/error.h"
#include "flatshard/ops/parameter_check.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cctype>
#include <string>

namespace flatshard {
namespace {

std::string advice(const Unit& unit, const UnitParameter& p) {
  const char* dtype =
      c10::toString(unit.groups()[p.group]->options().precision.compute);
  return fmt::format(
      "parameter {} of unit {} is unsharded as {} "
      "(FullyShardOptions::precision.compute): give the unit inputs of that "
      "dtype, e.g. x.to(at::k{}), or choose another Precision, such as "
      "Precision::full()",
      p.name,
      unit.name(),
      dtype,
      dtype);
}

bool contains_ignoring_case(const std::string& text, const std::string& word) {
  const auto same_letter = [](char a, char b) {
    return std::tolower(a) == std::tolower(b);
  };
  return std::search(
             text.begin(),
             text.end(),
             word.begin(),
             word.end(),
             same_letter) != text.end();
}

}  // namespace

void explain_dtype(
    std::exception_ptr& error,
    UnitId id,
    const AutogradEvents::Units& units,
    const AutogradEvents& events) {
  try {
    std::rethrow_exception(error);
  } catch (const nn::ParameterMismatch& e) {
    if (const ParameterRef* const found = events.find(e.parameter())) {
      Unit& owner = *units[found->unit];
      error = std::make_exception_ptr(Error(
          e.code(),
          fmt::format(
              "{}; {}",
              e.message(),
              advice(owner, owner.parameters()[found->index]))));
    }
  } catch (const c10::Error& e) {
    const std::string text = e.what_without_backtrace();
    Unit& unit = *units[id];
    if (text.find("type") != std::string::npos && !unit.parameters().empty()) {
      const UnitParameter& p = unit.parameters().front();
      const std::string dtype =
          c10::toString(unit.groups()[p.group]->options().precision.compute);
      if (contains_ignoring_case(text, dtype)) {
        error = std::make_exception_ptr(Error(
            ErrorCode::usage,
            fmt::format("{}; {}", text, advice(unit, p))));
      }
    }
  } catch (...) {
    // It speaks for itself.
  }
}

}  // namespace flatshard
