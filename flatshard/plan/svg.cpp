#include "flatshard/plan/svg.h"

#include "flatshard/core/escape_markup.h"
#include "flatshard/core/words.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace flatshard::plan {
namespace {

constexpr double kWidth = 1280;
constexpr double kLeft = 112;
constexpr double kRight = 24;
constexpr double kTop = 96;
constexpr double kLane = 40;
constexpr double kBar = 28;
constexpr double kPanelGap = 84;
constexpr double kLegend = 76;
constexpr double kThin = 3;         ///< pixels of a bar that may join others
constexpr double kSmallest = 0.6;   ///< pixels of a bar that is drawn
constexpr double kCharacter = 6.4;  ///< pixels, about
constexpr double kZoom = 12;
/// Start of the enlarged part, as a fraction of the step.
constexpr double kZoomFrom = 0.62;

/// A kind of operations: CSS class, and its text in the legend.
struct Style {
  std::string_view name;
  std::string_view text;
};
constexpr std::string_view kHostStyle = "h";
constexpr std::array<Style, 10> kStyles{{
    {"f", "forward"},
    {"r", "recompute"},
    {"b", "backward"},
    {"w", "weight gradients"},
    {"o", "optimizer, gradient norm"},
    {"g", "all-gather"},
    {"s", "reduce"},
    {"x", "tokens to experts"},
    {"t", "tensor parallelism"},
    {kHostStyle, "the host launches the step"},
}};
constexpr Word<std::string_view> kStyleOf[] = {
    {"forward", "f"},
    {"recompute", "r"},
    {"backward", "b"},
    {"weight gradients", "w"},
    {"optimizer", "o"},
    {"Newton-Schulz", "o"},
    {"exchange of matrices", "s"},
    {"gradient norm", "o"},
    {"upload of states", "o"},
    {"download of states", "o"},
    {"save shard", "g"},
    {"all-gather", "g"},
    {"derive columns", "g"},
    {"encode", "g"},
    {"reduce", "s"},
    {"reduce over replicas", "s"},
    {"sum of gradients", "s"},
    {"dispatch", "x"},
    {"combine", "x"},
    {"TP all-gather", "t"},
    {"TP reduce-scatter", "t"}};

constexpr std::string_view kCss = R"(
  svg { background: #ffffff; font: 13px system-ui, sans-serif; }
  text { fill: #1f2328; }
  .title { font-size: 18px; font-weight: 600; }
  .dim { fill: #59636e; }
  .lane { fill: #eef1f4; }
  .tick { stroke: #c5ccd3; stroke-width: 1; }
  .zoom { fill: #0969da; fill-opacity: 0.10; stroke: #0969da; }
  .in { fill: #ffffff; font-size: 12px; pointer-events: none; }
  .f { fill: #2f6fbf; } .r { fill: #7a5bb8; } .b { fill: #b85c1b; }
  .w { fill: #167d84; } .o { fill: #3d7d3a; } .g { fill: #64748b; }
  .s { fill: #b03a48; } .x { fill: #a8428f; } .h { fill: #55609a; }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; }
    text { fill: #e6edf3; }
    .dim { fill: #9198a1; }
    .lane { fill: #1b222b; }
    .tick { stroke: #3d444d; }
    .zoom { fill: #4493f8; fill-opacity: 0.16; stroke: #4493f8; }
    .in { fill: #ffffff; }
    .f { fill: #3b82d6; } .r { fill: #8f6fd0; } .b { fill: #c96a25; }
    .w { fill: #1f9aa3; } .o { fill: #4b9a47; } .g { fill: #7688a0; }
    .s { fill: #c94a58; } .x { fill: #bd54a4; } .h { fill: #6b77b8; }
  }
)";

/// The style of pictures with tensor parallelism.
constexpr std::string_view kTensorCss = R"(
  .t { fill: #8a6d00; }
  @media (prefers-color-scheme: dark) { .t { fill: #a88a1c; } }
)";

std::string_view style_of(std::string_view what) {
  std::string_view style = "f";
  read_word(kStyleOf, what, style);
  return style;
}

/// Returns the spacing of axis ticks: 1, 2 or 5 times a power of ten.
double tick_of(double range) {
  constexpr double kTicks = 10;
  const double rough = range / kTicks;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  const double times = rough / power;
  return power * (times < 1.5 ? 1 : times < 3.5 ? 2 : times < 7.5 ? 5 : 10);
}

class Picture {
 public:
  Picture(
      const StepPlan& step,
      const std::string& title,
      const std::string& subtitle)
      : step_(step), title_(title), subtitle_(subtitle) {
    for (const Stream stream :
         {Stream::compute,
          Stream::gather,
          Stream::reduce,
          Stream::outer,
          Stream::exchange,
          Stream::tensor,
          Stream::upload,
          Stream::download,
          Stream::optimizer}) {
      if (uses(stream)) {
        lanes_.push_back(stream);
      }
    }
  }

  std::string draw() {
    const double panel = static_cast<double>(num_rows()) * kLane;
    const double end = step_.shown_seconds;
    const double zoom_begin = kZoomFrom * end;
    const double zoom_end = zoom_begin + end / kZoom;
    const double second = kTop + panel + kPanelGap;
    const double height = second + panel + 40 + kLegend;
    body_.clear();
    line(kLeft, 34, "title", title_);
    line(kLeft, 58, "dim", subtitle_);
    draw_panel(kTop, 0, end, "whole step");
    const double scale = (kWidth - kLeft - kRight) / end;
    body_ += fmt::format(
        "<rect class=\"zoom\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
        "height=\"{:.1f}\"/>\n",
        kLeft + scale * zoom_begin,
        kTop - 4,
        scale * (zoom_end - zoom_begin),
        panel + 8);
    draw_panel(second, zoom_begin, zoom_end, "the marked part, enlarged");
    draw_legend(second + panel + 62);
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0f} "
        "{:.0f}\" width=\"{:.0f}\" height=\"{:.0f}\" role=\"img\">\n"
        "<title>{}</title>\n<style>{}{}</style>\n{}</svg>\n",
        kWidth,
        height,
        kWidth,
        height,
        escape_markup(title_),
        kCss,
        uses(Stream::tensor) ? kTensorCss : std::string_view(),
        body_);
  }

 private:
  bool uses(Stream stream) const {
    return std::ranges::any_of(
        step_.operations,
        [&](const Operation& operation) { return operation.stream == stream; });
  }

  /// Row of the host, and one row for each lane.
  std::size_t num_rows() const { return 1 + lanes_.size(); }

  void line(double x, double y, std::string_view style, std::string_view text) {
    body_ += fmt::format(
        "<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
        style,
        x,
        y,
        escape_markup(text));
  }

  void draw_panel(double top, double begin, double end, std::string_view name) {
    const double scale = (kWidth - kLeft - kRight) / (end - begin);
    const double bottom = top + static_cast<double>(num_rows()) * kLane;
    line(kLeft, top - 10, "dim", name);
    for (std::size_t row = 0; row < num_rows(); ++row) {
      const double y = top + static_cast<double>(row) * kLane;
      body_ += fmt::format(
          "<rect class=\"lane\" x=\"{}\" y=\"{:.1f}\" width=\"{}\" "
          "height=\"{}\"/>\n",
          kLeft,
          y + (kLane - kBar) / 2,
          kWidth - kLeft - kRight,
          kBar);
      body_ += fmt::format(
          "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
          kLeft - 12,
          y + kLane / 2 + 5,
          row == 0 ? "host" : to_string(lanes_[row - 1]));
    }
    draw_axis(bottom, begin, end, scale);
    const double in_lane = (kLane - kBar) / 2;
    draw_host(top + in_lane, begin, end, scale);
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      draw_lane(
          lanes_[lane],
          top + static_cast<double>(1 + lane) * kLane + in_lane,
          begin,
          end,
          scale);
    }
  }

  void draw_axis(double y, double begin, double end, double scale) {
    const double tick = tick_of(1e3 * (end - begin));
    for (double at = std::ceil(1e3 * begin / tick) * tick; at <= 1e3 * end;
         at += tick) {
      const double x = kLeft + scale * (1e-3 * at - begin);
      body_ += fmt::format(
          "<line class=\"tick\" x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{0:.1f}\" "
          "y2=\"{2:.1f}\"/>\n<text class=\"dim\" x=\"{0:.1f}\" y=\"{3:.1f}\" "
          "text-anchor=\"middle\">{4:g}</text>\n",
          x,
          y,
          y + 6,
          y + 21,
          std::round(1e3 * at) / 1e3);
    }
    body_ += fmt::format(
        "<text class=\"dim\" x=\"{}\" y=\"{:.1f}\" "
        "text-anchor=\"end\">ms</text>\n",
        kLeft - 12,
        y + 21);
  }

  /// Adjacent operations of one kind that are drawn as one bar.
  struct Bar {
    double from = 0;
    double to = 0;
    std::string_view style;
    std::string name;   ///< text inside the bar; empty for several
    std::string title;  ///< title of the first one
    int operations = 1;
  };

  void draw_host(double y, double begin, double end, double scale) {
    const double to = std::min(step_.shown_host_seconds, end);
    if (to > begin) {
      draw_bar(
          {.from = kLeft,
           .to = kLeft + scale * (to - begin),
           .style = kHostStyle,
           .name = "launches",
           .title = fmt::format(
               "host: {:.3f} ms to launch the step",
               1e3 * step_.shown_host_seconds)},
          y);
    }
  }

  void
  draw_lane(Stream stream, double y, double begin, double end, double scale) {
    std::vector<Bar> bars;
    for (std::size_t i = 0; i < step_.operations.size(); ++i) {
      const Operation& operation = step_.operations[i];
      const Span& span = step_.spans[i];
      if (operation.stream != stream || span.end <= begin ||
          span.begin >= end) {
        continue;
      }
      Bar bar{
          .from = kLeft + scale * (std::max(span.begin, begin) - begin),
          .to = kLeft + scale * (std::min(span.end, end) - begin),
          .style = style_of(operation.what),
          .name = label(operation),
          .title = describe(operation, span)};
      // A bar too thin to be seen joins the bar before it.
      if (!bars.empty() && bars.back().style == bar.style &&
          bar.from - bars.back().to < kSmallest &&
          std::min(bar.to - bar.from, bars.back().to - bars.back().from) <
              kThin) {
        bars.back().to = bar.to;
        bars.back().name.clear();
        ++bars.back().operations;
      } else {
        bars.push_back(std::move(bar));
      }
    }
    for (const Bar& bar : bars) {
      draw_bar(bar, y);
    }
  }

  void draw_bar(const Bar& bar, double y) {
    // A thin gap separates adjacent bars that are wide enough for one.
    const double width = std::max(
        kSmallest,
        bar.to - bar.from - (bar.to - bar.from > 4 ? 1 : 0));
    body_ += fmt::format(
        "<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" "
        "height=\"{}\"><title>{}{}</title></rect>\n",
        bar.style,
        bar.from,
        y,
        width,
        kBar,
        escape_markup(bar.title),
        bar.operations > 1 ? fmt::format(", and {} more", bar.operations - 1)
                           : "");
    if (!bar.name.empty() &&
        width > kCharacter * static_cast<double>(bar.name.size()) + 8) {
      body_ += fmt::format(
          "<text class=\"in\" x=\"{:.1f}\" y=\"{:.1f}\" "
          "text-anchor=\"middle\">{}</text>\n",
          (bar.from + bar.to) / 2,
          y + kBar / 2 + 4.5,
          escape_markup(bar.name));
    }
  }

  std::string label(const Operation& operation) const {
    return operation.unit == kNoUnit
               ? operation.what
               : fmt::format("{} {}", operation.what, operation.unit);
  }
  std::string describe(const Operation& operation, const Span& span) const {
    std::string text = operation.what;
    if (operation.unit != kNoUnit) {
      text += fmt::format(" of unit {}", operation.unit);
    }
    if (operation.microbatch >= 0 && step_.shown_microbatches > 1) {
      text += fmt::format(", microbatch {}", operation.microbatch);
    }
    return text + fmt::format(
                      ": {:.3f} ms from {:.3f} ms on",
                      1e3 * (span.end - span.begin),
                      1e3 * span.begin);
  }

  void draw_legend(double y) {
    double x = kLeft;
    for (const Style& style : kStyles) {
      const bool used = style.name == kHostStyle ||
                        std::ranges::any_of(
                            step_.operations,
                            [&](const Operation& operation) {
                              return style_of(operation.what) == style.name;
                            });
      if (!used) {
        continue;
      }
      body_ += fmt::format(
          "<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" "
          "height=\"14\"/>\n",
          style.name,
          x,
          y - 12);
      line(x + 20, y, "dim", style.text);
      x += 20 + kCharacter * static_cast<double>(style.text.size()) + 34;
    }
    line(kLeft, y + 24, "dim", "Numbers are units in the order of the model.");
  }

  const StepPlan& step_;
  const std::string& title_;
  const std::string& subtitle_;
  std::vector<Stream> lanes_;
  std::string body_;
};

}  // namespace

std::string to_svg(
    const StepPlan& step,
    const std::string& title,
    const std::string& subtitle) {
  return Picture(step, title, subtitle).draw();
}

}  // namespace flatshard::plan
