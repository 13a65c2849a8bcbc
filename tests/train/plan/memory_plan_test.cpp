// A plan and a start describe a model's units by one function, and the memory
// that a start allocates is what the plan predicts.
#include "flatshard/core/error.h"
#include "flatshard/plan/estimate.h"
#include "flatshard/train/plan/planned_run.h"
#include "flatshard/train/plan/run_plan.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/run_lora.h"
#include "flatshard/train/setup/train_state.h"
#include "tests/support/case_name.h"
#include "tests/support/ranks.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <vector>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::RankContext;
using testing::run_ranks;
using Table = std::map<std::string, std::int64_t>;

/// A run, by what differs from the plain one.
struct Case {
  std::string name;
  int ranks = 2;
  std::vector<std::string> set;
};

void PrintTo(const Case& of, std::ostream* out) {
  *out << of.name;
}

const std::string kDenseModel = R"(
[model]
dim = 64
layers = 3
heads = 4
kv_heads = 2
ffn_dim = 160
vocab_size = 201
)";
const std::string kExpertsModel = R"(
[model]
family = "moe"
dim = 32
layers = 3
heads = 2
kv_heads = 1
ffn_dim = 48
vocab_size = 101
num_experts = 4
moe_ffn_dim = 24
shared_experts = 1
dense_layers = 1
)";

Config config_of(const Case& of) {
  const bool experts = of.name.starts_with("experts");
  return resolve_config(
      parse_config(
          (experts ? kExpertsModel : kDenseModel) +
              "[data]\ntrain = \"random\"\n[training]\nseq_len = 16\n"
              "[precision]\ncompute = \"bfloat16\"\n",
          "test.toml",
          of.set),
      of.ranks);
}

plan::Job job_of(const Case& of) {
  const Config config = config_of(of);
  // auto selects copies on GPUs, and collectives on CPUs.
  return plan_job(
      config,
      model_config(config),
      of.ranks,
      {.ranks = 8, .nvlink = false});
}

Table planned(const Case& of) {
  const plan::Job job = job_of(of);
  Table table;
  for (const plan::RoleBytes& row :
       plan::memory_of(job, plan::plan_units(job))) {
    table[row.role] = row.nbytes;
  }
  return table;
}

/// A start allocates the units that a plan prices.
void expect_units(const Runtime& runtime, const std::vector<UnitPlan>& plans) {
  ASSERT_EQ(runtime.units().size(), plans.size());
  for (std::size_t u = 0; u < plans.size(); ++u) {
    const Unit& unit = *runtime.units()[u];
    const UnitSpec& spec = plans[u].spec;
    EXPECT_EQ(unit.spec(spec.parent, spec.policy), spec) << spec.name;
    ASSERT_EQ(unit.groups().size(), plans[u].groups.size()) << spec.name;
    for (std::size_t g = 0; g < unit.groups().size(); ++g) {
      const GroupPlan& own = unit.groups()[g]->plan();
      const GroupPlan& plan = plans[u].groups[g];
      EXPECT_EQ(own.storage, plan.storage)
          << spec.name << ": " << to_string(own.storage) << ", planned "
          << to_string(plan.storage);
      EXPECT_EQ(own.bytes(), plan.bytes()) << spec.name;
      EXPECT_EQ(own.layout->describe(), plan.layout->describe()) << spec.name;
    }
  }
}

/// Returns the memory table of a real start, of rank 0 with the states of the
/// rank that has the most.
Table measured(const Case& of) {
  Table table;
  std::mutex mutex;
  std::int64_t most_states = 0;
  run_ranks(of.ranks, [&](RankContext& context) {
    const Config config = config_of(of);
    const auto mesh = context.mesh(mesh_axes(config.parallelism));
    const TrainState state = make_train_state(
        config,
        model_config(config),
        mesh,
        config.training.global_batch_size /
            (config.training.local_batch_size *
             config.parallelism.num_data_ranks(of.ranks)));
    if (state.lora) {
      keep_float8_alone(frozen_groups(*state.runtime));
    }
    // Other ranks of tensor parallelism may have slices of another size.
    if (context.rank % config.parallelism.tensor_parallel_degree == 0) {
      const std::lock_guard lock(mutex);
      most_states = std::max(most_states, state.optimizer->state_nbytes());
    }
    if (context.rank == 0) {
      expect_units(*state.runtime, plan::plan_units(job_of(of)));
      for (const MemoryRow& row : memory_rows(state)) {
        table[row.role] = row.nbytes;
      }
    }
  });
  table.at("optimizer state") = most_states;
  return table;
}

