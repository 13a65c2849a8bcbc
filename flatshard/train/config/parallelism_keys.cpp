#include "flatshard/train/config/parallelism_keys.h"

#include "flatshard/core/error.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/config/key_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
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
constexpr UsedIf kSharesSequences{
    "parallelism.context_parallel_degree",
    WHEN(c.parallelism.shares_sequences()),
    "more ranks than one"};
constexpr UsedIf kGathersKeys{
    "parallelism.context_parallel_method",
    WHEN(c.parallelism.gathers_keys()),
    "\"a2a+all_gather\""};
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
#define KEY(...) KEY_ROW(parallelism, __VA_ARGS__)
#include "flatshard/train/config/sections/parallelism.def"
#define KEY(...) KEY_ROW(comm, __VA_ARGS__)
#include "flatshard/train/config/sections/comm.def"
};

void check_copies_of_heads(const Parallelism& p) {
  FLATSHARD_CHECK(
      !p.copies_heads() || p.head_ranks() > 1,
      config,
      "parallelism.context_parallel_comm = \"copies\" with "
      "context_parallel_a2a_degree = 1: no ranks exchange heads; use \"auto\", "
      "or a larger degree");
}

void check_parallelism(const Config& config) {
  const Parallelism& p = config.parallelism;
  FLATSHARD_CHECK(
      p.pipeline_parallel_degree == 1,
      config,
      "parallelism.pipeline_parallel_degree = {} is not supported; leave it at "
      "1",
      p.pipeline_parallel_degree);
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
  FLATSHARD_CHECK(
      config.training.seq_len %
              (p.context_parallel_degree * p.tensor_parallel_degree) ==
          0,
      config,
      "parallelism.context_parallel_degree = {}{}: expected a divisor of "
      "training.seq_len = {}; change one of them",
      p.context_parallel_degree,
      p.shares_layers() ? fmt::format(
                              " * tensor_parallel_degree = {}",
                              p.tensor_parallel_degree)
                        : "",
      config.training.seq_len);
  FLATSHARD_CHECK(
      p.post_forward_ranks == 0 || !p.shares_sequences() ||
          p.head_ranks() % p.post_forward_ranks == 0,
      config,
      "parallelism.post_forward_ranks = {}: expected a divisor of "
      "parallelism.{} = {}, because adjacent ranks share "
      "sequences; change one of them",
      p.post_forward_ranks,
      p.context_hosts() == 1 ? "context_parallel_degree"
                             : "context_parallel_a2a_degree",
      p.head_ranks());
  FLATSHARD_CHECK(
      p.context_parallel_degree % p.head_ranks() == 0,
      config,
      "parallelism.context_parallel_a2a_degree = {}: expected a divisor of "
      "parallelism.context_parallel_degree = {}; change one of them",
      p.context_parallel_a2a_degree,
      p.context_parallel_degree);
  FLATSHARD_CHECK(
      p.context_hosts() == 1 ||
          config.training.seq_len % (2 * p.context_hosts()) == 0,
      config,
      "training.seq_len = {}: expected a multiple of {}, two chunks for each "
      "of the {} groups of parallelism.context_parallel_degree = {} / "
      "context_parallel_a2a_degree = {} ranks; change one of them",
      config.training.seq_len,
      2 * p.context_hosts(),
      p.context_hosts(),
      p.context_parallel_degree,
      p.head_ranks());
  check_copies_of_heads(p);
}

std::int64_t head_ranks_on_host(
    const Parallelism& p,
    std::int64_t ranks_per_host) {
  const std::int64_t apart = context_rank_stride(p);
  const std::int64_t adjacent =
      std::gcd(p.context_parallel_degree * apart, ranks_per_host);
  return adjacent % apart == 0 ? adjacent / apart : 1;
}

}  // namespace

void resolve_head_ranks(
    Parallelism& p,
    std::int64_t world,
    std::int64_t ranks_per_host) {
  if (!p.gathers_keys()) {
    return;
  }
  if (p.context_parallel_a2a_degree == 0) {
    FLATSHARD_CHECK(
        ranks_per_host > 0,
        config,
        "parallelism.context_parallel_method = \"a2a+all_gather\": expected an "
        "equal number of ranks on each host from the launcher, found none; set "
        "parallelism.context_parallel_a2a_degree to the number of adjacent "
        "ranks that exchange heads");
    p.context_parallel_a2a_degree = ranks_per_host >= world
                                        ? p.context_parallel_degree
                                        : head_ranks_on_host(p, ranks_per_host);
  }
  FLATSHARD_CHECK(
      p.context_hosts() > 1,
      config,
      "parallelism.context_parallel_method = \"a2a+all_gather\": expected "
      "fewer ranks that exchange heads than context_parallel_degree = {}, got "
      "all of them; use \"a2a\", or set context_parallel_a2a_degree to a "
      "smaller number",
      p.context_parallel_degree);
  check_copies_of_heads(p);
}

KeyTable parallelism_keys() {
  return {kParallelismKeys, check_parallelism};
}

}  // namespace flatshard::config
