// flatshard plan, through the program.
#include "tests/support/program.h"
#include "tests/support/temp_folder.h"

#include <fmt/format.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fstream>
#include <map>
#include <set>
#include <string>

namespace flatshard {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

testing::ProgramResult run(const std::string& arguments) {
  return testing::run_program(arguments);
}

TEST(PlanProgram, PrintsMemoryTimeAndDays) {
  const auto result = run("plan llama3_8b --ranks 8 --tokens 15T");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("8,030,261,248 parameters on 8 ranks of NVIDIA H100"),
          HasSubstr("main weights"),
          HasSubstr("slot pool"),
          HasSubstr("fits in"),
          HasSubstr("exposed transfers"),
          HasSubstr("tokens/s/GPU"),
          HasSubstr("mfu, causal"),
          HasSubstr("GPU-hours"),
          HasSubstr("prices: ")));
  // As it was asked for, and numbers as people read them.
  EXPECT_THAT(
      result.output,
      ::testing::ContainsRegex(
          "15T tokens +[0-9],[0-9]{3} days  [0-9]{3},[0-9]{3} GPU-hours"));
}

TEST(PlanProgram, PlansTheModelOfAHuggingFaceFolder) {
  const TempFolder folder;
  folder.write(
      "model 1/config.json",
      R"({"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 4,
          "num_attention_heads": 16, "num_key_value_heads": 8,
          "intermediate_size": 4096, "vocab_size": 32000, "rms_norm_eps": 1e-5,
          "max_position_embeddings": 4096, "rope_theta": 1e4,
          "tie_word_embeddings": false})");
  const auto result =
      run(fmt::format("plan '{}' --ranks 8", (folder / "model 1").string()));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr(" parameters on 8 ranks of NVIDIA H100"),
          HasSubstr("1 microbatch of 1 x 4096 tokens")));
  const auto other = run("plan '" + folder.path().string() + "' --ranks 8");
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(
      other.output,
      HasSubstr("expected a Hugging Face folder, with a config.json"));
}

TEST(PlanProgram, SweepsExplainTheirWords) {
  const auto result = run("plan llama3_1b --ranks 8 --sweep");
  ASSERT_EQ(result.code, 0) << result.output;
  for (const char* word : {"\nAxB ", "\ntpN ", "\nkept ", "\nepN "}) {
    EXPECT_THAT(result.output, HasSubstr(word));
  }
}

TEST(PlanProgram, PrintsJson) {
  const auto result = run("plan llama3_8b --ranks 16 --json --tokens 1B --set "
                          "parallelism.data_parallel_replicate_degree=2");
  ASSERT_EQ(result.code, 0) << result.output;
  const json plan = json::parse(result.output);
  EXPECT_EQ(plan.at("strategy"), "hsdp");
  EXPECT_EQ(plan.at("parameters"), 8030261248);
  // 4 bytes of each parameter on 8 ranks, and a little padding.
  EXPECT_NEAR(
      plan.at("memory_bytes").at("main weights").get<double>(),
      8030261248 / 2.0,
      1e5);
  EXPECT_GT(plan.at("transfers_ms").at("reduce over replicas"), 0);
  EXPECT_TRUE(plan.at("fits"));
  EXPECT_NEAR(
      plan.at("gpu_hours").get<double>() / 16 / 24,
      plan.at("days").get<double>(),
      1e-9);
}

TEST(PlanProgram, PlansSequencesThatRanksShare) {
  const std::string command =
      "plan llama3_8b --ranks 16 --set parallelism.context_parallel_degree=8 ";
  const auto result = run(command + "--json");
  ASSERT_EQ(result.code, 0) << result.output;
  const json plan = json::parse(result.output);
  EXPECT_EQ(plan.at("context_parallel_degree"), 8);
  EXPECT_EQ(plan.at("microbatches"), 1);
  // 4 bytes per parameter on 16 ranks.
  EXPECT_NEAR(
      plan.at("memory_bytes").at("main weights").get<double>(),
      8030261248 / 4.0,
      1e5);
  EXPECT_GT(plan.at("transfers_ms").at("CP all-to-all"), 0);
  EXPECT_THAT(
      run(command).output,
      AllOf(
          HasSubstr("strategy zero3, context parallelism 8; recompute"),
          HasSubstr("  context parallelism ")));
  // Two hosts of 8.
  const std::string over_hosts =
      "plan llama3_8b --ranks 16 --set parallelism.context_parallel_degree=16 "
      "--set parallelism.context_parallel_method=a2a+all_gather ";
  const json longer = json::parse(run(over_hosts + "--json").output);
  EXPECT_EQ(longer.at("context_parallel_degree"), 16);
  EXPECT_GT(longer.at("transfers_ms").at("CP all-gather"), 0);
  EXPECT_THAT(
      run(over_hosts).output,
      HasSubstr("context parallelism 16 (a2a over 8, all-gather over 2)"));
}

