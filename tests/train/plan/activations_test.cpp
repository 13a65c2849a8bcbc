// A plan's prediction of the tensors that autograd saves of a block equals what
// autograd saves.
#include "flatshard/models/llama.h"
#include "flatshard/models/lora.h"
#include "flatshard/train/plan/planned_run.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/run_lora.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace flatshard {
namespace {

/// Bytes that this thread has allocated on the CPU and not given back.
class LiveBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(
      void* /*ptr*/,
      std::int64_t alloc_size,
      std::size_t /*total_allocated*/,
      std::size_t /*total_reserved*/,
      c10::Device /*device*/) override {
    nbytes += alloc_size;
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::int64_t nbytes = 0;
};

constexpr std::int64_t kTokens = 128;
// The ranks that these tests run have no NVLink.
constexpr PlannedHost kCpus{.ranks = 8, .nvlink = false};

Config config_of(
    const std::vector<std::string>& set,
    std::int64_t ranks = 1,
    std::int64_t ranks_per_host = 0) {
  return resolve_config(
      parse_config(
          "[model]\nfamily = \"auto\"\ndim = 64\nlayers = 1\nheads = 4\n"
          "kv_heads = 4\nffn_dim = 160\nvocab_size = 64\n"
          "[data]\ntrain = \"random\"\n[training]\nseq_len = 128\n"
          "[precision]\ncompute = \"bfloat16\"\n",
          "test.toml",
          set),
      ranks,
      ranks_per_host);
}

/// Returns the memory that is alive after a forward of a block: autograd's
/// saved tensors, with the block's result in place of its input.
/// @param ranks     that share it; null: none.
/// @param exchange  of its tokens; null: they stay where they are.
/// @param context   ranks that have other tokens; null: none.
std::int64_t measured(
    const Config& config,
    const nn::TensorParallelPtr& ranks = nullptr,
    const std::shared_ptr<nn::TokenExchange>& exchange = nullptr,
    const nn::ContextParallelPtr& context = nullptr) {
  const models::ModelConfig shape = model_config(config);
  models::Llama model(
      shape,
      models::LlamaOptions{
          .activation_checkpoint = config.activation_checkpoint.mode,
          .keep_attention = config.activation_checkpoint.saves_attention(),
          .moe = {.exchange = exchange},
          .ranks = ranks,
          .context = context});
  if (config.lora.enabled()) {
    models::add_lora(*model, lora_config(config.lora));
  }
  nn::materialize(*model, at::kCPU, at::kBFloat16, nn::random_fill());
  const auto input = [&] {
    const std::int64_t own = kTokens / (ranks ? ranks->size() : 1) /
                             (context ? context->num_ranks() : 1);
    return at::ones({1, own, shape.dim}, at::kBFloat16);
  };
  // The rotary table belongs to the model.
  model->blocks().front()(input());
  const at::Tensor x = input().requires_grad_();
  const auto live = std::make_shared<LiveBytes>();
  at::Tensor y;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, live);
    y = model->blocks().front()(x);
  }
  return live->nbytes;
}

plan::LayerWork planned(const Config& config, std::int64_t ranks = 1) {
  const plan::Job job = plan_job(config, model_config(config), ranks, kCpus);
  return job.layer_kinds[job.kind_of_layer.front()];
}

TEST(Activations, OfADenseBlockAreThoseThatAutogradSaves) {
  const Config config = config_of({});
  EXPECT_EQ(planned(config).saved_nbytes, measured(config));
}

TEST(Activations, OfABlockWithNormsOfHeads) {
  const Config config = config_of(
      {"model.qk_norm=true",
       "model.family=moe",
       "model.num_experts=4",
       "model.dense_layers=1"});
  EXPECT_EQ(planned(config).saved_nbytes, measured(config));
}

