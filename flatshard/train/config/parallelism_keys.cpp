#include "flatshard/train/config/parallelism_keys.h"

#include "flatshard/core/error.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/config/key_rows.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace flatshard::config {
namespace {

// Returns both names of each.
std::vector<std::string_view> strategies() {
  std::vector<std::string_view> names;
  for (const StrategyName& row : strategy_names()) {
    for (const std::string_view name : {row.name, row.other_name}) {
      if (!name.empty()) {
        names.push_back(name);
      }
    }
  }
  return names;
}

/// Returns the text that Granularity::parse reads: "element", "block:4".
std::string text_of(const Granularity& granularity) {
  std::string text = granularity.to_string();
  const auto bracket = text.find('(');
  if (bracket == std::string::npos) {
    return text;
  }
  if (granularity.kind() != Granularity::Kind::block) {
    return text.substr(0, bracket);
  }
  text[bracket] = ':';
  text.pop_back();
  return text;
}

}  // namespace

static ConfigField field_of(StrategyChoice& member) {
  return WordField{
      .get = [&member] { return std::string(member.name()); },
      .set =
          [&member](std::string_view name) {
            const auto names = strategies();
            if (std::ranges::find(names, name) == names.end()) {
              return false;
            }
            member = StrategyChoice(name);
            return true;
          },
      .words = strategies};
}

static ConfigField field_of(Granularity& member) {
  return WordField{
      .get = [&member] { return text_of(member); },
      .set =
          [&member](std::string_view text) {
            member = Granularity::parse(text, "parallelism.granularity");
            return true;
          },
      .words = [] { return std::vector<std::string_view>(); }};
}

