// Tests the files and the memory of ranks that divide experts.
#include "flatshard/checkpoint/checkpointer.h"
#include "flatshard/checkpoint/init_weights.h"
#include "flatshard/checkpoint/load.h"
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/diagnostics/memory_table.h"
#include "flatshard/format/manifest.h"
#include "flatshard/models/flops.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/train/run/expert_loads.h"
#include "flatshard/train/run/from_config.h"
#include "flatshard/train/setup/memory_check.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/train_state.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_config.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

namespace fs = std::filesystem;
using testing::RankContext;
using testing::run_ranks;

// As small_config has them.
constexpr std::int64_t kVocab = 61;
constexpr std::int64_t kSeq = 16;
constexpr const char* kGate = "model.layers.0.mlp.gate.e_score_correction_bias";

/// Ranks and how they divide the model.
struct Way {
  std::string name;
  int world = 1;
  int ep = 1;
  std::string strategy = "zero3";
  int replicate = 1;
  int etp = 1;
  int tp = 1;
  std::string optimizer = "adamw";
};

Config config_of(const Way& way, const std::string& family = "moe") {
  return resolve_config(
      testing::small_config(
          {"model.family=" + family,
           "model.dim=16",
           "model.heads=2",
           "model.ffn_dim=24",
           "model.num_experts=4",
           "model.moe_ffn_dim=8",
           family == "moe" ? "moe.balance_rate=0.05" : "moe.balance_rate=0",
           "optimizer.name=" + way.optimizer,
           "parallelism.strategy=" + way.strategy,
           fmt::format(
               "parallelism.data_parallel_replicate_degree={}",
               way.replicate),
           fmt::format("parallelism.expert_parallel_degree={}", way.ep),
           fmt::format("parallelism.expert_tensor_parallel_degree={}", way.etp),
           fmt::format("parallelism.tensor_parallel_degree={}", way.tp)}),
      way.world);
}

/// A rank's part of a run.
struct Rank {
  Rank(const RankContext& context, const Config& config)
      : shape(model_config(config)),
        mesh(context.mesh(mesh_axes(config.parallelism))),
        state(make_train_state(config, shape, mesh, 1)),
        loads(config.moe.balance_rate, state.model, state.exchange, mesh) {}

  /// @param alike  all ranks read the same samples.
  void train(int step, bool alike = false) {
    const auto seed = static_cast<std::uint64_t>(
        100 * step + (alike ? 0 : mesh->data_mesh()->rank()));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const auto tokens = [&] {
      return at::randint(kVocab, {1, kSeq}, generator, at::kLong);
    };
    loads.begin_step(false);
    const at::Tensor inputs = tokens();
    state.runtime->set_is_last_microbatch(true);
    state.model(inputs, tokens()).backward();
    loads.end_step(false);
    state.optimizer->step(1e-2);
    state.optimizer->zero_grad();
  }

  void save(const fs::path& folder, std::int64_t step) {
    Checkpointer checkpointer(
        mesh,
        state.runtime->all_groups(),
        state.optimizer.get(),
        {.folder = folder, .whole_tensors = loads.buffers()});
    checkpointer.save(step, {});
    checkpointer.wait();
    for (const SaveResult& result : checkpointer.take_results()) {
      ASSERT_FALSE(result.error) << result.error->what();
    }
  }

  void load(const fs::path& step_folder) {
    load_checkpoint(
        step_folder,
        state.runtime->all_groups(),
        state.optimizer.get(),
        {.num_threads = 1, .whole_tensors = loads.buffers()});
  }

  void save_model(const fs::path& path) const {
    const auto groups = state.runtime->all_groups();
    save_weights(
        {groups.begin(), groups.end()},
        path,
        {{"format", "pt"}},
        models::hf_entries_of(shape),
        loads.buffers());
  }

  models::ModelConfig shape;
  std::shared_ptr<Mesh> mesh;
  TrainState state;
  ExpertLoads loads;
};

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Bytes by role and name, and how often each weight was updated.
struct Contents {
  std::map<std::string, std::string> tensors;
  std::map<std::string, std::int64_t> updates;
};