// Rows that an exchange brings are saved. Others are made again.
TEST(Activations, OfExpertsContainTheRowsOfAnExchange) {
  const auto with = [](const char* overlap) {
    return config_of(
        {"model.family=moe",
         "model.num_experts=4",
         "model.experts_per_token=2",
         "model.moe_ffn_dim=96",
         "training.global_batch_size=2",
         std::string("parallelism.overlap_expert_parallel=") + overlap});
  };
  const Config plain = with("false");
  const std::int64_t rows =
      measured(plain, nullptr, std::make_shared<nn::LocalExchange>()) -
      measured(plain);
  EXPECT_EQ(rows, 2 * kTokens * 64 * 2);
  EXPECT_EQ(
      planned(with("true")).saved_nbytes,
      planned(plain).saved_nbytes + rows);
}

/// Also counts the most that was alive.
class PeakBytes : public LiveBytes {
 public:
  void reportMemoryUsage(
      void* ptr,
      std::int64_t alloc_size,
      std::size_t total_allocated,
      std::size_t total_reserved,
      c10::Device device) override {
    LiveBytes::reportMemoryUsage(
        ptr,
        alloc_size,
        total_allocated,
        total_reserved,
        device);
    most = std::max(most, nbytes);
  }
  std::int64_t most = 0;
};

// Forward and backward of a block, without its weights' gradients in between.
std::int64_t most_alive(const Config& config) {
  const models::ModelConfig shape = model_config(config);
  models::Llama model(
      shape,
      models::LlamaOptions{
          .activation_checkpoint = config.activation_checkpoint.mode,
          .mlp_chunk_tokens = config.activation_checkpoint.mlp_chunk_tokens});
  nn::materialize(*model, at::kCPU, at::kBFloat16, nn::random_fill());
  const auto step = [&] {
    const at::Tensor x =
        at::ones({1, kTokens, shape.dim}, at::kBFloat16).requires_grad_();
    model->blocks().front()(x).sum().backward();
  };
  step();  // gradients have their memory
  const auto live = std::make_shared<PeakBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, live);
  step();
  return live->most;
}

// At least gate, up and a gradient of them are as wide as the feed-forward part
// and exist at a time. Chunks of an eighth leave an eighth of it, so more than
// the half of it is gone.
TEST(Activations, OfFeedForwardChunksExistOneAfterTheOther) {
  for (const char* mode : {"full", "selective"}) {
    const std::vector<std::string> whole{
        "model.ffn_dim=1600",
        std::string("activation_checkpoint.mode=") + mode};
    std::vector<std::string> chunks = whole;
    chunks.emplace_back("activation_checkpoint.mlp_chunk_tokens=16");
    constexpr std::int64_t kWide = 3 * kTokens * 1600 * 2;
    EXPECT_LE(
        most_alive(config_of(chunks)),
        most_alive(config_of(whole)) - kWide / 2)
        << mode;
    EXPECT_LE(
        planned(config_of(chunks)).transient_nbytes,
        planned(config_of(whole)).transient_nbytes - kWide / 2);
    EXPECT_EQ(
        planned(config_of(chunks)).input_nbytes,
        planned(config_of(whole)).input_nbytes);
  }
}

TEST(Activations, OfTheLossAreTheLogitsOfOneChunk) {
  const auto ends = [](const std::vector<std::string>& set) {
    const Config config = config_of(set);
    return plan_job(config, model_config(config), 1, kCpus).ends;
  };
  const plan::LayerWork whole = ends({});
  const plan::LayerWork chunks =
      ends({"activation_checkpoint.loss_chunk_tokens=16"});
  constexpr std::int64_t kLogits = 64 * 2;  // of a token
  constexpr std::int64_t kGradients = kTokens * 64 * 2 + 64 * 64 * 4;
  EXPECT_EQ(
      whole.saved_nbytes - chunks.saved_nbytes,
      kTokens * kLogits - kGradients);
  EXPECT_EQ(chunks.transient_nbytes - whole.transient_nbytes, 16 * kLogits);
  const auto products = [](const plan::Kernels& kernels) {
    return std::ranges::count_if(kernels, [](const plan::Kernel& kernel) {
      return kernel.kind == plan::Kernel::Kind::product;
    });
  };
  const plan::NodeWork& head = chunks.nodes.at(PlanNode::head);
  EXPECT_EQ(products(head.forward), 3);
  EXPECT_EQ(products(head.backward) + products(head.wgrad), 0);
}

