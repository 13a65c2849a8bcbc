#include "flatshard/train/config/lora_keys.h"

#include "flatshard/train/config/rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kHasAdapters{
    "lora.rank",
    WHEN(c.lora.enabled()),
    "runs with adapters; set lora.rank"};

const ConfigKey kLoraKeys[] = {
    KEY(lora.rank,
        "train adapters of this rank instead of the model's weights, which are "
        "frozen in precision.compute or float8.recipe (see "
        "docs/guides/lora.md); 0: train the weights",
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
              "`flatshard export --merge` for whole weights"}}),
    KEY(lora.alpha,
        "adapters count alpha / rank times",
        .range = {.min = 1e-9},
        .used_if = {kHasAdapters}),
    KEY(lora.dropout,
        "probability with which an element of an adapter's input is zeroed in "
        "training",
        .range = {.max = 0.999},
        .used_if = {kHasAdapters}),
    KEY(lora.targets,
        "layers with an adapter, by the last part of their names in "
        "transformers and with commas between them, for example \"q_proj, "
        "v_proj\"; all-linear: every linear layer of the blocks",
        .used_if = {kHasAdapters}),
    KEY(lora.exclude,
        "layers of lora.targets without an adapter: last parts of their names, "
        "or shell patterns of whole names, with commas between them",
        .used_if = {kHasAdapters}),
    KEY(lora.init,
        "values that A begins with; B begins with zeros",
        .used_if = {kHasAdapters}),
    KEY(lora.rslora,
        "adapters count alpha / sqrt(rank) times",
        .used_if = {kHasAdapters}),
    KEY(lora.init_from_adapter,
        "a folder with peft's adapter_model.safetensors to start from; rank, "
        "alpha, targets and rslora have to be its own",
        .is_path = true,
        .used_if = {kHasAdapters}),
};

}  // namespace

KeyTable lora_keys() {
  return {kLoraKeys};
}

}  // namespace flatshard::config