Contents contents(const fs::path& folder) {
  const Manifest manifest = read_manifest(folder);
  std::vector<std::string> files;
  for (const StoredFile& file : manifest.files) {
    files.push_back(read_file(folder / file.name));
  }
  Contents found{.updates = manifest.updates};
  for (const auto& [role, tensors] : manifest.tensors) {
    for (const auto& [name, tensor] : tensors) {
      at::Tensor whole = at::empty(tensor.shape, at::kFloat);
      for (const StoredPiece& piece : tensor.pieces) {
        at::Tensor part = whole;
        for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
          part = part.narrow(
              static_cast<std::int64_t>(d),
              piece.box.start[d],
              piece.box.length[d]);
        }
        std::string bytes =
            files.at(piece.file)
                .substr(piece.offset, piece.box.numel() * sizeof(float));
        part.copy_(at::from_blob(bytes.data(), piece.box.length, at::kFloat));
      }
      found.tensors[describe_tensor(role, name)] = std::string(
          static_cast<const char*>(whole.const_data_ptr()),
          whole.nbytes());
    }
  }
  return found;
}

bool all_zero(const std::string& bytes) {
  return std::ranges::all_of(bytes, [](char c) { return c == 0; });
}

// Loads the checkpoint of `step` one way after the other. Each saves the next
// one, with the same contents.
void expect_passed_through(
    const TempFolder& folder,
    int step,
    const std::vector<Way>& ways) {
  const Contents want = contents(folder / fmt::format("step-{}", step));
  for (const Way& way : ways) {
    run_ranks(way.world, [&](RankContext& context) {
      Rank rank(context, config_of(way));
      rank.load(folder / fmt::format("step-{}", step));
      rank.save(folder.path(), step + 1);
    });
    ++step;
    const Contents got = contents(folder / fmt::format("step-{}", step));
    EXPECT_EQ(got.updates, want.updates) << way.name;
    ASSERT_EQ(got.tensors.size(), want.tensors.size()) << way.name;
    for (const auto& [name, bytes] : want.tensors) {
      EXPECT_TRUE(got.tensors.at(name) == bytes) << way.name << ": " << name;
    }
  }
}

// 4 -> 1 -> 2 and on: weights, AdamW's states and the routers' biases.
TEST(ExpertCheckpoints, PassThroughOtherDegreesBitForBit) {
  const TempFolder folder;
  const Way first{"ep4", 4, 4};
  run_ranks(first.world, [&](RankContext& context) {
    Rank rank(context, config_of(first));
    // An odd number: steps of one size up and down leave no bias at 0.
    for (int step = 0; step < 3; ++step) {
      rank.train(step);
    }
    rank.save(folder.path(), 3);
  });
  const Contents want = contents(folder / "step-3");
  const std::string experts = "model.layers.1.mlp.experts.down_proj";
  for (const auto& [role, name] :
       {std::pair{"weight", experts},
        std::pair{"exp_avg", experts},
        std::pair{"exp_avg_sq", experts},
        std::pair{"buffer", std::string(kGate)}}) {
    const auto found = want.tensors.find(describe_tensor(role, name));
    ASSERT_NE(found, want.tensors.end()) << role << " " << name;
    EXPECT_FALSE(all_zero(found->second)) << role << " " << name;
  }
  ASSERT_EQ(want.updates.at(experts), 3);

  expect_passed_through(
      folder,
      3,
      {Way{"alone", 1, 1},
       Way{"ep2", 2, 2},
       Way{"edp2_ep2", 4, 2, "zero1"},
       Way{"hsdp", 4, 2, "hsdp", 2},
       Way{"zero0", 2, 2, "zero0"},
       Way{"ep2_etp2", 4, 2, "zero3", 1, 2},
       Way{"ep1", 2, 1, "zero2"},
       Way{"etp4", 4, 1, "zero0", 1, 4},
       Way{"ep2_etp2_tp2", 4, 2, "zero1", 1, 2, 2},
       Way{"etp4_tp2", 4, 1, "zero3", 1, 4, 2},
       Way{"ep4", 4, 4}});
}

