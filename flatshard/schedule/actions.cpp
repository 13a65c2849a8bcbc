#include "flatshard/schedule/actions.h"

#include <fmt/format.h>

namespace flatshard {

std::string_view to_string(ActionKind kind) {
  switch (kind) {
    case ActionKind::gather:
      return "gather";
    case ActionKind::derive:
      return "derive";
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
    case ActionKind::download:
      return "download";
    case ActionKind::drain_download:
      return "drain_download";
    case ActionKind::upload:
      return "upload";
    case ActionKind::await_upload:
      return "await_upload";
    case ActionKind::release_kept:
      return "release_kept";
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
    const bool fills =
        action.kind == ActionKind::gather || action.kind == ActionKind::derive;
    if (fills && action.phase == Phase::backward) {
      text += '\'';
    }
    if (action.unit != kNoUnit) {
      text += fmt::format("({}", action.unit);
      text += action.plane == 0 ? "" : fmt::format(".{}", action.plane);
      text += action.part == kWhole ? "" : fmt::format(":{}", action.part);
      text += action.from_post_forward ? " post_forward" : "";
      text += ')';
    }
  }
  return text;
}

}  // namespace flatshard
