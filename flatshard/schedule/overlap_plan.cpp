#include "flatshard/schedule/overlap_plan.h"

#include "flatshard/core/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>

namespace flatshard {
namespace {

// Writes a plan down, piece by piece.
class PlanWriter {
 public:
  PlanWriter(int layers, const OverlapPlanOptions& options)
      : layers_(layers), options_(options) {}

  void forward(int m) {
    begin_forward(m);
    for (int l = 0; l < layers_; ++l) {
      attend(m, l);
      send_rows(m, l);
      run_experts(m, l);
      send_results(m, l);
    }
    end_forward(m);
  }

  void backward(int m) {
    add(B, m, -1, PlanNode::head);
    for (int l = layers_ - 1; l >= 0; --l) {
      send_gradients(m, l);
      if (l + 1 < layers_) {
        // It hides the exchange that has just begun.
        attend_wgrads(m, l + 1);
      }
      recompute_attend(m, l);
      backward_of_experts(m, l);
      send_gradients_back(m, l);
      expert_wgrads(m, l);
      add(B, m, l, PlanNode::attend);
    }
    attend_wgrads(m, 0);
    add(B, m, -1, PlanNode::embed);
  }

  // The backward of `b` beside the forward of `f`.
  void both(int b, int f) {
    begin_forward(f);
    add(B, b, -1, PlanNode::head);
    for (int l = 0; l < layers_; ++l) {
      const int back = layers_ - 1 - l;
      send_gradients(b, back);
      recompute_attend(b, back);
      attend(f, l);
      if (options_.rows_first) {
        send_rows(f, l);
        backward_of_experts(b, back);
        send_gradients_back(b, back);
        expert_wgrads(b, back);
        run_experts(f, l);
      } else {
        backward_of_experts(b, back);
        send_rows(f, l);
        expert_wgrads(b, back);
        run_experts(f, l);
        send_gradients_back(b, back);
      }
      send_results(f, l);
      add(B, b, back, PlanNode::attend);
      attend_wgrads(b, back);
    }
    add(B, b, -1, PlanNode::embed);
    end_forward(f);
  }

  std::vector<PlanStep> take() { return std::move(plan_); }

 private:
  static constexpr PlanPass F = PlanPass::forward;
  static constexpr PlanPass R = PlanPass::recompute;
  static constexpr PlanPass B = PlanPass::backward;
  static constexpr PlanPass W = PlanPass::wgrad;

  void add(PlanPass pass, int microbatch, int layer, PlanNode node) {
    plan_.push_back({pass, microbatch, layer, node, stream_of(node)});
  }

  bool has_experts(int l) const {
    return options_.dense.empty() || !options_.dense[l];
  }
  bool has_shared(int l) const {
    return options_.shared_experts && has_experts(l);
  }

  void begin_forward(int m) { add(F, m, -1, PlanNode::embed); }

  void end_forward(int m) {
    merge(m, layers_ - 1);
    add(F, m, -1, PlanNode::head);
  }

  void merge(int m, int l) {
    if (l >= 0 && has_experts(l)) {
      add(F, m, l, PlanNode::merge);
    }
  }

  void attend(int m, int l) {
    merge(m, l - 1);
    add(F, m, l, PlanNode::attend);
  }

  void send_rows(int m, int l) {
    if (has_experts(l)) {
      add(F, m, l, PlanNode::dispatch);
    }
  }

  void run_experts(int m, int l) {
    if (has_shared(l)) {
      add(F, m, l, PlanNode::shared);
    }
    if (has_experts(l)) {
      add(F, m, l, PlanNode::experts);
    }
  }

  void send_results(int m, int l) {
    if (has_experts(l)) {
      add(F, m, l, PlanNode::combine);
    }
  }

  void send_gradients(int m, int l) {
    if (has_experts(l)) {
      add(B, m, l, PlanNode::merge);
      add(B, m, l, PlanNode::combine);
    }
  }

  void recompute_attend(int m, int l) {
    if (options_.recompute) {
      add(R, m, l, PlanNode::attend);
      if (has_experts(l)) {
        add(R, m, l, PlanNode::dispatch);
      }
      if (has_shared(l)) {
        add(R, m, l, PlanNode::shared);
      }
    }
    if (has_shared(l)) {
      add(B, m, l, PlanNode::shared);
    }
  }