TEST(PlanProgram, PlansLayersThatRanksShare) {
  const auto result = run("plan llama3_8b --ranks 16 --json --set "
                          "parallelism.tensor_parallel_degree=4");
  ASSERT_EQ(result.code, 0) << result.output;
  const json plan = json::parse(result.output);
  EXPECT_EQ(plan.at("tensor_parallel_degree"), 4);
  EXPECT_EQ(plan.at("microbatches"), 1);
  // 4 bytes per parameter on 16 ranks: TP splits the matrices by 4, DP by 4.
  EXPECT_NEAR(
      plan.at("memory_bytes").at("main weights").get<double>(),
      8030261248 / 4.0,
      1e5);
  EXPECT_GT(plan.at("transfers_ms").at("TP all-gather"), 0);
  EXPECT_GT(plan.at("transfers_ms").at("TP reduce-scatter"), 0);
  EXPECT_GT(plan.at("exposed_tensor_parallel_ms"), 0);
  EXPECT_LE(plan.at("exposed_tensor_parallel_ms"), plan.at("exposed_ms"));
  const auto text = run("plan llama3_8b --ranks 16 --set "
                        "parallelism.tensor_parallel_degree=4");
  EXPECT_THAT(
      text.output,
      AllOf(
          HasSubstr("strategy zero3, tensor parallelism 4; recompute"),
          HasSubstr("  tensor parallelism ")));
}

// A rank has its shard of a frozen base in bfloat16. The rest of its memory is
// for adapters only.
TEST(PlanProgram, PlansAdapters) {
  const std::string words = "plan llama3_8b --ranks 2 --set lora.rank=16";
  const auto text = run(words);
  EXPECT_THAT(
      text.output,
      HasSubstr("8,030,261,248 parameters and 41,943,040 of adapters on"));
  const auto result = run(words + " --json");
  ASSERT_EQ(result.code, 0) << result.output;
  const json plan = json::parse(result.output);
  const json& memory = plan.at("memory_bytes");
  const auto nbytes = [&](const char* role) {
    return memory.at(role).get<double>();
  };
  EXPECT_NEAR(nbytes("main weights"), 41943040 / 2 * 4.0, 1e4);
  EXPECT_NEAR(nbytes("optimizer state"), 41943040 / 2 * 8.0, 1e4);
  EXPECT_NEAR(
      nbytes("compute weights"),
      (8030261248 + 41943040) / 2 * 2.0,
      1e5);
  EXPECT_GT(plan.at("kinds_ms").at("adapters"), 0);
}

TEST(PlanProgram, SweepsTheWidthOfExperts) {
  const auto result = run("plan mixtral_8x7b --ranks 16 --sweep --json");
  ASSERT_EQ(result.code, 0) << result.output;
  const json sweep = json::parse(result.output);
  std::set<int> widths;
  for (const char* list : {"fitting", "too_large"}) {
    for (const json& way : sweep.at(list)) {
      const int width = way.at("expert_tensor_degree").get<int>();
      widths.insert(width);
      if (width > 1) {
        EXPECT_GT(way.at("expert_degree"), 1);
        EXPECT_EQ(width % way.at("tensor_parallel_degree").get<int>(), 0);
      }
    }
  }
  EXPECT_THAT(widths, ::testing::IsSupersetOf({1, 2}));
}

// 405B on 4096 ranks needs seconds, on one core.
TEST(PlanProgram, SweepsTheLargest) {
  const auto result = run("plan llama3_405b --ranks 4096 --sweep --json");
  ASSERT_EQ(result.code, 0) << result.output;
  const json sweep = json::parse(result.output);
  ASSERT_FALSE(sweep.at("fitting").empty());
  ASSERT_FALSE(sweep.at("too_large").empty());
  double before = 1e9;
  std::set<int> degrees;
  for (const json& way : sweep.at("fitting")) {
    degrees.insert(way.at("tensor_parallel_degree").get<int>());
    EXPECT_LE(way.at("tokens_per_second_per_gpu"), before);
    EXPECT_LE(way.at("peak_bytes"), way.at("room_bytes"));
    before = way.at("tokens_per_second_per_gpu");
  }
  EXPECT_EQ(degrees, (std::set<int>{1, 2, 4, 8}));
  for (const json& way : sweep.at("too_large")) {
    EXPECT_GT(way.at("peak_bytes"), way.at("room_bytes"));
  }
}