// The last matmul, and what reads nothing else than its input, run once.
TEST(Activations, ASecondRunMakesNoResult) {
  using Kind = plan::Kernel::Kind;
  const auto kept = [](const plan::Kernels& kernels, Kind kind) {
    return std::ranges::count_if(kernels, [&](const plan::Kernel& kernel) {
      return kernel.kind == kind && kernel.is_kept;
    });
  };
  const auto again = [](const plan::Kernels& kernels, Kind kind) {
    return std::ranges::count(kernels, kind, &plan::Kernel::kind);
  };
  const auto work =
      [](std::vector<std::string> set, PlanNode node, const char* mode) {
        set.push_back(std::string("activation_checkpoint.mode=") + mode);
        return planned(config_of(set)).nodes.at(node);
      };
  EXPECT_EQ(kept(work({}, PlanNode::attend, "full").forward, Kind::product), 1);
  EXPECT_EQ(
      again(work({}, PlanNode::attend, "selective").recompute, Kind::product),
      2);
  // The base matmul and B make the result of an adapted layer.
  const plan::NodeWork adapted = work(
      {"lora.rank=8", "lora.targets=all-linear"},
      PlanNode::attend,
      "full");
  EXPECT_EQ(kept(adapted.forward, Kind::product), 1);
  EXPECT_EQ(kept(adapted.forward, Kind::low_rank), 1);
  const std::vector<std::string> moe{
      "model.family=moe",
      "model.num_experts=4",
      "model.experts_per_token=2"};
  EXPECT_EQ(
      kept(work(moe, PlanNode::experts, "full").forward, Kind::grouped),
      1);
  EXPECT_EQ(
      again(work(moe, PlanNode::experts, "selective").recompute, Kind::grouped),
      1);
}

TEST(Activations, OfARecomputedBlockAreItsInput) {
  const Config full = config_of({"activation_checkpoint.mode=full"});
  EXPECT_EQ(planned(full).input_nbytes, measured(full));
  const Config keeps = config_of(
      {"activation_checkpoint.mode=full",
       "activation_checkpoint.save=attention"});
  EXPECT_EQ(planned(keeps).input_nbytes, measured(keeps));
  EXPECT_EQ(planned(keeps).saved_nbytes, planned(full).saved_nbytes);
  // bfloat16 outputs, and a float32 number for each head.
  EXPECT_EQ(
      planned(keeps).input_nbytes,
      planned(full).input_nbytes + kTokens * (64 * 2 + 4 * 4));
  const Config selective = config_of({"activation_checkpoint.mode=selective"});
  EXPECT_EQ(planned(selective).saved_nbytes, measured(selective));
}

// The inputs of frozen layers too, and what comes between the two factors.
TEST(Activations, OfABlockWithAdapters) {
  for (const char* targets : {"all-linear", "q_proj, down_proj"}) {
    for (const char* mode : {"none", "selective"}) {
      const Config config = config_of(
          {"lora.rank=8",
           std::string("lora.targets=") + targets,
           std::string("activation_checkpoint.mode=") + mode});
      EXPECT_EQ(planned(config).saved_nbytes, measured(config))
          << targets << " " << mode;
    }
  }
}

