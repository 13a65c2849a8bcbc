#pragma once

#include <compare>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

/// The action of a step of an OverlapPlan on its node.
enum class PlanPass {
  forward,    ///< F
  recompute,  ///< R: the forward once more, from the layer's saved input
  backward,   ///< B: gradients of inputs, and of weights too, unless W has them
  wgrad,      ///< W: gradients of weights
};

/// The pieces of a model between which tokens are dispatched. A dense layer is
/// only `attend`; `embed` and `head` belong to no layer.
enum class PlanNode {
  embed,
  attend,    ///< norm, attention, router, permutation; of a dense layer, all
  dispatch,  ///< rows travel to their experts
  shared,    ///< experts that every token passes
  experts,
  combine,  ///< rows travel back
  merge,    ///< rows, shared experts and residual become tokens; no weights
  head,     ///< last norm, logits, loss
};

/// Steps of one stream run in the plan's order.
enum class PlanStream { compute, exchange };

/// Rows travel on the exchange stream. All else is on compute.
PlanStream stream_of(PlanNode node);

struct PlanStep {
  PlanPass pass{};
  int microbatch = 0;
  int layer = -1;  ///< -1 of embed and head
  PlanNode node{};

  PlanStream stream() const { return stream_of(node); }

  auto operator<=>(const PlanStep&) const = default;
};

/// Steps in the host's launch order.
using OverlapPlan = std::vector<PlanStep>;

struct OverlapPlanOptions {
  /// Microbatches with a started forward and an unfinished backward. The
  /// backward of one runs in parallel with the forward of the last of them. 1:
  /// one microbatch follows the other. 2: no backward runs in parallel with the
  /// first forward, so its all-to-alls are exposed. From 3 on the forwards
  /// before the first backward run in pairs, and hide their all-to-alls.
  int in_flight = 2;
  /// Weight gradients are separate steps, after the gradients of inputs, so
  /// that they can hide an exchange.
  bool delay_wgrad = false;
  /// Each layer runs its forward once more before its backward.
  bool recompute = false;
  /// Only the first ones do. A runner of the plan needs all.
  int recomputed_layers = std::numeric_limits<int>::max();
  bool shared_experts = false;
  /// For each layer: it has no experts. Empty: none.
  std::vector<bool> dense;

  bool recomputes(int layer) const {
    return recompute && layer >= 0 && layer < recomputed_layers;
  }
};

/// Returns a training step of one pipeline stage in the host's launch order:
/// F0; (B0 + F1); (B1 + F2); ...; the last backward. With three in flight: (F0
/// + F1); (B0 + F2); ...; the last two backwards. With more, more forwards run
/// first.
///
/// A list schedule: a policy gives the steps of each pair a priority, and a
/// step that another one depends on runs before it. The policy of B0 and F1
/// processes layers in pairs, the last of B0 with the first of F1:
///
///   exchange  combine.B | dispatch.F   dispatch.B | combine.F
///   compute   attend.F  | experts.B W  experts.F  | attend.B W
///
/// so that each exchange runs in parallel with compute of the other microbatch.
/// The host launches experts.B before dispatch.F, and experts.F before
/// dispatch.B. The destination of rows is known when the router of attend.F has
/// run. Compute is busy while the host waits for that, and while it launches
/// the many copies of an exchange. All ranks have the same plan, so their
/// exchanges meet in the same order.
///
/// Two forwards run the same layer, so it is all-gathered once for both:
///
///   exchange  combine.1 | dispatch.0 | dispatch.1 | combine.0
///   compute   attend.0  | attend.1   | experts.0  | experts.1
///
/// The host launches attend.1 before dispatch.0.
///
/// @throws Error{config} for no layer, no microbatch or none in flight, or a
///   list of dense layers of another length.
/// Source of the order of a pair: Megatron Core's combined 1F1B schedule.
OverlapPlan overlap_plan(
    int layers,
    int microbatches,
    const OverlapPlanOptions& options = {});

/// Returns whether this microbatch's forward is the first of a pair: in each
/// layer the second forward follows, before the next layer starts.
bool is_first_of_pair(
    int microbatch,
    int microbatches,
    const OverlapPlanOptions& options);

/// E.g. "F1.attend(0)": forward of microbatch 1, layer 0; "B1.head".
std::string to_string(const PlanStep& step);
std::string to_string(const OverlapPlan& plan);
std::string_view to_string(PlanNode node);

/// Returns the steps that must finish before `step` of such a plan starts.
std::vector<PlanStep> plan_dependencies(
    const PlanStep& step,
    int layers,
    const OverlapPlanOptions& options);

/// Proves that `plan` has each step once, after all that it depends on, and
/// that no more microbatches are in flight than `options` allow. Passes follow
/// each other as the Scheduler needs them: a microbatch's forward after the
/// previous forward, its backward after the previous backward, two forwards of
/// a pair layer by layer. Rows are dispatched in the order of their counts.
/// @throws Error{internal} that names the step.
void check_plan(
    const OverlapPlan& plan,
    int layers,
    int microbatches,
    const OverlapPlanOptions& options = {});

/// The step at `waiter` waits for the step at `earlier` on the other stream.
/// Positions in the plan.
struct PlanWait {
  int waiter = 0;
  int earlier = 0;

  bool operator==(const PlanWait&) const = default;
};

/// Returns all waits between the streams that the dependencies need: none that
/// another of them, and the order of a stream, imply.
std::vector<PlanWait> plan_waits(
    const OverlapPlan& plan,
    int layers,
    const OverlapPlanOptions& options = {});

}  // namespace flatshard