class MemoryPlanTest : public ::testing::TestWithParam<Case> {};

TEST_P(MemoryPlanTest, EqualsTheTableOfARealStart) {
  EXPECT_EQ(planned(GetParam()), measured(GetParam()));
}

const std::string kNone = "parallelism.copy_engines=none";
const std::string kShared = "parallelism.tensor_parallel_degree=2";
const std::string kSequences = "parallelism.context_parallel_degree=2";
const std::string kCut = "parallelism.expert_tensor_parallel_degree=2";
const std::string kAdapters = "lora.rank=8";
const std::string kInt8 = "optimizer.state_dtype=int8";
const std::string kMuon = "optimizer.name=muon";
// In a block, matrices of attention use Muon, others SGD, and norms AdamW.
const std::string kGroups =
    "optimizer.param_groups=[{pattern = 'self_attn', name = 'muon'}, "
    "{pattern = 'mlp', name = 'sgd', momentum = 0.9}]";
// In a block, q_proj and o_proj have int8 states, the MLP bfloat16 ones, and
// the others float32.
const std::string kFormats =
    "optimizer.param_groups=[{pattern = 'mlp', state_dtype = 'bfloat16'}, "
    "{pattern = 'q_proj|o_proj', state_dtype = 'int8'}]";
const std::string kOfAttention = "lora.targets=q_proj, o_proj";

