#pragma once

#include "flatshard/plan/step.h"

#include <string>

namespace flatshard::plan {

/// Draws the streams of a step over time: the full step, and an enlarged part
/// of its backward. 1280 pixels wide; light or dark as the viewer prefers.
/// @param title     e.g. "llama3_8b on 8 x NVIDIA H100".
/// @param subtitle  e.g. "a step of 760 ms, 58 % MFU".
std::string to_svg(
    const StepPlan& step,
    const std::string& title,
    const std::string& subtitle = {});

}  // namespace flatshard::plan
