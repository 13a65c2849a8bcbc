// Ranks that share layers as a user meets them.
#include "tests/cli/bad_input.h"
#include "tests/support/sum_order.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;

// In float32, relative: sums over the tokens of a step.
const double kSameRun = testing::sum_tolerance(
    {.addends = 8 * 32,
     .in_a_row = testing::sums_of_steps(/*layers=*/2, /*steps=*/6)});
// The parts of an expert's result are rounded to bfloat16 before they are added
// up, and FP8 weights follow what that changes.
constexpr double kSameBfloat16Run = 1e-2;

class TensorParallelRuns : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    corpus_ = new TempFolder;
    prepare_corpus(*corpus_, "--validation-fraction 0.1");
  }
  static void TearDownTestSuite() { delete corpus_; }

  /// Trains a run named `name`, below the folder.
  Result run(const std::string& name, int ranks, const std::string& more = "")
      const {
    const auto config = folder_.write(
        name + ".toml",
        fmt::format(
            R"([run]
output_dir = "{}"
[model]
dim = 32
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 64
vocab_size = 257
[data]
train = "{}"
[training]
steps = 6
seq_len = 32
local_batch_size = 2
global_batch_size = 8
max_norm = 0.5
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 1
[precision]
compute = "float32"
[validation]
freq = 3
sequences = 5
[metrics]
log_freq = 1
)",
            (folder_ / name).string(),
            (*corpus_ / "corpus").string()));
    return sh(fmt::format(
        "\"$PROGRAM\" train '{}' --device cpu --nproc {} {}",
        config.string(),
        ranks,
        more));
  }

  /// Returns the numbers of a run, by step and what they are.
  std::map<std::string, double> numbers(const std::string& name) const {
    std::map<std::string, double> found;
    std::istringstream lines(read(folder_ / name / "metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const auto row = nlohmann::json::parse(line);
      for (const char* key :
           {"loss", "grad_norm", "validation_loss", "tokens"}) {
        if (row.contains(key) && row.contains("step")) {
          found[fmt::format("{} of step {}", key, row["step"].get<int>())] =
              row[key];
        }
      }
    }
    return found;
  }

  /// Other commands read the run.
  void expect_usable(const std::string& name) const {
    const std::string path = (folder_ / name).string();
    for (const std::string& command :
         {"generate --run '" + path +
              "' --prompt 'line 3' --max-new-tokens 4 --device cpu",
          "evaluate --run '" + path + "' --device cpu --data '" +
              (*corpus_ / "corpus").string() + "'",
          "export --run '" + path + "' --to '" + (folder_ / "hf").string() +
              "'"}) {
      const Result result = sh("\"$PROGRAM\" " + command);
      EXPECT_EQ(result.code, 0) << result.output;
    }
  }

  void expect_same(
      const std::string& got,
      const std::string& want,
      double tolerance = kSameRun) const {
    const auto expected = numbers(want);
    const auto actual = numbers(got);
    EXPECT_EQ(actual.size(), expected.size());
    for (const auto& [what, value] : expected) {
      ASSERT_TRUE(actual.contains(what)) << got << ": " << what;
      EXPECT_LE(std::abs(actual.at(what) - value), tolerance * std::abs(value))
          << got << ": " << what << " is " << actual.at(what) << ", not "
          << value;
    }
  }

  static inline TempFolder* corpus_ = nullptr;
  TempFolder folder_;
};

constexpr const char* kExperts =
    "--set model.family=moe --set model.num_experts=4 --set "
    "model.moe_ffn_dim=16 --set model.shared_experts=1 --set "
    "moe.aux_loss=0.01 --set moe.balance_rate=0.01 ";
constexpr const char* kExpertGrid =
    "--set parallelism.expert_parallel_degree=2 --set "
    "parallelism.expert_tensor_parallel_degree=2 ";
constexpr const char* kTwo = "--set parallelism.tensor_parallel_degree=2 ";

