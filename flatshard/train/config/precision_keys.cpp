#include "flatshard/train/config/precision_keys.h"

#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kHasFloat8{
    "float8.recipe",
    WHEN(c.float8.recipe.has_value()),
    "runs with FP8 weights; set float8.recipe"};

const ConfigKey kPrecisionKeys[] = {
    KEY(precision.compute, "Data type of weights and activations."),
    KEY(precision.reduce, "Data type in which gradients are reduced."),
    KEY(precision.main_params,
        "Data type of the main weights, the copy that the optimizer updates."),
    KEY(precision.main_grads, "Data type of accumulated gradients."),
    KEY(precision.scaling,
        "Averaging of gradients over ranks: mean in the collective, scaled "
        "before a sum, or per token."),

    KEY(float8.recipe,
        "FP8 recipe for linear layers: weights are all-gathered and multiplied "
        "in FP8 (see docs/guides/fp8.md). Scales are per tensor, per row and "
        "column, per 128 x 128 block, or per 32 elements.",
        .conflicts =
            {{{"precision.compute"},
              WHEN(c.precision.compute != at::kBFloat16),
              "the rest of the model computes in bfloat16; use \"bfloat16\""},
             {{"cuda_graph.impl", "activation_checkpoint.mode"},
              WHEN(
                  c.cuda_graph.impl == CudaGraphImpl::unit &&
                  c.activation_checkpoint.mode ==
                      models::ActivationCheckpoint::full),
              "no graph recomputes FP8 weights; use \"full_iteration\", or "
              "another mode"}}),
    KEY(float8.exclude,
        "Parameters that stay in precision.compute: a comma-separated list of "
        "shell patterns of their names.",
        .used_if = {kHasFloat8}),
    KEY(float8.keep_first_last,
        "Keep the first and the last block in precision.compute.",
        .used_if = {kHasFloat8}),
    KEY(float8.column_plane,
        "Source of the columnwise FP8 weights for the input gradient. derived: "
        "requantize the all-gathered rowwise weights. stored: quantize the "
        "main weights and all-gather separately (rowwise and mxfp8 only). "
        "auto: derived.",
        .used_if = {kHasFloat8},
        .conflicts =
            {{{"float8.recipe"},
              WHEN(
                  c.float8.column_plane == ColumnPlane::stored &&
                  !(c.float8.recipe &&
                    float8::has_power_of_two_scales(*c.float8.recipe))),
              "stored is for rowwise and mxfp8, because rowwise and columnwise "
              "data of the other recipes are the same numbers; use auto"}}),
    KEY(float8.gather_parts,
        "Weights that the backward all-gathers for recomputation in addition "
        "to the stored columnwise weights: the rows of the full unit, the rows "
        "of the recomputed layers, or all weights layer by layer.",
        .used_if = {kHasFloat8}),
    KEY(float8.emulate,
        "Emulate the recipe on GPUs that do not support it, by dequantizing to "
        "bfloat16. Not faster than bfloat16. Always on for CPUs.",
        .used_if = {kHasFloat8}),
};

}  // namespace

KeyTable precision_keys() {
  return {kPrecisionKeys};
}

}  // namespace flatshard::config