INSTANTIATE_TEST_SUITE_P(
    Runs,
    MemoryPlanTest,
    ::testing::Values(
        Case{"zero3", 2, {kNone}},
        Case{"zero3_alone", 1, {}},
        Case{"zero3_of_three", 3, {kNone, "parallelism.granularity=row"}},
        Case{"copies", 2, {"parallelism.copy_engines=all"}},
        Case{"zero2", 2, {kNone, "parallelism.strategy=zero2"}},
        Case{"int8_states", 2, {kNone, "optimizer.state_dtype=int8"}},
        Case{"offloaded_states", 2, {kNone, "optimizer.offload_states=true"}},
        Case{
            "offloaded_int8_states",
            2,
            {kNone,
             "optimizer.state_dtype=int8",
             "optimizer.offload_states=true"}},
        Case{
            "int8_states_of_three",
            3,
            {kNone,
             "optimizer.state_dtype=int8",
             "parallelism.granularity=row",
             "parallelism.max_padding=1"}},
        Case{
            "bfloat16_states",
            2,
            {kNone,
             "optimizer.state_dtype=bfloat16",
             "precision.main_params=bfloat16",
             "optimizer.stochastic_rounding=true"}},
        Case{
            "experts_with_int8_states",
            4,
            {kNone,
             "optimizer.state_dtype=int8",
             "model.dim=256",
             "model.moe_ffn_dim=256",
             "parallelism.expert_parallel_degree=2",
             "parallelism.max_padding=1"}},
        Case{"int8_states_alone", 1, {kInt8}},
        Case{
            "int8_states_zero2",
            2,
            {kNone, kInt8, "parallelism.strategy=zero2"}},
        Case{
            "int8_states_of_replicas",
            4,
            {kNone, kInt8, "parallelism.data_parallel_replicate_degree=2"}},
        Case{"formats_of_groups_alone", 1, {kFormats}},
        Case{"formats_of_groups", 2, {kNone, kFormats}},
        Case{"formats_of_groups_on_four", 4, {kNone, kFormats}},
        Case{
            "formats_of_groups_zero2",
            2,
            {kNone, kFormats, "parallelism.strategy=zero2"}},
        Case{
            "formats_of_groups_of_replicas",
            4,
            {kNone, kFormats, "parallelism.data_parallel_replicate_degree=2"}},
        Case{
            "formats_of_groups_shared",
            4,
            {kNone,
             kShared,
             "optimizer.param_groups=[{pattern = 'mlp', state_dtype = "
             "'bfloat16'}, {pattern = 'q_proj', state_dtype = 'int8'}]"}},
        Case{
            "bfloat16_states_on_four",
            4,
            {kNone, "optimizer.state_dtype=bfloat16"}},
        Case{
            "bfloat16_states_shared",
            2,
            {kNone, kShared, "optimizer.state_dtype=bfloat16"}},
        Case{"muon_alone", 1, {kMuon}},
        Case{"muon", 2, {kNone, kMuon}},
        Case{"muon_of_four", 4, {kNone, kMuon}},
        Case{
            "muon_of_three_rows",
            3,
            {kNone, kMuon, "parallelism.granularity=row"}},
        Case{"muon_zero2", 2, {kNone, kMuon, "parallelism.strategy=zero2"}},
        Case{"muon_zero0", 2, {kMuon, "parallelism.strategy=zero0"}},
        Case{
            "muon_of_replicas",
            4,
            {kNone, kMuon, "parallelism.data_parallel_replicate_degree=2"}},
        Case{"muon_shared", 4, {kNone, kMuon, kShared}},
        Case{
            "experts_with_muon",
            4,
            {kNone, kMuon, "parallelism.expert_parallel_degree=2"}},
        Case{"groups_of_three_algorithms", 2, {kNone, kGroups}},
        Case{
            "groups_of_three_algorithms_zero2",
            4,
            {kNone, kGroups, "parallelism.strategy=zero2"}},
        Case{
            "groups_in_bfloat16",
            2,
            {kNone,
             "optimizer.state_dtype=bfloat16",
             "optimizer.param_groups=[{pattern = 'embed', name = 'sgd'}, "
             "{pattern = 'norm', lr_mult = 0.5}]"}},
        Case{"zero1", 2, {kNone, "parallelism.strategy=zero1"}},
        Case{"zero0", 2, {"parallelism.strategy=zero0"}},
        Case{
            "hsdp",
            4,
            {kNone, "parallelism.data_parallel_replicate_degree=2"}},
        Case{
            "hfsdp",
            4,
            {kNone,
             "parallelism.strategy=hfsdp",
             "parallelism.data_parallel_replicate_degree=2"}},
        Case{
            "kept",
            2,
            {kNone,
             "parallelism.reshard_after_forward=false",
             "parallelism.prefetch=2"}},
        Case{
            "cast_for_gathers",
            2,
            {kNone, "parallelism.keep_compute_weights=false"}},
        Case{"post_forward", 4, {kNone, "parallelism.post_forward_ranks=2"}},
        Case{
            "accumulation",
            2,
            {kNone,
             "training.global_batch_size=4",
             "optimizer.name=sgd",
             "optimizer.momentum=0.9"}},
        Case{
            "tied",
            2,
            {kNone, "model.tie_embeddings=true", "precision.reduce=bfloat16"}},
        Case{"budget", 2, {kNone, "parallelism.memory_budget=0.002"}},
        Case{"rowwise", 2, {kNone, "float8.recipe=rowwise"}},
        Case{"tensorwise", 2, {kNone, "float8.recipe=tensorwise"}},
        Case{
            "first_and_last_in_bfloat16",
            2,
            {kNone,
             "float8.recipe=tensorwise",
             "float8.keep_first_last=true",
             "float8.exclude=*.o_proj.weight"}},
        Case{
            "mxfp8",
            2,
            {kNone, "float8.recipe=mxfp8", "float8.column_plane=stored"}},
        Case{
            "mxfp8_units",
            2,
            {kNone, "float8.recipe=mxfp8", "float8.gather_parts=unit"}},
        Case{
            "rowwise_modules_zero2",
            2,
            {kNone,
             "float8.recipe=rowwise",
             "float8.gather_parts=module",
             "parallelism.strategy=zero2"}},
        Case{"shared", 2, {kNone, kShared}},
        Case{"shared_copies", 4, {"parallelism.copy_engines=all", kShared}},
        Case{"shared_zero2", 4, {kNone, kShared, "parallelism.strategy=zero2"}},
        Case{"shared_zero1", 4, {kNone, kShared, "parallelism.strategy=zero1"}},
        Case{"shared_zero0", 4, {kShared, "parallelism.strategy=zero0"}},
        Case{
            "shared_hsdp",
            8,
            {kNone,
             kShared,
             "parallelism.data_parallel_replicate_degree=2",
             "training.global_batch_size=8"}},
        Case{
            "shared_tied_biases",
            4,
            {kNone,
             kShared,
             "model.tie_embeddings=true",
             "model.attention_bias=true",
             "precision.reduce=bfloat16"}},
        Case{
            "shared_copies_of_activations",
            4,
            {kNone, kShared, "parallelism.tensor_parallel_comm=copies"}},
        Case{"shared_rowwise", 4, {kNone, kShared, "float8.recipe=rowwise"}},
        Case{"sequences", 4, {kNone, kSequences}},
        Case{
            "sequences_over_hosts",
            4,
            {kNone,
             kSequences,
             "parallelism.context_parallel_method=a2a+all_gather",
             "parallelism.context_parallel_a2a_degree=1"}},
        Case{
            "sequences_and_layers",
            4,
            {kNone, kSequences, kShared, "parallelism.strategy=zero2"}},
        Case{
            "sequences_by_copies",
            4,
            {kNone, kSequences, "parallelism.context_parallel_comm=copies"}},
        Case{
            "shared_tensorwise_copies",
            4,
            {"parallelism.copy_engines=all",
             kShared,
             "float8.recipe=tensorwise"}},
        Case{
            "experts_divided_and_shared",
            4,
            {"parallelism.copy_engines=all",
             "parallelism.token_exchange=copies",
             "parallelism.expert_parallel_degree=2",
             "model.kv_heads=2",
             kShared}},
        Case{
            "experts_cut",
            4,
            {kNone, kCut, "parallelism.expert_parallel_degree=2"}},
        Case{
            "experts_cut_copies",
            4,
            {"parallelism.copy_engines=all",
             kCut,
             "training.global_batch_size=8"}},
        Case{
            "experts_cut_zero1",
            4,
            {kNone, kCut, "parallelism.strategy=zero1"}},
        Case{
            "experts_cut_by_ranks_that_share",
            4,
            {kNone,
             kCut,
             kShared,
             "parallelism.expert_parallel_degree=2",
             "model.kv_heads=2"}},
        Case{"lora", 2, {kNone, kAdapters}},
        Case{"lora_copies", 2, {"parallelism.copy_engines=all", kAdapters}},
        Case{"lora_zero2", 2, {kNone, kAdapters, "parallelism.strategy=zero2"}},
        Case{"lora_zero0", 2, {kAdapters, "parallelism.strategy=zero0"}},
        Case{
            "lora_hsdp",
            4,
            {kNone,
             kAdapters,
             "parallelism.data_parallel_replicate_degree=2",
             "training.global_batch_size=8"}},
        Case{
            "lora_cast_for_gathers",
            2,
            {kNone, kAdapters, "parallelism.keep_compute_weights=false"}},
        Case{
            "lora_of_attention_tied",
            2,
            {kNone,
             kAdapters,
             kOfAttention,
             "model.tie_embeddings=true",
             "parallelism.reshard_after_forward=false"}},
        Case{"lora_rowwise", 2, {kNone, kAdapters, "float8.recipe=rowwise"}},
        Case{
            "lora_tensorwise_zero2",
            2,
            {kNone,
             kAdapters,
             "float8.recipe=tensorwise",
             "parallelism.strategy=zero2"}},
        Case{
            "lora_float32",
            2,
            {kNone, kAdapters, "precision.compute=float32"}},
        Case{"lora_shared", 4, {kNone, kAdapters, kShared}},
        Case{
            "experts_lora",
            4,
            {kNone,
             kAdapters,
             kOfAttention,
             kCut,
             "parallelism.expert_parallel_degree=2"}},
        Case{"experts", 2, {kNone}},
        Case{
            "experts_divided",
            4,
            {kNone, "parallelism.expert_parallel_degree=2"}},
        Case{
            "experts_divided_over_sequences",
            4,
            {kNone, kSequences, "parallelism.expert_parallel_degree=4"}},
        Case{
            "experts_copied",
            2,
            {"parallelism.copy_engines=all",
             "parallelism.token_exchange=copies",
             "parallelism.expert_parallel_degree=2"}},
        Case{
            "experts_of_replicas",
            4,
            {kNone,
             "parallelism.expert_parallel_degree=2",
             "parallelism.data_parallel_replicate_degree=2",
             "training.global_batch_size=8"}}),
    testing::kCaseName);

