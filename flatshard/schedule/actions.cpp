#include "flatshard/schedule/actions.h"

#include <fmt/format.h>

namespace flatshard {

std::string_view to_string(ActionKind kind) {
  switch (kind) {
    case ActionKind::gather:
      return "gather";
    case ActionKind::await:
      return "await";
    case ActionKind::release:
      return "release";
    case ActionKind::acquire_grads:
      return "acquire_grads";
    case ActionKind::reduce:
      return "reduce";
    case ActionKind::accumulate:
      return "accumulate";
    case ActionKind::drain:
      return "drain";
    case ActionKind::join:
      return "join";
  }
  return "unknown";
}

std::string to_string(std::span<const Action> actions) {
  std::string text;
  for (const Action& action : actions) {
    if (!text.empty()) {
      text += ' ';
    }
    text += to_string(action.kind);
    if (action.kind == ActionKind::gather && action.phase == Phase::backward) {
      text += '\'';
    }
    if (action.unit != kNoUnit) {
      text += action.plane == 0
                  ? fmt::format("({})", action.unit)
                  : fmt::format("({}.{})", action.unit, action.plane);
    }
  }
  return text;
}

}  // namespace flatshard
