#include "flatshard/train/config/lora_keys.h"

#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kHasAdapters{
    "lora.rank",
    WHEN(c.lora.enabled()),
    "runs with adapters; set lora.rank"};

const ConfigKey kLoraKeys[] = {
    KEY(lora.rank,
        "LoRA rank. The adapters are trained, and the model's weights are "
        "frozen in precision.compute or float8.recipe (see "
        "docs/guides/lora.md). 0: train the model's weights.",
        .range = {.max = 1 << 16},
        .conflicts =
            {{{"moe.balance_rate"},
              WHEN(c.lora.enabled() && c.moe.balance_rate > 0),
              "the router's bias belongs to the frozen weights; use 0"},
             {{"parallelism.overlap_expert_parallel",
               "parallelism.delay_wgrad"},
              WHEN(
                  c.lora.enabled() && (c.parallelism.overlap_expert_parallel ||
                                       c.parallelism.delay_wgrad)),
              "blocks in pieces are for runs that train all weights; use "
              "false"},
             {{"checkpoint.export_hf_at_end"},
              WHEN(c.lora.enabled() && c.checkpoint.export_hf_at_end),
              "the run ends with an adapter in its output_dir; use false, and "
              "`flatshard export --merge` for full weights"}}),
    KEY(lora.alpha,
        "LoRA alpha. Adapter outputs are scaled by alpha / rank.",
        .range = {.min = 1e-9},
        .used_if = {kHasAdapters}),
    KEY(lora.dropout,
        "Dropout probability of the adapter inputs during training.",
        .range = {.max = 0.999},
        .used_if = {kHasAdapters}),
    KEY(lora.targets,
        "Layers that get an adapter: a comma-separated list of the last part "
        "of their names in transformers, for example \"q_proj, v_proj\". "
        "all-linear: every linear layer of the blocks.",
        .used_if = {kHasAdapters}),
    KEY(lora.exclude,
        "Layers of lora.targets that get no adapter: a comma-separated list of "
        "the last part of their names, or of shell patterns of full names.",
        .used_if = {kHasAdapters}),
    KEY(lora.init,
        "Initialization of the LoRA A matrices. B is initialized to zeros.",
        .used_if = {kHasAdapters}),
    KEY(lora.rslora,
        "Rank-stabilized LoRA: scale adapter outputs by alpha / sqrt(rank).",
        .used_if = {kHasAdapters}),
    KEY(lora.init_from_adapter,
        "PEFT adapter directory to initialize from. rank, alpha, targets and "
        "rslora must match the adapter.",
        .is_path = true,
        .used_if = {kHasAdapters}),
};

}  // namespace

KeyTable lora_keys() {
  return {kLoraKeys};
}

}  // namespace flatshard::config