// Each of two ranks has half of the tokens between its layers, and half of the
// heads and of the width in them.
TEST(Activations, OfABlockThatRanksShare) {
  constexpr int kRanks = 2;
  const auto saved = [](const Config& config, const plan::LayerWork& layer) {
    return config.activation_checkpoint.saves_attention() ? layer.input_nbytes
                                                          : layer.saved_nbytes;
  };
  for (const std::string& mode :
       std::vector<std::string>{"none", "selective", "full"}) {
    std::vector<std::string> keys{
        "parallelism.tensor_parallel_degree=2",
        "activation_checkpoint.mode=" + mode};
    if (mode == "full") {
      keys.emplace_back("activation_checkpoint.save=attention");
    }
    const Config config = config_of(keys, kRanks);
    testing::run_ranks(kRanks, [&](testing::RankContext& context) {
      const auto mesh = context.mesh(mesh_axes(config.parallelism));
      const auto ranks = tensor_parallel_ranks(
          config.parallelism,
          config.has_plain_layers(),
          {},
          *mesh);
      EXPECT_EQ(saved(config, planned(config, kRanks)), measured(config, ranks))
          << mode;
    });
  }
}

// Each of two ranks has half of the tokens, and attention's result once by
// heads and once by tokens. int32 positions are small, and are not planned.
TEST(Activations, OfABlockWhoseTokensRanksShare) {
  constexpr int kRanks = 2;
  for (const auto& [mode, method] :
       {std::pair{"none", "a2a"},
        std::pair{"selective", "a2a"},
        std::pair{"none", "a2a+all_gather"}}) {
    const Config config = config_of(
        {"parallelism.context_parallel_degree=2",
         std::string("parallelism.context_parallel_method=") + method,
         std::string("activation_checkpoint.mode=") + mode},
        kRanks,
        /*ranks_per_host=*/1);
    testing::run_ranks(kRanks, [&](testing::RankContext& context) {
      const auto mesh = context.mesh(mesh_axes(config.parallelism));
      const auto ranks = context_parallel_ranks(config.parallelism, {}, *mesh);
      const std::int64_t positions = measured(config, nullptr, nullptr, ranks) -
                                     planned(config, kRanks).saved_nbytes;
      EXPECT_GE(positions, 0) << mode;
      EXPECT_LE(positions, kTokens * 4) << mode;
    });
  }
}

double flops_of(const plan::LayerWork& layer) {
  double sum = 0;
  for (const auto& [node, work] : layer.nodes) {
    sum += plan::flops(work.forward) + plan::flops(work.backward) +
           plan::flops(work.wgrad);
  }
  return sum;
}

// Matmuls of frozen weights have no weight gradient. In the first layer, those
// that read its input have no input gradient either.
TEST(Work, AdaptersTrainWithoutTheFlopsOfTheBase) {
  constexpr std::int64_t kRank = 8;
  constexpr std::int64_t kDim = 64;
  constexpr std::int64_t kFfnDim = 160;
  const auto job_of = [](const std::vector<std::string>& set) {
    std::vector<std::string> all{"model.layers=2"};
    all.insert(all.end(), set.begin(), set.end());
    const Config config = config_of(all);
    return plan_job(config, model_config(config), 1, kCpus);
  };
  const plan::Job plain = job_of({});
  const plan::Job lora = job_of({fmt::format("lora.rank={}", kRank)});
  ASSERT_EQ(lora.kind_of_layer, (std::vector<int>{0, 1}));
  // q, k, v and o, gate and up, and down.
  constexpr std::int64_t kBase = 4 * kDim * kDim + 3 * kDim * kFfnDim;
  constexpr std::int64_t kFactors =
      kRank * (4 * 2 * kDim + 3 * (kDim + kFfnDim));
  constexpr std::int64_t kQkv = 3 * kDim * kDim;
  const double later = flops_of(lora.layer_kinds[1]);
  EXPECT_EQ(
      later,
      flops_of(plain.layer_kinds[0]) + kTokens * (6 * kFactors - 2 * kBase));
  EXPECT_EQ(
      flops_of(lora.layer_kinds[0]),
      later - 2 * kTokens * (kQkv + 3 * kRank * kDim));
  EXPECT_EQ(flops_of(lora.ends) * 3, flops_of(plain.ends) * 2);
  EXPECT_LT(lora.flops_per_token, plain.flops_per_token);
}