// Losses are means over the ranks that read different samples, norms count each
// element once, tokens and validation sequences count once.
TEST_F(TensorParallelRuns, G6_GridsGiveTheNumbersOfOneRank) {
  const Result one = run("one", 1);
  ASSERT_EQ(one.code, 0) << one.output;
  EXPECT_EQ(numbers("one").size(), 6U * 3 + 2);
  const Result grid = run("grid", 4, kTwo);
  ASSERT_EQ(grid.code, 0) << grid.output;
  EXPECT_THAT(
      grid.output,
      HasSubstr("4 ranks of CPU, each 2 of which share their layers"));
  expect_same("grid", "one");
  const Result copies =
      run("copies",
          2,
          std::string(kTwo) + "--set parallelism.tensor_parallel_comm=copies");
  ASSERT_EQ(copies.code, 0) << copies.output;
  EXPECT_THAT(copies.output, HasSubstr("shared layers"));
  expect_same("copies", "one");
  const Result recomputed =
      run("recomputed",
          2,
          std::string(kTwo) +
              "--set activation_checkpoint.mode=full --set "
              "parallelism.strategy=zero1 --set optimizer.overlap=true");
  ASSERT_EQ(recomputed.code, 0) << recomputed.output;
  expect_same("recomputed", "one");
}

constexpr const char* kTwoOfASequence =
    "--set parallelism.context_parallel_degree=2 ";

// Each rank reads other tokens of the same samples.
TEST_F(TensorParallelRuns, SharedSequencesGiveTheNumbersOfOneRank) {
  const std::string constant = "--set lr_scheduler.name=constant ";
  const Result one = run("one", 1, constant);
  ASSERT_EQ(one.code, 0) << one.output;
  const Result all =
      run("all", 4, constant + kTwoOfASequence + std::string(kTwo));
  ASSERT_EQ(all.code, 0) << all.output;
  EXPECT_THAT(
      all.output,
      HasSubstr("4 ranks of CPU, each 2 of which share their layers, each 2 of "
                "which share their sequences"));
  expect_same("all", "one");
  const Result copies =
      run("copies",
          4,
          constant + kTwoOfASequence + kTwo +
              "--set parallelism.context_parallel_comm=copies");
  ASSERT_EQ(copies.code, 0) << copies.output;
  EXPECT_THAT(copies.output, HasSubstr("shared sequences"));
  EXPECT_EQ(numbers("copies"), numbers("all"));
}

// Runs resume with sequences on more ranks and on fewer, and programs that read
// runs have any number of ranks.
TEST_F(TensorParallelRuns, CheckpointsOfSharedSequencesAreReadOnOtherGrids) {
  const std::string constant = "--set lr_scheduler.name=constant ";
  const Result one = run("one", 1, constant);
  ASSERT_EQ(one.code, 0) << one.output;
  const std::string save = constant + "--set checkpoint.interval=3 ";
  struct Grid {
    int ranks;
    std::string options;
  };
  const Grid whole{1, ""};
  const Grid two{2, kTwoOfASequence};
  struct Resume {
    std::string run;
    Grid from;
    std::vector<Grid> to;
  };
  for (const auto& [begun, from, grids] :
       {Resume{"two", two, {whole, {4, ""}, {4, kTwoOfASequence}}},
        Resume{"whole", whole, {two}}}) {
    const Result first =
        run(begun, from.ranks, from.options + save + "--set training.steps=3");
    ASSERT_EQ(first.code, 0) << first.output;
    for (const Grid& to : grids) {
      const std::string name = fmt::format("{} {}", begun, to.ranks);
      fs::remove_all(folder_ / name);
      fs::copy(folder_ / begun, folder_ / name, fs::copy_options::recursive);
      const Result resumed =
          run(name, to.ranks, to.options + save + "--resume");
      ASSERT_EQ(resumed.code, 0) << resumed.output;
      expect_same(name, "one");
    }
  }
  expect_usable("whole 2");
}