TEST(PlanProgram, DrawsTheStep) {
  const TempFolder folder;
  const auto path = folder / "step.svg";
  const auto result =
      run(fmt::format("plan llama3_1b --ranks 8 --svg '{}'", path.string()));
  EXPECT_EQ(result.code, 0) << result.output;
  std::ifstream in(path);
  const std::string svg{std::istreambuf_iterator<char>(in), {}};
  EXPECT_THAT(svg, ::testing::StartsWith("<svg xmlns="));
  EXPECT_THAT(svg, HasSubstr("llama3_1b on 8 ranks of NVIDIA H100"));
}

TEST(PlanProgram, BadInputSaysWhatWasExpected) {
  const TempFolder folder;
  folder.write("gpu.toml", "base = \"h100\"\nmemory_gb = 3\n");
  const std::string gpu = (folder / "gpu.toml").string();
  for (const auto& [words, says] : std::map<std::string, std::string>{
           {"plan", "flatshard plan run.toml --ranks 8"},
           {"plan llama3_8b", "requires --ranks"},
           {"plan llama3_8b --ranks 0", "--ranks"},
           {"plan nothing --ranks 8", "or a preset (llama3_1b, "},
           {"plan llama38b --ranks 8",
            "got 'llama38b'; did you mean "
            "'llama3_8b'?"},
           {"plan llama3_8b --ranks 8 --set model.preset=qwen3_8",
            "got 'qwen3_8'; did you mean 'qwen3_8b'?"},
           {"plan llama3_8b --ranks 8 --device cpu", "--calibrate"},
           {"plan llama3_8b --ranks 8 --nproc 2", "--calibrate"},
           {"plan llama3_8b --ranks 8 -o x.toml", "--calibrate"},
           {"plan --calibrate --device cpu --ranks 8", "--ranks"},
           {"plan llama3_8b --calibrate --device cpu", "config"},
           {"plan llama3_8b --ranks 8 --gpu h300", "did you mean h100?"},
           {"plan llama3_8b --ranks 8 --gpu " + gpu, "memory_gb"},
           {"plan llama3_8b --ranks 8 --tokens many", "such as 300B or 15T"},
           {"plan llama3_8b --ranks 8 --set model.layer=3", "model.layer"},
           {"plan llama3_8b --ranks 6 --set "
            "parallelism.data_parallel_replicate_degree=4",
            "cannot be divided by"},
           {"plan llama3_8b --ranks 16 --set "
            "parallelism.tensor_parallel_degree=16",
            "expected a divisor of model.kv_heads"},
           {"plan llama3_8b --ranks 16 --set parallelism.copy_engines=all",
            "copies reach GPUs of one host"},
           {"plan llama3_8b --ranks 8 --gpu a100 --set float8.recipe=rowwise",
            "no rates of the FP8 recipe rowwise"},
           {"plan llama3_8b --ranks 8 --set precision.compute=float32",
            "set precision.compute = \"bfloat16\""},
           {"plan llama3_8b --ranks 8 --set parallelism.post_forward_ranks=3",
            "expected post_forward_ranks to be a divisor of the 8 ranks"},
           {"plan llama3_70b --ranks 4096 --set parallelism.granularity=tensor",
            "padding"},
           {"plan llama3_8b --ranks 8 --svg /none/x.svg", "'/none/x.svg'"},
           {"plan llama3_8b --ranks 8 --sweep --tokens 1T",
            "--svg or --tokens"},
           {"plan llama3_8b --rank 8", "did you mean '--ranks'?"}}) {
    const auto result = run(words);
    EXPECT_NE(result.code, 0) << words;
    EXPECT_THAT(result.output, HasSubstr(says)) << words;
  }
}

// A CPU's rates are of no use, but the steps are the same as on a GPU.
TEST(PlanProgram, CalibratesAndReadsTheTable) {
  const TempFolder folder;
  const std::string path = (folder / "cpu.toml").string();
  const auto calibrated =
      run(fmt::format("plan --calibrate --device cpu --nproc 2 -o '{}'", path));
  EXPECT_EQ(calibrated.code, 0) << calibrated.output;
  const auto planned =
      run(fmt::format("plan llama3_1b --ranks 2 --gpu '{}' --json", path));
  ASSERT_EQ(planned.code, 0) << planned.output;
  const json plan = json::parse(planned.output);
  EXPECT_EQ(plan.at("gpu"), "CPU");
  // Some 50 TFLOP of a step, by a CPU.
  EXPECT_GT(plan.at("step_ms"), 10000);
}

}  // namespace
}  // namespace flatshard