TEST(Activations, LayersBeforeTheFirstAdapterAreNotOffloaded) {
  const auto offloaded = [](const std::string& exclude) {
    const Config config = config_of(
        {"model.layers=4",
         "activation_checkpoint.mode=full",
         "activation_checkpoint.offload=true",
         "lora.rank=8",
         "lora.exclude=" + exclude});
    return offloaded_nbytes(config, model_config(config));
  };
  // bfloat16 inputs of each layer.
  constexpr std::int64_t kInput = kTokens * 64 * 2;
  EXPECT_EQ(offloaded("model.layers.[01].*"), 2 * kInput);
  EXPECT_EQ(offloaded("model.layers.[12].*"), 4 * kInput);
}

// Each of two ranks has twice the rows of half the width.
TEST(Work, RanksThatCutExpertsExchangeTwiceTheRows) {
  const std::vector<std::string> experts{
      "model.family=moe",
      "model.num_experts=4",
      "model.experts_per_token=2",
      "model.moe_ffn_dim=96"};
  std::vector<std::string> cut = experts;
  cut.emplace_back("parallelism.expert_tensor_parallel_degree=2");
  EXPECT_EQ(
      flops_of(planned(config_of(cut, 2), 2)),
      flops_of(planned(config_of(experts))));
  for (const char* tensor : {"1", "2"}) {
    std::vector<std::string> set = cut;
    set.emplace_back("parallelism.expert_parallel_degree=2");
    set.push_back(std::string("parallelism.tensor_parallel_degree=") + tensor);
    const Config config = config_of(set, 4);
    const plan::Job job = plan_job(config, model_config(config), 4, kCpus);
    EXPECT_EQ(plan::group_of(job.exchange_axes, 2), (plan::Group{4, 2}));
    // bfloat16 rows, two for each of a rank's own tokens, to two ranks each.
    const std::int64_t own =
        kTokens / config.parallelism.tensor_parallel_degree;
    EXPECT_EQ(job.exchange_nbytes, 2 * 2 * own * 64 * 2);
  }
}

// Four ranks that share a sequence have the same experts and are between them:
// on a host of 8 ranks are 2. Two have different ones.
TEST(Work, RanksThatExchangeTokensMayHaveOthersBetweenThem) {
  const auto ranks_of = [](int context, int ranks_per_host) {
    const Config config = config_of(
        {"model.family=moe",
         "model.num_experts=4",
         "model.experts_per_token=2",
         "model.moe_ffn_dim=96",
         "parallelism.expert_parallel_degree=2",
         "parallelism.expert_tensor_parallel_degree=2",
         fmt::format("parallelism.context_parallel_degree={}", context)},
        16);
    return plan::group_of(
        plan_job(config, model_config(config), 16, kCpus).exchange_axes,
        ranks_per_host);
  };
  EXPECT_EQ(ranks_of(4, 8), (plan::Group{4, 2}));
  EXPECT_EQ(ranks_of(2, 4), (plan::Group{4, 4}));
}