// Weights and optimizer state equal the unsharded tensors.
TEST_F(TensorParallelRuns, CheckpointsAreReadOnOtherGrids) {
  const std::string constant = "--set lr_scheduler.name=constant ";
  const Result whole = run("whole", 1, constant);
  ASSERT_EQ(whole.code, 0) << whole.output;
  const std::string save = constant + "--set checkpoint.interval=3 ";
  const Result begun = run("run", 2, kTwo + save + "--set training.steps=3");
  ASSERT_EQ(begun.code, 0) << begun.output;
  struct Grid {
    int ranks;
    std::string options;
  };
  for (const Grid& grid : {Grid{1, ""}, Grid{2, ""}, Grid{4, kTwo}}) {
    const std::string name = fmt::format("grid{}", grid.ranks);
    fs::copy(folder_ / "run", folder_ / name, fs::copy_options::recursive);
    const Result resumed =
        run(name, grid.ranks, grid.options + save + "--resume");
    ASSERT_EQ(resumed.code, 0) << resumed.output;
    expect_same(name, "whole");
  }
  const Result generated = sh(fmt::format(
      "\"$PROGRAM\" generate --run '{}' --prompt 'line 3' --max-new-tokens 4 "
      "--device cpu",
      (folder_ / "run").string()));
  EXPECT_EQ(generated.code, 0) << generated.output;
}

// Attention and shared experts are split over tp, experts over ep, and
// their width over etp. The ranks of etp read the same samples with tp and
// other ones without it. With a capacity, each rank drops rows of its
// microbatch.
TEST_F(TensorParallelRuns, ModelsWithExpertsHaveTheNumbersOfOneRank) {
  const Result one = run("one", 1, kExperts);
  ASSERT_EQ(one.code, 0) << one.output;
  const std::string grid = kExpertGrid;
  const std::pair<std::string, std::string> grids[] = {
      {"ep", std::string(kTwo) + "--set parallelism.expert_parallel_degree=2"},
      {"etp", grid},
      {"all",
       grid + kTwo +
           "--set parallelism.strategy=zero2 --set "
           "activation_checkpoint.mode=full"}};
  for (const auto& [name, options] : grids) {
    const Result result = run(name, 4, kExperts + options);
    ASSERT_EQ(result.code, 0) << result.output;
    expect_same(name, "one");
  }
  const std::string single = " --set training.local_batch_size=1";
  const Result one_single = run("one_single", 1, kExperts + single);
  ASSERT_EQ(one_single.code, 0) << one_single.output;
  const Result overlapped =
      run("overlapped",
          4,
          kExperts + grid + single +
              " --set parallelism.overlap_expert_parallel=true --set "
              "parallelism.delay_wgrad=true");
  ASSERT_EQ(overlapped.code, 0) << overlapped.output;
  expect_same("overlapped", "one_single");
  const std::string drops = " --set moe.expert_capacity_factor=1.0";
  const Result one_drops = run("one_drops", 1, kExperts + drops);
  ASSERT_EQ(one_drops.code, 0) << one_drops.output;
  const Result grid_drops = run("grid_drops", 4, kExperts + grid + drops);
  ASSERT_EQ(grid_drops.code, 0) << grid_drops.output;
  EXPECT_THAT(
      grid_drops.output,
      HasSubstr("each 2 of which share the width of their experts"));
  expect_same("grid_drops", "one_drops");
}

// A checkpoint of ep 2 with etp 2 stores full experts: training resumes on one
// rank, and programs that read runs have one process.
TEST_F(TensorParallelRuns, CheckpointsOfCutExpertsAreReadByOneRank) {
  const std::string options =
      "--set model.family=qwen3_moe --set model.num_experts=4 --set "
      "model.moe_ffn_dim=16 --set moe.aux_loss=0.01 --set "
      "lr_scheduler.name=constant ";
  const Result whole = run("whole", 1, options);
  ASSERT_EQ(whole.code, 0) << whole.output;
  const std::string save = options + "--set checkpoint.interval=3 ";
  const Result begun =
      run("run", 4, kExpertGrid + save + "--set training.steps=3");
  ASSERT_EQ(begun.code, 0) << begun.output;
  fs::copy(folder_ / "run", folder_ / "one", fs::copy_options::recursive);
  const Result resumed = run("one", 1, save + "--resume");
  ASSERT_EQ(resumed.code, 0) << resumed.output;
  expect_same("one", "whole");
  expect_usable("run");
}

