#include "flatshard/train/config/parallelism_keys.h"

#include "flatshard/core/error.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/config/rows.h"

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
    "runs that release weights after forward"};
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
     "backwards that interleave are no single graph; use \"unit\" "
     "with cuda_graph.modules, or \"none\""},
    {{"cuda_graph.impl", "cuda_graph.modules"},
     WHEN(c.cuda_graph.enabled() && c.cuda_graph.modules.empty()),
     "blocks run in pieces; name parts in cuda_graph.modules (attn, "
     "moe_router, mlp)"},
    {{"cuda_graph.impl", "float8.recipe"},
     WHEN(c.cuda_graph.enabled() && c.float8.recipe),
     "the FP8 planes of two microbatches are at other addresses; leave one "
     "out"},
    {{"diagnostics.strict"},
     WHEN(c.diagnostics.strict),
     "it watches the calls of modules, and pieces of blocks are none"},
    {{"parallelism.memory_budget"},
     WHEN(c.parallelism.memory_budget > 0),
     "units that stay gathered are planned for one microbatch at a "
     "time; leave it at 0"}};

const ConfigKey kParallelismKeys[] = {
    KEY(parallelism.strategy,
        "parts that are sharded: zero0 nothing (no_shard), zero1 the "
        "optimizer's state (optim), zero2 gradients too (optim_grads), zero3 "
        "weights too (optim_grads_params)",
        .conflicts =
            {{{"parallelism.data_parallel_replicate_degree"},
              WHEN(
                  c.parallelism.strategy->needs_outer_axis() &&
                  c.parallelism.data_parallel_replicate_degree == 1),
              "the strategy needs an outer axis; set the degree to 2 or more, "
              "or use zero3"}}),
    KEY(parallelism.data_parallel_replicate_degree,
        "outer mesh axis: copies of the sharded group; -1: the rest of the "
        "ranks",
        .range = {.min = 1, .max = kMaxRanks, .or_minus_one = true},
        .conflicts =
            {{{"parallelism.data_parallel_shard_degree"},
              WHEN(
                  c.parallelism.data_parallel_replicate_degree == -1 &&
                  c.parallelism.data_parallel_shard_degree == -1),
              "only one of them can be the rest of the ranks"}}),
    KEY(parallelism.data_parallel_shard_degree,
        "inner mesh axis: ranks that a weight is sharded over; -1: the rest of "
        "the ranks",
        .range = {.min = 1, .max = kMaxRanks, .or_minus_one = true}),
    KEY(parallelism.tensor_parallel_degree,
        "neighbouring ranks that share each layer and read the same samples: "
        "matrices are cut among them, activations between the layers are cut "
        "by tokens; divides the ranks, model.heads, kv_heads, ffn_dim and "
        "training.seq_len (docs/guides/tensor_parallel.md)",
        .range = {.min = 1, .max = kMaxRanks}),
    KEY(parallelism.tensor_parallel_comm,
        "how the ranks of tensor_parallel_degree exchange activations: by "
        "collectives, or by copies between the ranks' memory, which on GPUs "
        "take no SM, overlap with products and need all of these ranks on one "
        "host; auto: copies of bfloat16 layers where NVLink joins them",
        .used_if = {kSharesLayers},
        .conflicts =
            {{{"cuda_graph.impl"},
              WHEN(
                  c.cuda_graph.enabled() && c.parallelism.shares_layers() &&
                  c.parallelism.copies_activations()),
              "copies between the memory of GPUs are not recorded; use "
              "\"collective\""}}),
    KEY(parallelism.context_parallel_degree,
        "1: context parallelism is not supported",
        .range = {1, kMaxRanks}),
    KEY(parallelism.pipeline_parallel_degree,
        "1: pipeline parallelism is not supported",
        .range = {1, kMaxRanks}),
    KEY(parallelism.expert_parallel_degree,
        "ranks that divide the experts of each layer among them, and exchange "
        "tokens; divides data_parallel_shard_degree",
        .range = {1, kMaxRanks}),
    KEY(parallelism.expert_tensor_parallel_degree,
        "neighbouring ranks that have a part of the width of each expert, "
        "inside of those of expert_parallel_degree; 1 or a multiple of "
        "tensor_parallel_degree; divides model.moe_ffn_dim and, with "
        "expert_parallel_degree, the ranks of a shard "
        "(docs/guides/moe.md)",
        .range = {.min = 1, .max = kMaxRanks},
        .conflicts =
            {{{"parallelism.token_exchange"},
              WHEN(
                  c.parallelism.expert_tensor_parallel_degree > 1 &&
                  c.parallelism.token_exchange == TransferKind::copies),
              "not supported: copies bring a row to one rank; use "
              "\"collective\""}}),
    KEY(parallelism.token_exchange,
        "how tokens are exchanged by the ranks of expert_parallel_degree: by "
        "collectives, or by copies between the ranks' memory, which on GPUs "
        "take no SM and need all ranks on one host; auto: collective",
        .used_if = {kDividesExperts}),
    KEY(parallelism.overlap_expert_parallel,
        "run the backward of one microbatch in parallel with the forward of "
        "the next, so that the tokens of one are exchanged while the other "
        "computes; needs experts and 2 microbatches or more "
        "(docs/guides/moe.md)",
        .conflicts = kPieces),
    KEY(parallelism.microbatches_in_flight,
        "microbatches whose forward has begun and whose backward has not "
        "ended: with 3 or more, forwards before the first backward run in "
        "pairs and hide each other's token exchanges; each microbatch above 2 "
        "adds the activations of one",
        .range = {.min = 2, .max = 1 << 10},
        .used_if = {kOverlaps}),
    KEY(parallelism.delay_wgrad,
        "compute weight gradients after those of inputs, during the token "
        "exchange, with overlap_expert_parallel or without it; keeps their "
        "inputs for longer",
        .used_if = {kExchangesTokens},
        .conflicts = kPieces),
    KEY(parallelism.prefetch,
        "units gathered ahead of the one that computes",
        .range = {.max = 1 << 20}),
    KEY(parallelism.reshard_after_forward,
        "release weights after forward and gather them again for backward",
        .used_if = {kShardsWeights}),
    KEY(parallelism.post_forward_ranks,
        "neighbouring ranks, such as those of a host, that weights stay "
        "sharded among from forward to backward, so that the backward's "
        "all-gather stays among them; divides data_parallel_shard_degree, and "
        "adds its part of the weights to the memory; 0: as sharded",
        .range = {.min = 0, .max = kMaxRanks},
        .used_if = {kShardsWeights, kReshards},
        .conflicts =
            {{{"parallelism.post_forward_ranks"},
              WHEN(c.parallelism.post_forward_ranks == 1),
              "one rank has whole weights; set "
              "parallelism.reshard_after_forward = false"},
             {{"float8.recipe"},
              WHEN(c.parallelism.post_forward_ranks > 0 && c.float8.recipe),
              "forward and backward gather different planes of FP8 weights; "
              "leave one out"}}),
    KEY(parallelism.memory_budget,
        "GiB on each rank that the memory table printed at start may come to: "
        "as many units as fit stay gathered from forward to backward; 0: none",
        .used_if = {kShardsWeights, kReshards}),
    KEY(parallelism.keep_compute_weights,
        "ZeRO-3: keep a shard in precision.compute in addition to main "
        "weights; false saves its memory and casts before every gather",
        .used_if = {kShardsWeights}),
    KEY(parallelism.copy_engines,
        "transfers by copies between GPUs instead of collectives on their SMs: "
        "gathers of the forward, or all gathers and reductions (256 MiB "
        "more); all ranks on one host. auto: all where NVLink joins them",
        .used_if = {kShards},
        .conflicts =
            {{{"parallelism.strategy"},
              WHEN(
                  c.parallelism.copy_engines ==
                      CopyEngines{.gathers = CopyEngines::Gathers::forward} &&
                  c.parallelism.strategy->keeps_whole_weights()),
              "the strategy gathers no weights in forward; use none or all"},
             {{"parallelism.keep_compute_weights"},
              WHEN(
                  c.parallelism.copies() &&
                  !c.parallelism.keep_compute_weights),
              "compute weights are copied, and are not kept; choose one"}}),
    KEY(parallelism.granularity,
        "parts that a rank boundary may not cut: element, row, dim0 (a slice "
        "along the first dimension), block:N (N rows), chunk (each tensor as "
        "torch.chunk cuts it) or tensor"),
    KEY(parallelism.max_padding,
        "a layout with a larger share of padding is refused"),

    KEY(comm.timeout_s,
        "seconds after which a rank that is silent or late for a collective is "
        "named and the run ends; longer than the longest pause between two "
        "collectives (checkpoints, evaluation)",
        .range = {1, 1e6}),
    KEY(comm.watcher,
        "compare what the ranks do; without it a hang ends only where the "
        "backend has a timeout (Gloo)"),
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
      "multiple of parallelism.tensor_parallel_degree, which is {}; change one "
      "of them",
      p.expert_tensor_parallel_degree,
      p.tensor_parallel_degree);
  FLATSHARD_CHECK(
      config.training.seq_len % p.tensor_parallel_degree == 0,
      config,
      "parallelism.tensor_parallel_degree = {}: expected a divisor of "
      "training.seq_len, which is {}; change one of them",
      p.tensor_parallel_degree,
      config.training.seq_len);
}

}  // namespace

KeyTable parallelism_keys() {
  return {kParallelismKeys, check_parallelism};
}

}  // namespace flatshard::config