// As the mesh of a run: the axes inside cp are between its ranks.
TEST(Work, RanksThatShareSequencesMayHaveOthersBetweenThem) {
  const std::vector<std::string> experts{
      "model.family=moe",
      "model.num_experts=4",
      "model.experts_per_token=2",
      "model.moe_ffn_dim=96",
      "parallelism.expert_tensor_parallel_degree=4",
      "parallelism.context_parallel_degree=2"};
  const auto stride_of = [&](int expert, int tensor, const char* comm) {
    std::vector<std::string> set = experts;
    set.push_back(fmt::format("parallelism.expert_parallel_degree={}", expert));
    set.push_back(fmt::format("parallelism.tensor_parallel_degree={}", tensor));
    set.push_back(fmt::format("parallelism.context_parallel_comm={}", comm));
    const Config config = config_of(set, 16);
    std::int64_t inside = 1;
    for (const MeshAxis& axis : mesh_axes(config.parallelism)) {
      inside = axis.name == "cp" ? 1 : inside * axis.size;
    }
    const plan::Job job = plan_job(
        config,
        model_config(config),
        16,
        {.ranks = 4, .nvlink = false});
    EXPECT_EQ(job.context_stride, inside);
    return job.context_stride;
  };
  EXPECT_EQ(stride_of(1, 1, "auto"), 1);
  EXPECT_EQ(stride_of(1, 2, "auto"), 2);
  EXPECT_EQ(stride_of(2, 1, "auto"), 4);
  EXPECT_EQ(stride_of(4, 2, "auto"), 4);
  EXPECT_EQ(stride_of(1, 2, "copies"), 2);
  try {
    stride_of(2, 1, "copies");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(
        error.message(),
        ::testing::HasSubstr("got 8 ranks that share sequences on hosts of 4"));
  }
}

TEST(Work, RanksThatShareLayersDivideTheFlops) {
  const Config alone = config_of({});
  const Config shared =
      config_of({"parallelism.tensor_parallel_degree=2"}, /*ranks=*/2);
  const auto ends = [](const Config& config, std::int64_t ranks) {
    return plan_job(config, model_config(config), ranks, kCpus).ends;
  };
  EXPECT_EQ(2 * flops_of(planned(shared, 2)), flops_of(planned(alone)));
  EXPECT_EQ(2 * flops_of(ends(shared, 2)), flops_of(ends(alone, 1)));
}

// nn::linears and nn::gated_linear do this: 4 exchanges of a forward, and 6 of
// a backward, of which 4 overlap.
TEST(Work, LayersThatRanksShareExchangeActivations) {
  using plan::Kernel;
  using plan::Transfer;
  const Config config =
      config_of({"parallelism.tensor_parallel_degree=2"}, /*ranks=*/2);
  const plan::NodeWork node = planned(config, 2).nodes.at(PlanNode::attend);
  const auto count = [](const plan::Kernels& kernels, bool overlaps) {
    std::map<Transfer, int> found;
    for (const Kernel& kernel : kernels) {
      if (kernel.kind == Kernel::Kind::transfer &&
          kernel.overlaps == overlaps) {
        EXPECT_EQ(kernel.nbytes, kTokens * 64 * 2);
        ++found[kernel.transfer];
      }
    }
    return found;
  };
  using Counts = std::map<Transfer, int>;
  const Counts two_each{
      {Transfer::all_gather, 2},
      {Transfer::reduce_scatter, 2}};
  EXPECT_EQ(count(node.forward, false), two_each);
  EXPECT_EQ(count(node.backward, true), two_each);
  EXPECT_EQ(count(node.backward, false), (Counts{{Transfer::all_gather, 2}}));
  EXPECT_TRUE(node.wgrad.empty());
}

// q, k and v in one exchange, and the result in another. A backward has the
// reverse.
TEST(Work, RanksThatShareTokensExchangeHeads) {
  using plan::Kernel;
  const Config config =
      config_of({"parallelism.context_parallel_degree=2"}, /*ranks=*/2);
  const plan::LayerWork layer = planned(config, 2);
  EXPECT_EQ(2 * flops_of(layer), flops_of(planned(config_of({}))));
  const plan::NodeWork& node = layer.nodes.at(PlanNode::attend);
  for (const plan::Kernels* kernels : {&node.forward, &node.backward}) {
    std::multiset<double> sent;
    for (const Kernel& kernel : *kernels) {
      if (kernel.kind == Kernel::Kind::transfer) {
        EXPECT_EQ(kernel.transfer, plan::Transfer::all_to_all);
        sent.insert(kernel.nbytes);
      }
    }
    constexpr double kQueries = kTokens / 2 * 64 * 2;
    EXPECT_EQ(sent, (std::multiset<double>{kQueries, 3 * kQueries}));
  }
}