// Padding has the format of the elements before it, so bytes are near.
TEST(PlannedUpdates, StatesHaveTheFormatsOfTheirGroups) {
  const auto states_of = [](const std::string& values) {
    const plan::Job job = job_of(
        {"formats",
         1,
         {"optimizer.param_groups=[{pattern = 'mlp', " + values + "}]"}});
    return static_cast<double>(job.state_nbytes);
  };
  const double all = states_of("lr_mult = 0.5");
  constexpr double kMlp = 3 * 3 * 64 * 160;
  constexpr double kPadding = 0.02;
  EXPECT_NEAR(
      states_of("state_dtype = 'bfloat16'"),
      all - 4 * kMlp,
      kPadding * all);
  EXPECT_NEAR(
      states_of("state_dtype = 'int8'"),
      all - 6 * kMlp,
      kPadding * all);
  EXPECT_NEAR(states_of("name = 'sgd'"), all - 8 * kMlp, kPadding * all);
  EXPECT_NEAR(states_of("name = 'muon'"), all - 4 * kMlp, kPadding * all);
}

// The work of Muon on 3 layers with 4 + 3 matrices.
TEST(PlannedUpdates, MuonOrthogonalizesTheMatricesOfBlocks) {
  const auto job_on = [](int ranks, std::vector<std::string> set) {
    set.push_back(kMuon);
    return job_of({"muon", ranks, std::move(set)});
  };
  const auto products = [](const plan::Job& job) {
    double flops = 0;
    for (const plan::MatrixWork& work : job.matrices) {
      flops += plan::flops(work.kernels);
    }
    return flops;
  };
  // s^2 (2 l + s) of q and o, k and v, and three of the MLP, 5 times.
  constexpr double kOfLayer = 2 * 64 * 64 * (2 * 64 + 64) +
                              2 * 32 * 32 * (2 * 64 + 32) +
                              3 * 64 * 64 * (2 * 160 + 64);
  const plan::Job alone = job_on(1, {});
  ASSERT_EQ(alone.matrices.size(), 1U);
  EXPECT_EQ(products(alone), 2 * 5 * 3 * kOfLayer);
  EXPECT_EQ(alone.matrices[0].exchange_nbytes, 0);
  // Nothing is sent: no separate buffer for the owned matrices.
  constexpr std::int64_t kNumel =
      3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 160);
  EXPECT_EQ(alone.matrices[0].directions_nbytes, 2 * kNumel);
  EXPECT_EQ(alone.matrices[0].scratch_nbytes, 2 * (2 * 64 * 160 + 2 * 64 * 64));
  const plan::Job two = job_on(2, {kNone});
  ASSERT_EQ(two.matrices.size(), 1U);
  EXPECT_EQ(plan::group_of(two.matrices[0].axes, 8).size, 2);
  EXPECT_LE(products(two), 0.6 * products(alone));
  EXPECT_GE(products(two), 0.5 * products(alone));
  EXPECT_GT(two.matrices[0].exchange_nbytes, 0);
  EXPECT_LE(two.matrices[0].exchange_nbytes, 2 * kNumel);
  // Replicas repeat the work, and exchange nothing with each other.
  const plan::Job replicas =
      job_on(4, {kNone, "parallelism.data_parallel_replicate_degree=2"});
  EXPECT_EQ(products(replicas), products(two));
  EXPECT_EQ(plan::group_of(replicas.matrices[0].axes, 8).size, 2);
  const plan::Job everywhere = job_on(2, {"parallelism.strategy=zero0"});
  EXPECT_EQ(products(everywhere), products(alone));
  EXPECT_EQ(plan::group_of(everywhere.matrices[0].axes, 8).size, 1);
}

