#pragma once

#include "flatshard/plan/step.h"

#include <string>

namespace flatshard::plan {

/// What a picture is titled with.
struct PictureText {
  std::string title;     ///< e.g. "llama3_8b on 8 x NVIDIA H100"
  std::string subtitle;  ///< e.g. "a step of 760 ms, 58 % MFU"
};

/// Draws the streams of a step over time: the whole of it, and a part of its
/// backward enlarged. 1280 pixels wide; light or dark as the viewer prefers.
std::string to_svg(const StepPlan& step, const PictureText& text);

}  // namespace flatshard::plan