  void backward_of_experts(int m, int l) {
    if (!has_experts(l)) {
      return;
    }
    if (options_.recompute) {
      add(R, m, l, PlanNode::experts);
    }
    add(B, m, l, PlanNode::experts);
  }

  void send_gradients_back(int m, int l) {
    if (has_experts(l)) {
      add(B, m, l, PlanNode::dispatch);
    }
  }

  void expert_wgrads(int m, int l) {
    if (has_experts(l) && options_.delay_wgrad) {
      add(W, m, l, PlanNode::experts);
    }
  }

  void attend_wgrads(int m, int l) {
    if (!options_.delay_wgrad) {
      return;
    }
    add(W, m, l, PlanNode::attend);
    if (has_shared(l)) {
      add(W, m, l, PlanNode::shared);
    }
  }

  int layers_;
  const OverlapPlanOptions& options_;
  std::vector<PlanStep> plan_;
};

char letter_of(PlanPass pass) {
  switch (pass) {
    case PlanPass::forward:
      return 'F';
    case PlanPass::recompute:
      return 'R';
    case PlanPass::backward:
      return 'B';
    case PlanPass::wgrad:
      return 'W';
  }
  return '?';
}

}  // namespace

std::vector<PlanStep>
overlap_plan(int layers, int microbatches, const OverlapPlanOptions& options) {
  FLATSHARD_CHECK(
      layers >= 1 && microbatches >= 1,
      config,
      "an overlap plan: expected at least one layer and one microbatch, got {} "
      "and {}",
      layers,
      microbatches);
  FLATSHARD_CHECK(
      options.dense.empty() ||
          options.dense.size() == static_cast<std::size_t>(layers),
      config,
      "an overlap plan of {} layers: expected as many entries in `dense`, or "
      "none, got {}",
      layers,
      options.dense.size());
  PlanWriter writer(layers, options);
  for (int m = 0; m < microbatches; ++m) {
    if (m == 0 || !options.interleave) {
      writer.forward(m);
    }
    if (options.interleave && m + 1 < microbatches) {
      writer.both(m, m + 1);
    } else {
      writer.backward(m);
    }
  }
  return writer.take();
}

PlanStream stream_of(PlanNode node) {
  return node == PlanNode::dispatch || node == PlanNode::combine
             ? PlanStream::exchange
             : PlanStream::compute;
}

std::string_view to_string(PlanNode node) {
  switch (node) {
    case PlanNode::embed:
      return "embed";
    case PlanNode::attend:
      return "attend";
    case PlanNode::dispatch:
      return "dispatch";
    case PlanNode::shared:
      return "shared";
    case PlanNode::experts:
      return "experts";
    case PlanNode::combine:
      return "combine";
    case PlanNode::merge:
      return "merge";
    case PlanNode::head:
      return "head";
  }
  return "unknown";
}

std::string to_string(const PlanStep& step) {
  const std::string text = fmt::format(
      "{}{}.{}",
      letter_of(step.pass),
      step.microbatch,
      to_string(step.node));
  return step.layer < 0 ? text : fmt::format("{}({})", text, step.layer);
}

std::string to_string(const std::vector<PlanStep>& plan) {
  std::string text;
  for (const PlanStep& step : plan) {
    text += (text.empty() ? "" : " ") + to_string(step);
  }
  return text;
}

int peak_layers(const std::vector<PlanStep>& plan, bool recompute) {
  // Change of the number alive at each position.
  std::map<std::tuple<int, int, bool>, std::array<int, 2>> lives;
  for (int i = 0; i < static_cast<int>(plan.size()); ++i) {
    const PlanStep& step = plan[i];
    if (step.layer < 0) {
      continue;
    }
    const bool only_forward = recompute && step.pass == PlanPass::forward;
    auto [life, is_new] = lives.try_emplace(
        {step.microbatch, step.layer, only_forward},
        std::array<int, 2>{i, i});
    life->second[1] = i;
  }
  std::vector<int> change(plan.size() + 1, 0);
  for (const auto& [key, life] : lives) {
    ++change[life[0]];
    --change[life[1] + 1];
  }
  int alive = 0;
  int peak = 0;
  for (const int delta : change) {
    alive += delta;
    peak = std::max(peak, alive);
  }
  return peak;
}

}  // namespace flatshard