TEST(PlannedUpdates, RefuseWhatTheTrainerRefuses) {
  const auto refused = [](std::vector<std::string> set) {
    try {
      job_of({"refused", 2, std::move(set)});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::config);
      return error.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(
      refused(
          {"optimizer.param_groups=[{pattern = 'self_attn', name = 'muon'}, "
           "{pattern = 'mlp', state_dtype = 'int8'}]"}),
      AllOf(
          HasSubstr("optimizer.state_dtype: AdamW updates"),
          HasSubstr("because their states are stored together"),
          HasSubstr("Set state_dtype in optimizer.param_groups")));
  EXPECT_THAT(
      refused(
          {kMuon,
           "precision.main_params=bfloat16",
           "optimizer.stochastic_rounding=true"}),
      HasSubstr("stochastic rounding requires one algorithm"));
  EXPECT_THAT(
      refused({kShared, kInt8}),
      HasSubstr("is a slice of a tensor of shape [64, 64] and splits blocks"));
  EXPECT_THAT(
      refused({"optimizer.param_groups=[{pattern = 'embd', lr_mult = 2}]"}),
      HasSubstr("pattern \"embd\" matches no parameter"));
}

plan::Job shared_job(
    std::vector<std::string> set,
    const PlannedHost& host = {.ranks = 8}) {
  set.push_back(kShared);
  const Config config = config_of({"shared", 4, std::move(set)});
  return plan_job(config, model_config(config), 4, host);
}

TEST(PlannedCopies, OfActivationsAreWhatAutoTakesOverNvlink) {
  const plan::Job found = shared_job({});
  const plan::Job asked =
      shared_job({"parallelism.tensor_parallel_comm=copies"});
  EXPECT_TRUE(found.copy_activations);
  EXPECT_GT(found.other_nbytes.at("shared layers"), 0);
  EXPECT_EQ(found.other_nbytes, asked.other_nbytes);
  EXPECT_EQ(found.layer_kinds, asked.layer_kinds);
  EXPECT_NE(
      found.layer_kinds,
      shared_job({"parallelism.tensor_parallel_comm=collective"}).layer_kinds);
}

// Matmuls in parts have the FLOPs of undivided ones.
TEST(PlannedCopies, OfActivationsOverlapWithPartsOfProducts) {
  const auto work = [](const std::string& comm) {
    const plan::Job job =
        shared_job({"parallelism.tensor_parallel_comm=" + comm});
    return job.layer_kinds.front().nodes.at(PlanNode::attend);
  };
  const plan::NodeWork copies = work("copies");
  const plan::NodeWork collectives = work("collective");
  EXPECT_EQ(plan::flops(copies.forward), plan::flops(collectives.forward));
  EXPECT_EQ(plan::flops(copies.backward), plan::flops(collectives.backward));
  // q, o, gate and down have two parts each, of which one ends with a transfer.
  EXPECT_EQ(copies.forward.size(), collectives.forward.size() + 8);
}

TEST(PlannedCopies, OfActivationsAreNotWhatAutoTakesElsewhere) {
  EXPECT_FALSE(shared_job({}, {.ranks = 8, .nvlink = false}).copy_activations);
  EXPECT_FALSE(shared_job({}, {.ranks = 1}).copy_activations);
  EXPECT_FALSE(shared_job({"float8.recipe=rowwise"}).copy_activations);
  EXPECT_FALSE(shared_job({kAdapters}).copy_activations);
  EXPECT_FALSE(shared_job({"parallelism.tensor_parallel_comm=collective"})
                   .copy_activations);
}

TEST(PlannedCopies, OfActivationsStayOnOneHost) {
  try {
    shared_job({"parallelism.tensor_parallel_comm=copies"}, {.ranks = 1});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config);
    EXPECT_NE(
        std::string(error.what())
            .find("2 ranks that share layers on hosts of 1"),
        std::string::npos);
  }
}

}  // namespace
}  // namespace flatshard