// FP8 weights of the other layers, while experts stay in bfloat16. Ranks that
// divide experts also split their width, or are replicas of others.
TEST_F(TensorParallelRuns, Fp8RunsWithExpertsHaveTheNumbersOfWholeOnes) {
  const std::string fp8 = std::string(kExperts) +
                          "--set float8.recipe=mxfp8 --set "
                          "precision.compute=bfloat16 --set "
                          "parallelism.expert_parallel_degree=2 ";
  const std::string replicas = "--set parallelism.strategy=hfsdp --set "
                               "parallelism.data_parallel_replicate_degree=2 ";
  struct Case {
    std::string name;
    int ranks;
    std::string options;
  };
  for (const Case& c :
       {Case{
            "hfsdp",
            8,
            replicas +
                "--set training.global_batch_size=16 --set training.steps=3"},
        Case{"recomputed", 4, "--set activation_checkpoint.mode=full"},
        Case{"main", 4, "--set precision.main_params=bfloat16"}}) {
    const Result whole = run(c.name + "_whole", c.ranks, fp8 + c.options);
    ASSERT_EQ(whole.code, 0) << whole.output;
    EXPECT_THAT(whole.output, HasSubstr("mxfp8 (emulated)"));
    const Result cut = run(c.name, c.ranks, fp8 + kExpertGrid + c.options);
    ASSERT_EQ(cut.code, 0) << cut.output;
    expect_same(c.name, c.name + "_whole", kSameBfloat16Run);
    if (c.ranks == 4) {
      const Result outer =
          run(c.name + "_replicas", c.ranks, fp8 + replicas + c.options);
      ASSERT_EQ(outer.code, 0) << outer.output;
      expect_same(c.name + "_replicas", c.name + "_whole", kSameBfloat16Run);
    }
  }
}

TEST_F(TensorParallelRuns, GraphsOfSharedSequencesChangeNoNumber) {
  const Result eager = run("eager", 2, kTwoOfASequence);
  ASSERT_EQ(eager.code, 0) << eager.output;
  for (const char* impl : {"unit", "full_iteration"}) {
    const Result graphs =
        run(impl,
            2,
            fmt::format(
                "{}--set cuda_graph.impl={} --set cuda_graph.on_miss=error "
                "--set debug.emulate_graphs=true",
                kTwoOfASequence,
                impl));
    ASSERT_EQ(graphs.code, 0) << graphs.output;
    EXPECT_EQ(numbers(impl), numbers("eager"));
  }
}

TEST_F(TensorParallelRuns, GraphsChangeNoNumber) {
  const Result eager = run("eager", 2, kTwo);
  ASSERT_EQ(eager.code, 0) << eager.output;
  const Result graphs =
      run("graphs",
          2,
          std::string(kTwo) +
              "--set cuda_graph.impl=unit --set cuda_graph.modules=attn,mlp "
              "--set cuda_graph.on_miss=error --set debug.emulate_graphs=true");
  ASSERT_EQ(graphs.code, 0) << graphs.output;
  EXPECT_THAT(graphs.output, HasSubstr("4 of 4 regions captured"));
  EXPECT_EQ(numbers("graphs"), numbers("eager"));
  const Result step =
      run("step",
          2,
          std::string(kTwo) +
              "--set cuda_graph.impl=full_iteration --set "
              "cuda_graph.on_miss=error --set debug.emulate_graphs=true");
  ASSERT_EQ(step.code, 0) << step.output;
  EXPECT_EQ(numbers("step"), numbers("eager"));
}

// Losses around 5, by weights of which each rank quantizes its own part.
TEST_F(TensorParallelRuns, Float8IsNearOneRank) {
  const std::string float8 =
      "--set float8.recipe=rowwise --set precision.compute=bfloat16 ";
  const Result one = run("one", 1, float8);
  ASSERT_EQ(one.code, 0) << one.output;
  const Result grid = run("grid", 4, kTwo + float8);
  ASSERT_EQ(grid.code, 0) << grid.output;
  EXPECT_THAT(grid.output, HasSubstr("rowwise (emulated)"));
  for (int step = 1; step <= 6; ++step) {
    const std::string loss = fmt::format("loss of step {}", step);
    EXPECT_NEAR(numbers("grid").at(loss), numbers("one").at(loss), 0.05);
  }
}

