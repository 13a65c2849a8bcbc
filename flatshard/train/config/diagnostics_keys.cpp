#include "flatshard/train/config/diagnostics_keys.h"

#include "flatshard/train/config/rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kTraces{
    "profiling.enabled",
    WHEN(c.profiling.enabled),
    "runs that write a trace"};
constexpr UsedIf kDelays{
    "debug.comm_delay_us",
    WHEN(c.debug.comm_delay_us > 0),
    "runs with delays"};

const ConfigKey kDiagnosticsKeys[] = {
    KEY(profiling.enabled,
        "write a Chrome trace of one step",
        .conflicts =
            {{{"profiling.step", "training.steps"},
              WHEN(c.profiling.step > c.training.steps),
              "the step comes after the last one, so there would be no "
              "trace"}}),
    KEY(profiling.step,
        "the step to trace, counted from 1",
        .range = {1, kMaxSteps},
        .used_if = {kTraces}),
    KEY(profiling.folder,
        "where traces go, below run.output_dir",
        .is_path = true,
        .used_if = {kTraces}),

    KEY(diagnostics.norms_freq,
        "steps between rows with the norm of every parameter and gradient in "
        "metrics.jsonl, shown by 'flatshard norms'; 0: never",
        .range = {.max = kMaxSteps}),
    KEY(diagnostics.nan_check,
        "look for NaN and infinite values in gradients (before and after their "
        "reduction) and weights; the first one ends the run by name"),
    KEY(diagnostics.overlap_check,
        "check that no two buffers in use share memory, at the start and "
        "whenever a slot is taken"),
    KEY(diagnostics.poison,
        "released weights point at memory that cannot be read (CPU: the run "
        "ends by the parameter's name) or at NaN (GPU); released slots are "
        "filled with NaN"),
    KEY(diagnostics.strict,
        "check the life cycle of every module, and after each step that all "
        "ranks ran the same ones in the same order"),

    KEY(debug.comm_delay_us,
        "CPU only: longest random delay before each queued task; finds missing "
        "waits",
        .range = {.max = 10000000}),
    KEY(debug.comm_delay_seed, "of those delays", .used_if = {kDelays}),
    KEY(debug.deterministic,
        "only deterministic kernels: a run is bitwise reproducible, at some "
        "cost in speed"),
    KEY(debug.spoil_gradient_step,
        "put a NaN into a gradient of rank 0 in this step, once: to try "
        "training.on_nonfinite; 0: never",
        .range = {.max = kMaxSteps}),
    KEY(debug.emulate_graphs,
        "CPU only: what would be replayed as a CUDA graph runs again instead",
        .used_if = {kHasGraphs}),
    KEY(debug.force_balance,
        "experts are chosen in turn and not by score, for measuring: all get "
        "equally many tokens"),
};

}  // namespace

KeyTable diagnostics_keys() {
  return {kDiagnosticsKeys};
}

}  // namespace flatshard::config
