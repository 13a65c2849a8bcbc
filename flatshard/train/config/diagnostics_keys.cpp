#include "flatshard/train/config/diagnostics_keys.h"

#include "flatshard/train/config/key_rows.h"

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
        "Write a Chrome trace of one step.",
        .conflicts =
            {{{"profiling.step", "training.steps"},
              WHEN(c.profiling.step > c.training.steps),
              "the step comes after the last one, so there would be no "
              "trace"}}),
    KEY(profiling.step,
        "Step to trace, starting at 1.",
        .range = {1, kMaxSteps},
        .used_if = {kTraces}),
    KEY(profiling.folder,
        "Directory for traces, relative to run.output_dir.",
        .is_path = true,
        .used_if = {kTraces}),

    KEY(diagnostics.norms_freq,
        "Write the norm of every parameter and gradient to metrics.jsonl every "
        "N steps. 'flatshard norms' prints them. 0 disables it.",
        .range = {.max = kMaxSteps}),
    KEY(diagnostics.nan_check,
        "Check gradients (before and after their reduction) and weights for "
        "NaN and infinite values. The run stops at the first one and reports "
        "the parameter."),
    KEY(diagnostics.overlap_check,
        "Check that no two buffers in use share memory, at startup and "
        "whenever a buffer is allocated from the pool."),
    KEY(diagnostics.poison,
        "Make use-after-reshard visible: resharded weights point to "
        "inaccessible memory on CPUs (the run stops and names the parameter) "
        "and to NaN on GPUs. Freed buffers are filled with NaN."),
    KEY(diagnostics.strict,
        "Check the life cycle of every module, and after each step that all "
        "ranks ran the same modules in the same order."),

    KEY(debug.comm_delay_us,
        "CPU only: maximum random delay in microseconds before each queued "
        "task. Finds missing waits.",
        .range = {.max = 10000000}),
    KEY(debug.comm_delay_seed,
        "Seed for the random delays of comm_delay_us.",
        .used_if = {kDelays}),
    KEY(debug.deterministic,
        "Use only deterministic kernels. Runs become bitwise reproducible and "
        "somewhat slower."),
    KEY(debug.spoil_gradient_step,
        "Put a NaN into a gradient of rank 0 in this step, once, to try "
        "training.on_nonfinite. 0 disables it.",
        .range = {.max = kMaxSteps}),
    KEY(debug.emulate_graphs,
        "CPU only: run again what a CUDA graph would replay.",
        .used_if = {kHasGraphs}),
    KEY(debug.force_balance,
        "Assign tokens to experts round-robin instead of by score, so that all "
        "get the same number of tokens. For benchmarks."),
};

}  // namespace

KeyTable diagnostics_keys() {
  return {kDiagnosticsKeys};
}

}  // namespace flatshard::config