std::vector<float> floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// 4 -> others, saved again: the momentum of matrices and the moments of the
// rest.
TEST(MuonCheckpoints, PassThroughOtherDegreesBitForBit) {
  const TempFolder folder;
  const Way first{.name = "ep2", .world = 4, .ep = 2, .optimizer = "muon"};
  run_ranks(first.world, [&](RankContext& context) {
    Rank rank(context, config_of(first));
    for (int step = 0; step < 2; ++step) {
      rank.train(step);
    }
    rank.save(folder.path(), 2);
  });
  const Contents want = contents(folder / "step-2");
  const auto has = [&](std::string_view role, const std::string& name) {
    const auto found = want.tensors.find(describe_tensor(role, name));
    return found != want.tensors.end() && !all_zero(found->second);
  };
  for (const char* matrix :
       {"model.layers.1.mlp.experts.down_proj",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.self_attn.q_proj.weight"}) {
    EXPECT_TRUE(has("momentum_buffer", matrix)) << matrix;
    EXPECT_FALSE(has("exp_avg", matrix)) << matrix;
  }
  for (const char* other :
       {"model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight"}) {
    EXPECT_TRUE(has("exp_avg_sq", other)) << other;
    EXPECT_FALSE(has("momentum_buffer", other)) << other;
  }
  expect_passed_through(
      folder,
      2,
      {Way{.name = "alone", .optimizer = "muon"},
       Way{.name = "tp2", .world = 2, .tp = 2, .optimizer = "muon"},
       Way{.name = "ep2_etp2",
           .world = 4,
           .ep = 2,
           .etp = 2,
           .optimizer = "muon"},
       Way{.name = "hsdp",
           .world = 4,
           .strategy = "hsdp",
           .replicate = 2,
           .optimizer = "muon"}});
}

// A run resumes on other meshes and trains as on one rank. Matmuls of other
// shapes round differently, and Newton-Schulz is in bfloat16.
TEST(MuonTraining, IsTheSameOnAllMeshes) {
  const TempFolder folder;
  const auto trained = [&](const Way& way, int from) {
    const std::string name = way.name;
    run_ranks(way.world, [&](RankContext& context) {
      Rank rank(context, config_of(way));
      if (from > 0) {
        rank.load(folder / "alone" / fmt::format("step-{}", from));
      }
      for (int step = from; step < 3; ++step) {
        rank.train(step, /*alike=*/true);
        rank.save(folder / name, step + 1);
      }
    });
    return contents(folder / name / "step-3");
  };
  const Contents want =
      trained({.name = "alone", .optimizer = "muon"}, /*from=*/0);
  const Contents start = contents(folder / "alone" / "step-1");
  for (const Way& way :
       {Way{.name = "zero3", .world = 4, .optimizer = "muon"},
        Way{.name = "zero1",
        .world = 2,
        .strategy = "zero1",
        .optimizer = "muon"},
        Way{.name = "tp2", .world = 4, .tp = 2, .optimizer = "muon"},
        Way{.name = "ep2", .world = 4, .ep = 2, .optimizer = "muon"}}) {
    const Contents got = trained(way, /*from=*/1);
    for (const auto& [name, bytes] : want.tensors) {
      if (!name.starts_with("weight")) {
        continue;
      }
      const std::vector<float> a = floats(bytes);
      const std::vector<float> b = floats(got.tensors.at(name));
      const std::vector<float> before = floats(start.tensors.at(name));
      double moved = 0;
      double apart = 0;
      for (std::size_t i = 0; i < a.size(); ++i) {
        moved += std::pow(double{a[i]} - double{before[i]}, 2);
        apart += std::pow(double{a[i]} - double{b[i]}, 2);
      }
      EXPECT_LT(std::sqrt(apart), 0.05 * std::sqrt(moved))
          << way.name << ": " << name;
    }
  }
}

// They depend only on the seed.
TEST(ExpertFiles, WeightsAreTheSameForAnyDegree) {
  const TempFolder folder;
  std::string want;
  for (const Way& way :
       {Way{"alone", 1, 1},
        Way{"ep2", 2, 2},
        Way{"ep4", 4, 4, "zero2"},
        Way{"edp2_ep2", 4, 2},
        Way{"zero0", 2, 2, "zero0"},
        Way{"hsdp", 4, 2, "hsdp", 2},
        Way{"ep2_etp2", 4, 2, "zero3", 1, 2},
        Way{"etp2_tp2", 4, 1, "zero2", 1, 2, 2}}) {
    const fs::path path = folder / (way.name + ".safetensors");
    run_ranks(way.world, [&](RankContext& context) {
      const Rank rank(context, config_of(way));
      rank.save_model(path);
    });
    const std::string got = read_file(path);
    want = want.empty() ? got : want;
    EXPECT_FALSE(got.empty());
    EXPECT_TRUE(got == want) << way.name;
  }
}

TEST(ExpertFiles, InitFromReadsTheExpertsOfEachRank) {
  const TempFolder folder;
  fs::create_directories(folder / "hf");
  const auto entry = folder / "hf" / "model.safetensors";
  run_ranks(1, [&](RankContext& context) {
    const Rank rank(context, config_of({"alone"}, "qwen3_moe"));
    rank.save_model(entry);
  });
  for (const Way& way :
       {Way{"ep2", 2, 2},
        Way{"edp2_ep2", 4, 2},
        Way{"ep4", 4, 4, "zero1"},
        Way{"ep2_etp2", 4, 2, "zero1", 1, 2}}) {
    const auto before = folder / (way.name + "-before.safetensors");
    const auto after = folder / (way.name + "-after.safetensors");
    run_ranks(way.world, [&](RankContext& context) {
      Config config = config_of(way, "qwen3_moe");
      config.run.seed = 99;
      const Rank rank(context, config);
      rank.save_model(before);
      init_weights(
          folder / "hf",
          rank.state.runtime->all_groups(),
          {.entries_of = models::hf_entries_of(rank.shape)});
      rank.save_model(after);
    });
    EXPECT_FALSE(read_file(before) == read_file(entry)) << way.name;
    EXPECT_TRUE(read_file(after) == read_file(entry)) << way.name;
  }
}

// The table of a rank has its own experts and no others.
TEST(ExpertMemory, EachRankHoldsItsPart) {
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  for (const Way& way :
       {Way{"zero0", 2, 2, "zero0"},
        Way{"zero3", 4, 2},
        Way{"ep4", 4, 4},
        Way{"ep2_etp2", 4, 2, "zero0", 1, 2}}) {
    const Config config = config_of(way);
    const models::ModelConfig shape = model_config(config);
    const std::int64_t experts = models::num_expert_parameters(shape);
    const std::int64_t dense = models::num_parameters(shape) - experts;
    const bool whole = way.strategy == "zero0";
    const std::int64_t want =
        kFloat * (whole ? dense + experts / (way.ep * way.etp)
                        : (dense + experts) / way.world);
    run_ranks(way.world, [&](RankContext& context) {
      const Rank rank(context, config);
      std::map<std::string, std::int64_t> rows;
      for (const MemoryRow& row : memory_rows(
               *rank.state.runtime,
               rank.state.optimizer->state_nbytes())) {
        rows[row.role] = row.nbytes;
      }
      const std::int64_t weights =
          std::max(rows["main weights"], rows["compute weights"]);
      // Shards are padded.
      EXPECT_GE(weights, want) << way.name;
      EXPECT_LE(weights, want + want / 10) << way.name;
      EXPECT_EQ(rows["optimizer state"], 2 * weights) << way.name;
      EXPECT_EQ(rows["gradients"], weights) << way.name;
      EXPECT_EQ(
          least_memory(
              run_options(config, shape).least_memory,
              shape,
              way.world),
          4 * want)
          << way.name;
    });
  }
}

}  // namespace
}  // namespace flatshard