TEST_F(TensorParallelRuns, WhatIsNotSupportedIsNamed) {
  struct Case {
    std::string options;
    std::string says;
    int ranks = 2;
  };
  for (const Case& c :
       {Case{
            "--set parallelism.tensor_parallel_degree=4",
            "parallelism.tensor_parallel_degree = 4: expected a divisor of "
            "the 2 ranks"},
        Case{
            std::string(kTwo) + "--set model.kv_heads=1",
            "parallelism.tensor_parallel_degree = 2: expected a divisor of "
            "model.kv_heads = 1"},
        Case{
            std::string(kTwo) +
                "--set model.heads=3 --set model.kv_heads=3 --set model.dim=48",
            "parallelism.tensor_parallel_degree = 2: expected a divisor of "
            "model.heads = 3"},
        Case{
            std::string(kTwo) + "--set model.ffn_dim=63",
            "parallelism.tensor_parallel_degree = 2: expected a divisor of "
            "model.ffn_dim = 63"},
        Case{
            std::string(kTwo) + kExperts + "--set model.moe_ffn_dim=15",
            "parallelism.tensor_parallel_degree = 2: expected a divisor of "
            "model.shared_experts * moe_ffn_dim = 15"},
        // Its rows need not divide: the ranks have parts of different lengths.
        Case{
            "--set parallelism.tensor_parallel_degree=4 --set "
            "model.kv_heads=4 --set model.vocab_size=3",
            "parallelism.tensor_parallel_degree = 4: expected no more ranks "
            "than model.vocab_size = 3",
            4},
        Case{
            std::string(kTwo) + "--set training.seq_len=33",
            "parallelism.tensor_parallel_degree = 2: expected a divisor of "
            "training.seq_len = 33"},
        Case{
            std::string(kTwo) +
                "--set parallelism.tensor_parallel_comm=copies --set "
                "cuda_graph.impl=unit",
            "copies between the memory of GPUs are not captured; use "
            "\"collective"},
        Case{
            "--set parallelism.context_parallel_degree=4",
            "parallelism.context_parallel_degree = 4: expected a divisor of "
            "the 2 ranks"},
        Case{
            std::string(kTwoOfASequence) + "--set training.seq_len=33",
            "parallelism.context_parallel_degree = 2: expected a divisor of "
            "training.seq_len = 33"},
        Case{
            std::string(kTwoOfASequence) +
                "--set model.heads=1 --set model.kv_heads=1",
            "parallelism.context_parallel_degree = 2: expected a divisor of "
            "the 1 heads"},
        Case{
            std::string(kTwoOfASequence) +
                "--set parallelism.context_parallel_comm=copies --set "
                "cuda_graph.impl=unit",
            "parallelism.context_parallel_comm = \"copies\" with "
            "cuda_graph.impl"},
        Case{
            "--set parallelism.pipeline_parallel_degree=2",
            "parallelism.pipeline_parallel_degree = 2 is not supported"},
        Case{
            "--set parallelism.expert_tensor_parallel_degree=2",
            "parallelism.expert_tensor_parallel_degree is for models with "
            "experts"},
        Case{
            std::string(kTwo) + kExperts +
                "--set parallelism.expert_tensor_parallel_degree=3",
            "parallelism.expert_tensor_parallel_degree = 3: expected 1 or a "
            "multiple of parallelism.tensor_parallel_degree = 2"},
        Case{
            std::string(kExperts) +
                "--set parallelism.expert_tensor_parallel_degree=2 --set "
                "model.moe_ffn_dim=15",
            "parallelism.expert_tensor_parallel_degree = 2 must divide the "
            "width of an expert, model.moe_ffn_dim = 15"},
        Case{
            std::string(kExperts) + kExpertGrid,
            "parallelism.expert_parallel_degree = 2 * "
            "expert_tensor_parallel_degree = 2 must divide "
            "data_parallel_shard_degree = 2 of 2 ranks"},
        Case{
            std::string(kExperts) +
                "--set parallelism.expert_tensor_parallel_degree=2 --set "
                "parallelism.token_exchange=copies",
            "not supported: copies bring a row to one rank; use "
            "\"collective\""}}) {
    const Result result = run("run", c.ranks, c.options);
    EXPECT_EQ(result.errors().size(), 1U) << result.output;
    EXPECT_THAT(result.output, HasSubstr(c.says));
    EXPECT_FALSE(fs::exists(folder_ / "run/metrics.jsonl")) << c.options;
  }
}

}  // namespace
}  // namespace flatshard::testing