// Keys and values of two hosts in each direction, and their gradients in
// float32.
TEST(Work, HostsThatShareTokensGatherKeys) {
  using plan::Kernel;
  using plan::Transfer;
  const Config config = config_of(
      {"parallelism.context_parallel_degree=2",
       "parallelism.context_parallel_method=a2a+all_gather"},
      /*ranks=*/2,
      /*ranks_per_host=*/1);
  const plan::LayerWork layer = planned(config, 2);
  EXPECT_EQ(2 * flops_of(layer), flops_of(planned(config_of({}))));
  // FlashAttention-2.
  const auto slowdown_of = [](const plan::LayerWork& work) {
    for (const Kernel& kernel : work.nodes.at(PlanNode::attend).forward) {
      if (kernel.kind == Kernel::Kind::attention) {
        return kernel.slowdown;
      }
    }
    return 0.0;
  };
  EXPECT_GT(slowdown_of(layer), slowdown_of(planned(config_of({}))));
  const auto sent = [](const plan::Kernels& kernels) {
    std::multimap<Transfer, double> found;
    for (const Kernel& kernel : kernels) {
      if (kernel.kind == Kernel::Kind::transfer) {
        EXPECT_TRUE(kernel.is_over_hosts);
        found.emplace(kernel.transfer, kernel.nbytes);
      }
    }
    return found;
  };
  constexpr double kKeys = kTokens * 64 * 2;  // of both hosts
  using Sent = std::multimap<Transfer, double>;
  const plan::NodeWork& node = layer.nodes.at(PlanNode::attend);
  EXPECT_EQ(sent(node.forward), (Sent{{Transfer::all_gather, 2 * kKeys}}));
  EXPECT_EQ(
      sent(node.backward),
      (Sent{
          {Transfer::all_gather, 2 * kKeys},
          {Transfer::all_to_all, 4 * kKeys}}));
}

// The router's numbers depend on the kernels: the CPU keeps a few more of them
// than CUDA does.
TEST(Activations, OfABlockWithExpertsAreNearThoseThatAutogradSaves) {
  const Config config = config_of(
      {"model.family=moe",
       "model.num_experts=4",
       "model.experts_per_token=2",
       "model.moe_ffn_dim=96"});
  const auto want = static_cast<double>(measured(config));
  EXPECT_NEAR(
      static_cast<double>(planned(config).saved_nbytes) / want,
      1,
      0.03);
}

// The weights in FP8 decide which kernels are in FP8.
TEST(Work, KindsOfLayersDifferByTheirFloat8Weights) {
  const auto kinds = [](const std::vector<std::string>& set) {
    std::vector<std::string> all{
        "model.layers=4",
        "model.dim=64",
        "training.seq_len=128"};
    all.insert(all.end(), set.begin(), set.end());
    const Config config = config_of(all);
    return plan_job(config, model_config(config), 1, kCpus);
  };
  const auto num_float8 = [](const plan::LayerWork& layer) {
    std::int64_t count = 0;
    for (const auto& [node, work] : layer.nodes) {
      for (const plan::Kernel& kernel : work.forward) {
        count += kernel.recipe.empty() ? 0 : 1;
      }
    }
    return count;
  };
  const plan::Job plain = kinds({});
  EXPECT_EQ(plain.kind_of_layer, (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(num_float8(plain.layer_kinds[0]), 0);
  const plan::Job all = kinds({"float8.recipe=rowwise"});
  EXPECT_EQ(all.kind_of_layer, (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(num_float8(all.layer_kinds[0]), 7);
  const plan::Job some = kinds(
      {"float8.recipe=rowwise",
       "float8.keep_first_last=true",
       "float8.exclude=*o_proj*"});
  EXPECT_EQ(some.kind_of_layer, (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(num_float8(some.layer_kinds[0]), 0);
  EXPECT_EQ(num_float8(some.layer_kinds[1]), 6);
}

}  // namespace
}  // namespace flatshard
