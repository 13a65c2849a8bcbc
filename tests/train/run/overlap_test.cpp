// Runs with two microbatches at once against runs without.
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/core/error.h"
#include "flatshard/data/corpus_writer.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/train/data/batches.h"
#include "flatshard/train/run/expert_loads.h"
#include "flatshard/train/run/from_config.h"
#include "flatshard/train/run/microbatches.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/train_state.h"
#include "tests/support/counted_operation.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"
#include "tests/support/sum_order.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_config.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;
using testing::sum_tolerance;
using testing::sums_of_steps;

constexpr const char* kOverlap = "parallelism.overlap_expert_parallel=true";
constexpr const char* kLate = "parallelism.delay_wgrad=true";

using Overrides = testing::Settings;

Config overlap_config(const Overrides& overrides, int world) {
  return resolve_config(
      testing::small_config(
          {"model.family=moe",
           "model.layers=3",
           "model.num_experts=4",
           "model.moe_ffn_dim=16",
           "model.dense_layers=1",
           "model.shared_experts=1",
           "moe.aux_loss=0.01",
           "moe.balance_rate=0.01",
           "training.global_batch_size=6",
           "precision.compute=bfloat16",
           "debug.deterministic=true",
           "debug.comm_delay_us=100",
           "debug.comm_delay_seed=5"},
          overrides),
      world);
}