namespace {

constexpr UsedIf kShardsWeights{
    "parallelism.strategy",
    WHEN(!c.parallelism.strategy->keeps_whole_weights()),
    "strategies that shard the weights"};
constexpr UsedIf kShards{
    "parallelism.strategy",
    WHEN(!c.parallelism.strategy->shards_nothing()),
    "strategies that shard something"};
constexpr UsedIf kReshards{
    "parallelism.reshard_after_forward",
    WHEN(c.parallelism.reshard_after_forward),
    "runs that reshard weights after forward"};
constexpr UsedIf kDividesExperts{
    "parallelism.expert_parallel_degree",
    WHEN(expert_ranks(c.parallelism) > 1),
    "more ranks than one"};
constexpr UsedIf kSharesLayers{
    "parallelism.tensor_parallel_degree",
    WHEN(c.parallelism.shares_layers()),
    "more ranks than one"};
constexpr UsedIf kExchangesTokens{
    "parallelism.expert_parallel_degree",
    WHEN(
        expert_ranks(c.parallelism) > 1 ||
        c.parallelism.overlap_expert_parallel),
    "more ranks than one, or overlap_expert_parallel"};

constexpr UsedIf kOverlaps{
    "parallelism.overlap_expert_parallel",
    WHEN(c.parallelism.overlap_expert_parallel),
    "runs that overlap microbatches"};

// Conflicts of blocks that run in pieces.
const std::vector<Conflict> kPieces = {
    {{"cuda_graph.impl"},
     WHEN(c.cuda_graph.whole_step()),
     "interleaved backwards are not a single graph; use \"unit\" with "
     "cuda_graph.modules, or \"none\""},
    {{"cuda_graph.impl", "cuda_graph.modules"},
     WHEN(c.cuda_graph.enabled() && c.cuda_graph.modules.empty()),
     "blocks run in parts; list the parts to capture in cuda_graph.modules "
     "(attn, moe_router, mlp)"},
    {{"cuda_graph.impl", "float8.recipe"},
     WHEN(c.cuda_graph.enabled() && c.float8.recipe),
     "the FP8 planes of two microbatches have different addresses; remove one "
     "of the two"},
    {{"diagnostics.strict"},
     WHEN(c.diagnostics.strict),
     "it checks the calls of modules, and parts of blocks are not modules"},
    {{"parallelism.memory_budget"},
     WHEN(c.parallelism.memory_budget > 0),
     "units that stay unsharded are planned for one microbatch at a time; use "
     "0"}};

const ConfigKey kParallelismKeys[] = {
    KEY(parallelism.strategy,
        "Sharding strategy: zero0 shards nothing (no_shard), zero1 the "
        "optimizer states (optim), zero2 also the gradients (optim_grads), "
        "zero3 also the weights (optim_grads_params).",
        .conflicts =
            {{{"parallelism.data_parallel_replicate_degree"},
              WHEN(
                  c.parallelism.strategy->needs_outer_axis() &&
                  c.parallelism.data_parallel_replicate_degree == 1),
              "the strategy needs an outer axis; set the degree to 2 or more, "
              "or use zero3"}}),
    KEY(parallelism.data_parallel_replicate_degree,
        "Number of replicas of the sharded model (outer mesh axis). -1: all "
        "remaining ranks.",
        .range = {.min = 1, .max = kMaxRanks, .or_minus_one = true},
        .conflicts =
            {{{"parallelism.data_parallel_shard_degree"},
              WHEN(
                  c.parallelism.data_parallel_replicate_degree == -1 &&
                  c.parallelism.data_parallel_shard_degree == -1),
              "only one of them can be the rest of the ranks"}}),
    KEY(parallelism.data_parallel_shard_degree,
        "Number of ranks that weights are sharded over (inner mesh axis). -1: "
        "all remaining ranks.",
        .range = {.min = 1, .max = kMaxRanks, .or_minus_one = true}),
    KEY(parallelism.tensor_parallel_degree,
        "Tensor-parallel size. The ranks of a group read the same samples, "
        "split each weight matrix, and split activations along the sequence "
        "between layers. Must divide the number of ranks, model.heads, "
        "kv_heads, ffn_dim and training.seq_len (see "
        "docs/guides/tensor_parallel.md).",
        .range = {.min = 1, .max = kMaxRanks}),
    KEY(parallelism.tensor_parallel_comm,
        "Exchange of activations between tensor-parallel ranks: collectives, "
        "or peer-to-peer copies. On GPUs the copies occupy no SM, overlap "
        "with matmuls, and require all ranks of the group on one host. auto: "
        "copies for bfloat16 layers if NVLink connects the ranks.",
        .used_if = {kSharesLayers},
        .conflicts =
            {{{"cuda_graph.impl"},
              WHEN(
                  c.cuda_graph.enabled() && c.parallelism.shares_layers() &&
                  c.parallelism.copies_activations()),
              "copies between the memory of GPUs are not captured; use "
              "\"collective\""}}),
    KEY(parallelism.context_parallel_degree,
        "Context-parallel size. Only 1 is supported.",
        .range = {1, kMaxRanks}),
    KEY(parallelism.pipeline_parallel_degree,
        "Pipeline-parallel size. Only 1 is supported.",
        .range = {1, kMaxRanks}),
    KEY(parallelism.expert_parallel_degree,
        "Expert-parallel size: number of ranks that the experts of each layer "
        "are distributed over. Must divide data_parallel_shard_degree.",
        .range = {1, kMaxRanks}),
    KEY(parallelism.expert_tensor_parallel_degree,
        "Expert-tensor-parallel size: number of adjacent ranks that split the "
        "width of each expert, within the ranks of expert_parallel_degree. "
        "Must be 1 or a multiple of tensor_parallel_degree, and must divide "
        "model.moe_ffn_dim. Times expert_parallel_degree it must divide the "
        "ranks of a shard (see docs/guides/moe.md).",
        .range = {.min = 1, .max = kMaxRanks},
        .conflicts =
            {{{"parallelism.token_exchange"},
              WHEN(
                  c.parallelism.expert_tensor_parallel_degree > 1 &&
                  c.parallelism.token_exchange == TransferKind::copies),
              "not supported: copies bring a row to one rank; use "
              "\"collective\""}}),
    KEY(parallelism.token_exchange,
        "Dispatch of tokens to experts: collectives, or peer-to-peer copies. "
        "On GPUs the copies occupy no SM and require all ranks on one host. "
        "auto: collective.",
        .used_if = {kDividesExperts}),
    KEY(parallelism.overlap_expert_parallel,
        "Overlap the backward of one microbatch with the forward of the next "
        "(1F1B), so that the tokens of one are dispatched while the other "
        "computes. Requires experts and at least 2 microbatches (see "
        "docs/guides/moe.md).",
        .conflicts = kPieces),
    KEY(parallelism.microbatches_in_flight,
        "Maximum number of microbatches between the start of their forward and "
        "the end of their backward. With 3 or more, forwards before the first "
        "backward run in pairs and hide each other's token dispatch. Each "
        "microbatch above 2 adds the activations of one microbatch.",
        .range = {.min = 2, .max = 1 << 10},
        .used_if = {kOverlaps}),
    KEY(parallelism.delay_wgrad,
        "Compute weight gradients after input gradients, during the token "
        "dispatch, with or without overlap_expert_parallel. The inputs of the "
        "layers are kept longer.",
        .used_if = {kExchangesTokens},
        .conflicts = kPieces),
    KEY(parallelism.prefetch,
        "Number of units to all-gather ahead of the one that computes.",
        .range = {.max = 1 << 20}),
    KEY(parallelism.reshard_after_forward,
        "Reshard weights after forward and all-gather them again for backward.",
        .used_if = {kShardsWeights}),
    KEY(parallelism.post_forward_ranks,
        "Number of adjacent ranks to reshard to after forward, for example the "
        "ranks of one host, so that the backward all-gather stays within the "
        "group. Must divide data_parallel_shard_degree. The group's shard of "
        "the weights is kept in memory in addition. 0: reshard to all ranks.",
        .range = {.min = 0, .max = kMaxRanks},
        .used_if = {kShardsWeights, kReshards},
        .conflicts =
            {{{"parallelism.post_forward_ranks"},
              WHEN(c.parallelism.post_forward_ranks == 1),
              "one rank has the full weights; set "
              "parallelism.reshard_after_forward = false"},
             {{"float8.recipe"},
              WHEN(c.parallelism.post_forward_ranks > 0 && c.float8.recipe),
              "forward and backward all-gather different planes of FP8 "
              "weights; remove one of the two"}}),
    KEY(parallelism.memory_budget,
        "Memory budget per rank in GiB, for the memory table printed at "
        "startup. As many units as fit stay unsharded between forward and "
        "backward. 0: reshard all units.",
        .used_if = {kShardsWeights, kReshards}),
    KEY(parallelism.keep_compute_weights,
        "ZeRO-3: keep a shard in precision.compute in addition to the main "
        "weights. If false, the main weights are cast before every all-gather, "
        "and no memory is used for that shard.",
        .used_if = {kShardsWeights}),
    KEY(parallelism.copy_engines,
        "Use peer-to-peer copies by the GPUs' copy engines instead of "
        "collectives on SMs: for the all-gathers of the forward, or for all "
        "all-gathers and reductions (256 MiB more). Requires all ranks on one "
        "host. auto: all of them if NVLink connects the ranks.",
        .used_if = {kShards},
        .conflicts =
            {{{"parallelism.strategy"},
              WHEN(
                  c.parallelism.copy_engines ==
                      CopyEngines{.gathers = CopyEngines::Gathers::forward} &&
                  c.parallelism.strategy->keeps_whole_weights()),
              "the strategy does not all-gather weights in forward; use none "
              "or all"},
             {{"parallelism.keep_compute_weights"},
              WHEN(
                  c.parallelism.copies() &&
                  !c.parallelism.keep_compute_weights),
              "compute weights are copied, and are not kept; choose one"}}),
    KEY(parallelism.granularity,
        "Sharding granularity, the smallest piece that is never split across "
        "ranks: element, row, dim0 (a slice along the first dimension), "
        "block:N (N rows), chunk (the split of torch.chunk for each tensor) or "
        "tensor."),
    KEY(parallelism.max_padding,
        "Maximum fraction of padding. A layout with more padding is an error."),

    KEY(comm.timeout_s,
        "Timeout in seconds for collectives and heartbeats. On a timeout, the "
        "run stops and reports the late rank. Set it above the longest time "
        "between two collectives (checkpoints, evaluation).",
        .range = {1, 1e6}),
    KEY(comm.watcher,
        "Detect hangs and mismatched collectives. If disabled, a hang ends "
        "only if the backend times out (Gloo)."),
};

void check_parallelism(const Config& config) {
  const Parallelism& p = config.parallelism;
  const std::pair<const char*, std::int64_t> degrees[] = {
      {"context_parallel_degree", p.context_parallel_degree},
      {"pipeline_parallel_degree", p.pipeline_parallel_degree}};
  for (const auto& [name, degree] : degrees) {
    FLATSHARD_CHECK(
        degree == 1,
        config,
        "parallelism.{} = {} is not supported; leave it at 1",
        name,
        degree);
  }
  FLATSHARD_CHECK(
      p.expert_tensor_parallel_degree == 1 ||
          p.expert_tensor_parallel_degree % p.tensor_parallel_degree == 0,
      config,
      "parallelism.expert_tensor_parallel_degree = {}: expected 1 or a "
      "multiple of parallelism.tensor_parallel_degree = {}; change one of them",
      p.expert_tensor_parallel_degree,
      p.tensor_parallel_degree);
  FLATSHARD_CHECK(
      config.training.seq_len % p.tensor_parallel_degree == 0,
      config,
      "parallelism.tensor_parallel_degree = {}: expected a divisor of "
      "training.seq_len = {}; change one of them",
      p.tensor_parallel_degree,
      config.training.seq_len);
}

}  // namespace

KeyTable parallelism_keys() {
  return {kParallelismKeys, check_parallelism};
}

}  // namespace flatshard::config
