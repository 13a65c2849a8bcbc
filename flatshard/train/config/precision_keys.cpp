#include "flatshard/train/config/precision_keys.h"

#include "flatshard/train/config/rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kHasFloat8{
    "float8.recipe",
    WHEN(c.float8.recipe.has_value()),
    "runs with FP8 weights; set float8.recipe"};

const ConfigKey kPrecisionKeys[] = {
    KEY(precision.compute, "dtype of weights and activations"),
    KEY(precision.reduce, "dtype in which gradients are reduced"),
    KEY(precision.main_params, "dtype of the optimizer's weights"),
    KEY(precision.main_grads, "dtype of accumulated gradients"),
    KEY(precision.scaling,
        "how gradients of ranks are averaged: mean in the collective, scaled "
        "before a sum, or per token"),

    KEY(float8.recipe,
        "weights of linear layers are gathered and multiplied in FP8, see "
        "docs/guides/fp8.md: a scale for each tensor, each row and column, "
        "each 128 x 128, or each 32 elements",
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
        "parameters that stay in precision.compute: shell patterns of their "
        "names with commas between them",
        .used_if = {kHasFloat8}),
    KEY(float8.keep_first_last,
        "the first and the last block stay in precision.compute",
        .used_if = {kHasFloat8}),
    KEY(float8.column_plane,
        "weights for the gradient of a layer's input: made of the gathered "
        "rows (derived), or quantized from main weights and gathered "
        "separately (stored; rowwise and mxfp8). auto: derived",
        .used_if = {kHasFloat8},
        .conflicts =
            {{{"float8.recipe"},
              WHEN(
                  c.float8.column_plane == ColumnPlane::stored &&
                  !(c.float8.recipe &&
                    float8::has_power_of_two_scales(*c.float8.recipe))),
              "stored is for rowwise and mxfp8, since rows and columns of the "
              "others hold the same numbers; use auto"}}),
    KEY(float8.gather_parts,
        "weights that a backward all-gathers for a recomputation in addition "
        "to a stored column plane: the whole unit's rows, the recomputed "
        "layers' rows, or all "
        "planes layer by layer",
        .used_if = {kHasFloat8}),
    KEY(float8.emulate,
        "GPUs that do not multiply the recipe decode it to bfloat16, which is "
        "no faster than bfloat16; CPUs always do",
        .used_if = {kHasFloat8}),
};

}  // namespace

KeyTable precision_keys() {
  return {kPrecisionKeys};
}

}  // namespace flatshard::config