Overrides operator+(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// The results of a run of three steps.
struct OverlapOutcome {
  std::map<std::pair<int, int>, float> losses;  ///< by (step, rank)
  std::string weights;                          ///< model.safetensors
  std::vector<double> exchange_ms;              ///< of rank 0's steps
  std::vector<ExpertMetrics> experts;           ///< of rank 0's steps
  std::vector<MemoryRow> memory;                ///< of rank 0
  GraphStats graphs;                            ///< of rank 0
};

OverlapOutcome train_overlapping(int world, const Overrides& overrides) {
  const Config config = overlap_config(overrides, world);
  const TempFolder folder;
  const auto file = folder / "model.safetensors";
  OverlapOutcome outcome;
  std::mutex mutex;
  run_ranks(world, [&](RankContext& context) {
    const models::ModelConfig shape = model_config(config);
    const auto mesh = context.mesh(mesh_axes(config.parallelism));
    data::Loader loader = open_train_loader(run_options(config, shape).data);
    Batches batches(
        run_options(config, shape).batches,
        mesh->data_mesh(),
        loader);
    TrainState state =
        make_train_state(config, shape, mesh, batches.num_microbatches());
    ExpertLoads loads(
        config.moe.balance_rate,
        state.model,
        state.exchange,
        mesh);
    Microbatches microbatches(
        state.model,
        state.runtime,
        mesh,
        batches,
        {.overlap = overlap_options(
             config.parallelism,
             config.activation_checkpoint.mode,
             shape)});
    for (int step = 1; step <= 3; ++step) {
      loads.begin_step(true);
      batches.load_next();
      const at::Tensor loss = microbatches.forward_backward();
      loads.end_step(true);
      state.optimizer->step(1e-2);
      state.optimizer->zero_grad();
      state.runtime->finish_step();
      state.runtime->gathers().prefetch_forward();
      {
        // A validation: its forwards run complete modules.
        const at::NoGradGuard no_grad;
        state.model(
            batches.tokens(0),
            batches.targets(0),
            batches.documents(0));
      }
      const auto metrics = loads.metrics();
      const std::lock_guard lock(mutex);
      outcome.losses[{step, context.rank}] = loss.item<float>();
      if (context.rank == 0) {
        outcome.experts.push_back(*metrics);
      }
      if (context.rank == 0 && metrics->exchange_ms) {
        outcome.exchange_ms.push_back(*metrics->exchange_ms);
      }
    }
    const auto groups = state.runtime->all_groups();
    save_weights(
        {groups.begin(), groups.end()},
        file,
        {{"format", "pt"}},
        models::hf_entries_of(shape),
        loads.buffers());
    if (context.rank == 0) {
      outcome.memory = memory_rows(state);
      outcome.graphs = state.runtime->graphs().stats();
    }
  });
  std::ifstream stream(file, std::ios::binary);
  outcome.weights = {std::istreambuf_iterator<char>(stream), {}};
  return outcome;
}

/// Writes 12 documents of 16 targets each.
void write_short_documents(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  data::SplitWriter writer(
      folder,
      "train",
      data::TokenType::uint16,
      1 << 20,
      /*masked=*/false);
  for (std::uint32_t document = 0; document < 12; ++document) {
    std::vector<std::uint32_t> tokens;
    for (std::uint32_t i = 0; i < 17; ++i) {
      tokens.push_back((document * 31 + i * i * 7) % 60);
    }
    writer.append(tokens, {});
    writer.end_document();
  }
  const data::CorpusMeta meta{
      .vocab_size = 61,
      .end_of_document = 60,
      .tokenizer = data::kNoTokenizer,
      .input_hash = "0",
      .splits = {writer.finish()}};
  std::ofstream(folder / "meta.json") << meta.to_json();
}

/// Compares runs that differ only by padding: sums in another order.
void expect_close(const OverlapOutcome& got, const OverlapOutcome& want) {
  // A weight's gradient adds the 96 tokens of a batch.
  const double tolerance =
      sum_tolerance({.addends = 96, .in_a_row = sums_of_steps(3, 3)});
  ASSERT_EQ(got.losses.size(), want.losses.size());
  for (const auto& [place, loss] : want.losses) {
    EXPECT_NEAR(got.losses.at(place), loss, tolerance * loss);
  }
  ASSERT_EQ(got.experts.size(), want.experts.size());
  for (std::size_t i = 0; i < want.experts.size(); ++i) {
    EXPECT_DOUBLE_EQ(got.experts[i].load, want.experts[i].load);
    EXPECT_DOUBLE_EQ(got.experts[i].dropped, want.experts[i].dropped);
    EXPECT_NEAR(got.experts[i].balance, want.experts[i].balance, tolerance);
    EXPECT_EQ(got.experts[i].bias, want.experts[i].bias);
  }
  ASSERT_EQ(got.weights.size(), want.weights.size());
  const auto floats = [](const std::string& file) {
    std::uint64_t header = 0;
    std::memcpy(&header, file.data(), sizeof header);
    const std::size_t begin = sizeof header + header;
    std::vector<float> values((file.size() - begin) / sizeof(float));
    std::memcpy(
        values.data(),
        file.data() + begin,
        values.size() * sizeof(float));
    return values;
  };
  const std::vector<float> a = floats(got.weights);
  const std::vector<float> b = floats(want.weights);
  double most = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  EXPECT_LT(most, tolerance);
}

void expect_equal(const OverlapOutcome& got, const OverlapOutcome& want) {
  EXPECT_EQ(got.losses, want.losses);
  EXPECT_FALSE(want.weights.empty());
  EXPECT_TRUE(got.weights == want.weights);
}

TEST(OverlapTraining, EqualsTheRunWithoutIt) {
  const OverlapOutcome want = train_overlapping(2, {});
  expect_equal(train_overlapping(2, {kOverlap}), want);
  expect_equal(
      train_overlapping(
          2,
          {kOverlap, kLate, "activation_checkpoint.mode=full"}),
      want);
  const Overrides selective{"activation_checkpoint.mode=selective"};
  expect_equal(
      train_overlapping(2, selective + Overrides{kOverlap, kLate}),
      train_overlapping(2, selective));
}

// Dense layers and layers with experts in pieces multiply as often in their
// second run as blocks do.
TEST(OverlapTraining, ASecondRunMakesNoResultOfItsPart) {
  const auto products = [](const Overrides& overrides) {
    testing::CountedOperation counted("aten::mm");
    train_overlapping(1, overrides);
    return counted.take();
  };
  const Overrides full{"activation_checkpoint.mode=full"};
  const std::int64_t again = products(full) - products({});
  EXPECT_GT(again, 0);
  EXPECT_EQ(products(full + Overrides{kOverlap}) - products({kOverlap}), again);
}

TEST(OverlapTraining, EqualsTheRunWithoutItWhereTokensTravel) {
  const Overrides travels{"parallelism.expert_parallel_degree=2"};
  const OverlapOutcome want = train_overlapping(2, travels);
  for (const char* way : {"collective", "copies"}) {
    SCOPED_TRACE(way);
    const OverlapOutcome got = train_overlapping(
        2,
        travels + Overrides{
                      kOverlap,
                      kLate,
                      std::string("parallelism.token_exchange=") + way});
    expect_equal(got, want);
    ASSERT_EQ(got.exchange_ms.size(), 3U);
    for (const double ms : got.exchange_ms) {
      EXPECT_GT(ms, 0);
    }
  }
}

// Ranks that share layers exchange activations inside pieces, and tokens
// between them.
TEST(OverlapTraining, EqualsTheRunWithoutItWhereRanksShareLayers) {
  for (const char* batch : {"4", "6"}) {
    const Overrides grid{
        "parallelism.tensor_parallel_degree=2",
        "parallelism.expert_parallel_degree=2",
        std::string("training.global_batch_size=") + batch};
    const OverlapOutcome want = train_overlapping(4, grid);
    for (const Overrides& how :
         {Overrides{kOverlap},
          Overrides{kLate},
          Overrides{kOverlap, kLate, "activation_checkpoint.mode=full"}}) {
      SCOPED_TRACE(how.back() + " " + batch);
      expect_equal(train_overlapping(4, grid + how), want);
    }
  }
  // The same ranks share the width of experts, also with graphs.
  for (const Overrides& grid :
       {Overrides{
            "parallelism.tensor_parallel_degree=2",
            "parallelism.expert_tensor_parallel_degree=2"},
        Overrides{
            "parallelism.tensor_parallel_degree=2",
            "parallelism.strategy=zero1",
            "model.tie_embeddings=true"}}) {
    SCOPED_TRACE(grid.back());
    const Overrides how{
        kOverlap,
        kLate,
        "activation_checkpoint.mode=selective",
        "cuda_graph.impl=unit",
        "cuda_graph.modules=attn,mlp,moe_router",
        "cuda_graph.warmup_steps=1",
        "cuda_graph.on_miss=error",
        "debug.emulate_graphs=true"};
    const OverlapOutcome got = train_overlapping(2, grid + how);
    expect_equal(
        got,
        train_overlapping(
            2,
            grid + Overrides{"activation_checkpoint.mode=selective"}));
    EXPECT_GT(got.graphs.backward_replays, 0);
    EXPECT_THAT(got.graphs.fallbacks, IsEmpty());
  }
}

// Losses of routers, loads and the balancing bias do not depend on the room
// that a document leaves in its sample.
TEST(ExpertPadding, HasNoPartInAnyRun) {
  const TempFolder folder;
  write_short_documents(folder / "corpus");
  const Overrides packed{
      fmt::format("data.train={}", (folder / "corpus").string()),
      "data.packing=documents",
      "data.documents_per_sample=1",
      "optimizer.name=sgd",
      "moe.aux_loss=0.5",
      "moe.z_loss=0.1"};
  struct Case {
    int world;
    Overrides how;
  };
  for (const auto& [world, how] :
       {Case{1, {"activation_checkpoint.mode=full"}},
        Case{2, {"moe.expert_capacity_factor=1"}},
        Case{
            2,
            {"parallelism.expert_parallel_degree=2",
             kOverlap,
             "cuda_graph.impl=unit",
             "cuda_graph.modules=attn,mlp,moe_router",
             "cuda_graph.warmup_steps=1",
             "debug.emulate_graphs=true"}},
        // The second rank has most of the padding.
        Case{2, {"parallelism.tensor_parallel_degree=2"}}}) {
    SCOPED_TRACE(how.front());
    expect_close(
        train_overlapping(
            world,
            packed + how + Overrides{"training.seq_len=32"}),
        train_overlapping(world, packed + how));
  }
}

// Weight gradients run while the tokens of a layer's gradient travel, also in
// steps of one microbatch.
TEST(OverlapTraining, DelaysWeightGradientsWithoutTwoMicrobatchesAtOnce) {
  const Overrides travels{"parallelism.expert_parallel_degree=2"};
  const Config late = overlap_config(travels + Overrides{kLate}, 2);
  const auto plan = overlap_options(
      late.parallelism,
      late.activation_checkpoint.mode,
      model_config(late));
  EXPECT_TRUE(plan && plan->delay_wgrad && plan->in_flight == 1);
  for (const char* batch : {"2", "6"}) {
    const Overrides how =
        travels + Overrides{std::string("training.global_batch_size=") + batch};
    const OverlapOutcome want = train_overlapping(2, how);
    for (const Overrides& more :
         {Overrides{"activation_checkpoint.mode=none"},
          Overrides{
              "activation_checkpoint.mode=full",
              "parallelism.token_exchange=copies"}}) {
      SCOPED_TRACE(more.front() + " " + batch);
      const OverlapOutcome got =
          train_overlapping(2, how + more + Overrides{kLate});
      expect_equal(got, want);
      for (const MemoryRow& row : got.memory) {
        EXPECT_THAT(row.reason, Not(HasSubstr("microbatches")));
      }
    }
  }
}

// Two of four ranks have the same experts, and all-gather and reduce them apart
// from all other weights.
TEST(OverlapTraining, GoesWithExpertsThatTwoRanksCopyToEachOther) {
  const Overrides travels{
      "parallelism.expert_parallel_degree=2",
      "training.global_batch_size=8"};
  const OverlapOutcome want = train_overlapping(4, travels);
  const Overrides copies = travels + Overrides{"parallelism.copy_engines=all"};
  expect_equal(train_overlapping(4, copies), want);
  expect_equal(train_overlapping(4, copies + Overrides{kOverlap}), want);
}

TEST(OverlapTraining, GoesWithStrategiesAndWeightsThatStay) {
  for (const Overrides& how :
       {Overrides{"parallelism.strategy=zero1", "model.tie_embeddings=true"},
        Overrides{"parallelism.reshard_after_forward=false"},
        Overrides{"parallelism.prefetch=2", "optimizer.overlap=true"},
        Overrides{"parallelism.copy_engines=all"},
        // Weights and buffers that are freed become NaN.
        Overrides{"diagnostics.poison=true"},
        Overrides{"parallelism.keep_compute_weights=false"}}) {
    SCOPED_TRACE(how.front());
    expect_equal(
        train_overlapping(2, how + Overrides{kOverlap, kLate}),
        train_overlapping(2, how));
  }
}

// CUDA graphs of parts of blocks. Another shape ends the run.
Overrides graphs_of_regions() {
  return {
      "cuda_graph.impl=unit",
      "cuda_graph.modules=attn,mlp,moe_router",
      "cuda_graph.warmup_steps=1",
      "cuda_graph.on_miss=error",
      "debug.emulate_graphs=true"};
}

// Each microbatch has separate graphs, replayed from the second step on: three
// attentions, a dense layer, two routers, two shared experts.
TEST(OverlapTraining, GoesWithGraphsOfRegions) {
  const OverlapOutcome want = train_overlapping(2, {kOverlap});
  for (const Overrides& how :
       {Overrides{"activation_checkpoint.mode=none"},
        Overrides{kLate, "activation_checkpoint.mode=full"}}) {
    const OverlapOutcome got =
        train_overlapping(2, graphs_of_regions() + how + Overrides{kOverlap});
    expect_equal(got, want);
    constexpr int kMicrobatches = 3;
    EXPECT_EQ(got.graphs.backward_replays, 2 * kMicrobatches * 8);
    EXPECT_THAT(got.graphs.fallbacks, IsEmpty());
  }
}

// The first two forwards run as a pair, the third one separately if four are in
// flight. A tied head, recompute, copies, graphs and FP8.
TEST(OverlapTraining, GoesWithThreeInFlightAndMore) {
  const Overrides batch{"training.global_batch_size=10"};  // five microbatches
  const Overrides in_flight{kOverlap, "parallelism.microbatches_in_flight=3"};
  for (const Overrides& how :
       {Overrides{"activation_checkpoint.mode=none"},
        Overrides{"parallelism.microbatches_in_flight=4", kLate},
        Overrides{"parallelism.microbatches_in_flight=100"},
        Overrides{"model.tie_embeddings=true", "parallelism.strategy=zero2"},
        Overrides{"activation_checkpoint.mode=full", kLate},
        Overrides{
            "parallelism.expert_parallel_degree=2",
            "parallelism.token_exchange=copies",
            "diagnostics.poison=true"},
        Overrides{
            "float8.recipe=rowwise",
            "float8.emulate=true",
            "activation_checkpoint.mode=selective"}}) {
    SCOPED_TRACE(how.front());
    Overrides plain = batch;
    std::ranges::copy_if(how, std::back_inserter(plain), [](const auto& text) {
      return !text.starts_with("parallelism.microbatches") && text != kLate;
    });
    expect_equal(
        train_overlapping(2, batch + in_flight + how),
        train_overlapping(2, plain));
  }
  const OverlapOutcome got = train_overlapping(
      2,
      batch + graphs_of_regions() + in_flight + Overrides{kLate});
  expect_equal(got, train_overlapping(2, batch));
  EXPECT_THAT(got.graphs.fallbacks, IsEmpty());
}

// Experts stay in bfloat16. Other planes are all-gathered per unit or in parts.
TEST(OverlapTraining, GoesWithFloat8Planes) {
  const Overrides rowwise{"float8.recipe=rowwise", "float8.emulate=true"};
  const OverlapOutcome want = train_overlapping(2, rowwise);
  for (const auto& [parts, recompute] :
       {std::pair("unit", "none"),
        std::pair("recomputed", "full"),
        std::pair("module", "full")}) {
    SCOPED_TRACE(parts);
    expect_equal(
        train_overlapping(
            2,
            rowwise +
                Overrides{
                    kOverlap,
                    kLate,
                    std::string("float8.gather_parts=") + parts,
                    std::string("activation_checkpoint.mode=") + recompute}),
        want);
  }
}

TEST(OverlapTraining, TheMemoryTableSaysWhatSlotsAreFor) {
  const auto slots_of = [](const OverlapOutcome& outcome) {
    for (const MemoryRow& row : outcome.memory) {
      if (row.role == "slot pool") {
        return row;
      }
    }
    return MemoryRow{};
  };
  const MemoryRow plain = slots_of(train_overlapping(2, {}));
  const MemoryRow both = slots_of(train_overlapping(2, {kOverlap, kLate}));
  EXPECT_THAT(both.reason, HasSubstr("2 microbatches in flight"));
  EXPECT_THAT(plain.reason, Not(HasSubstr("in flight")));
  EXPECT_GT(both.nbytes, plain.nbytes);
}

TEST(OverlapKeys, WhatDoesNotFitIsRefusedByName) {
  const auto refusal = [](const Overrides& overrides, int world = 2) {
    return message_of([&] {
      model_config(overlap_config(overrides + Overrides{kOverlap}, world));
    });
  };
  EXPECT_EQ(refusal({}), "no error");
  EXPECT_THAT(
      refusal({}, 6),
      HasSubstr("parallelism.overlap_expert_parallel needs 2 microbatches or "
                "more, got training.global_batch_size = 6"));
  const Overrides graphs{"debug.emulate_graphs=true"};
  EXPECT_THAT(
      refusal(graphs + Overrides{"cuda_graph.impl=unit"}),
      HasSubstr(
          "overlap_expert_parallel = true with cuda_graph.impl = \"unit\" "
          "and cuda_graph.modules = \"\": blocks run in parts; list the "
          "parts"));
  EXPECT_THAT(
      refusal(graphs + Overrides{"cuda_graph.impl=full_iteration"}),
      HasSubstr("overlap_expert_parallel = true with cuda_graph.impl = "
                "\"full_iteration\": interleaved backwards are not a single "
                "graph"));
  EXPECT_THAT(
      refusal(
          graphs +
          Overrides{
              "cuda_graph.impl=unit",
              "cuda_graph.modules=attn",
              "float8.recipe=rowwise",
              "float8.emulate=true"}),
      HasSubstr("overlap_expert_parallel = true with cuda_graph.impl = "
                "\"unit\" and float8.recipe = \"rowwise\": the FP8 planes"));
  EXPECT_THAT(
      refusal({"diagnostics.strict=true"}),
      HasSubstr(
          "overlap_expert_parallel = true with diagnostics.strict = true"));
  EXPECT_THAT(
      refusal({"parallelism.memory_budget=1"}),
      HasSubstr(
          "overlap_expert_parallel = true with parallelism.memory_budget"));
  EXPECT_THAT(
      message_of([] { overlap_config({kLate}, 2); }),
      HasSubstr("parallelism.delay_wgrad is set, but "
                "parallelism.expert_parallel_degree = \"1\""));
  EXPECT_THAT(
      message_of([] {
        overlap_config(
            {kLate,
             "parallelism.expert_parallel_degree=2",
             "diagnostics.strict=true"},
            2);
      }),
      HasSubstr("delay_wgrad = true with diagnostics.strict = true"));
  EXPECT_THAT(
      message_of([] {
        model_config(parse_config(
            "[data]\ntrain = \"random\"\n[model]\npreset = \"llama3_1b\"\n"
            "[parallelism]\noverlap_expert_parallel = true\n",
            "test.toml"));
      }),
      HasSubstr("parallelism.overlap_expert_parallel is for models with "
                "experts"));
}

}  // namespace
}  // namespace flatshard
