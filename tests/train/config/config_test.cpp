#include "flatshard/train/config/run_config.h"

#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>

#include "flatshard/core/error.h"
#include "flatshard/models/config.h"
#include "flatshard/train/config/other_names.h"
#include "flatshard/train/tools/run_files.h"

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kGathersKeys =
    "parallelism.context_parallel_method=a2a+all_gather";

constexpr const char* kSmall = R"([model]
dim = 192
layers = 4
heads = 6
ffn_dim = 512
vocab_size = 257

[data]
train = "corpus"

[training]
steps = 600
seq_len = 256
)";

std::string message(
    ErrorCode code,
    const std::string& text,
    const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(text, "run.toml", overrides);
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code));
    return error.message();
  }
  ADD_FAILURE() << "expected an Error for:\n" << text;
  return {};
}

/// Returns the message for the small config with `overrides`.
std::string refused(const std::vector<std::string>& overrides) {
  return message(ErrorCode::config, kSmall, overrides);
}

std::string refused_text(const std::string& more) {
  return message(ErrorCode::config, kSmall + more);
}

TEST(Config, ReadsValuesAndKeepsDefaults) {
  const Config config = parse_config(
      std::string(kSmall) + "max_norm = 2\n[optimizer]\nlr = 3e-3\n",
      "run.toml");
  EXPECT_EQ(config.optimizer.lr, 3e-3);
  EXPECT_EQ(config.model.dim, 192);
  EXPECT_EQ(config.training.steps, 600);
  EXPECT_EQ(config.training.max_norm, 2.0);
  EXPECT_EQ(config.training.local_batch_size, 1);
  EXPECT_FALSE(config.model.kv_heads.has_value());
  EXPECT_FALSE(config.model.tie_embeddings.has_value());
}

TEST(Config, ACommentedConfigIsReadBack) {
  for (const std::string_view preset : models::preset_names()) {
    const Config start = starting_config(std::string(preset));
    const std::string text = to_commented_toml(start);
    EXPECT_EQ(to_toml(parse_config(text, "run.toml")), to_toml(start))
        << preset;
    EXPECT_THAT(text, HasSubstr("\nsteps = 1000\n"));
    EXPECT_THAT(text, HasSubstr("\n# seed = 0\n"));
    EXPECT_THAT(text, HasSubstr("\n# dim = <an integer>\n"));
    // Every line is short, and each key has a comment before it.
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(line.size(), 100U) << line;
    }
  }
  EXPECT_THROW(starting_config("llama9"), Error);
}

TEST(Config, AMixtureIsAListOfFoldersWithWeights) {
  const std::vector<data::SourceChoice> mixture{
      {.path = "a \"b\"", .weight = 0.75},
      {.path = "c"}};
  const Config config = parse_config(
      kSmall,
      "run.toml",
      {"data.train=[{path = 'a \"b\"', weight = 0.75}, {path = 'c'}]",
       "validation.freq=2",
       "data.validation=[{path = 'v', weight = 7}]"});
  EXPECT_EQ(config.data.train, mixture);
  EXPECT_EQ(
      config.data.validation,
      (std::vector<data::SourceChoice>{{.path = "v"}}));
  const Config again = parse_config(to_toml(config), "again.toml");
  EXPECT_EQ(again.data.train, mixture);
  EXPECT_EQ(again.data.validation, config.data.validation);
  const auto refused_list = [](const std::string& list) {
    return refused({"data.train=" + list});
  };
  EXPECT_THAT(
      refused_list("[{path = 'a', weight = 0}, {path = 'b'}]"),
      HasSubstr("data.train expected a weight above 0 for a, got 0"));
  EXPECT_THAT(
      refused_list("[{path = 'a'}, {path = 'a'}]"),
      HasSubstr("data.train names a twice"));
  EXPECT_THAT(
      refused_list("[{path = 'a', wieght = 1}]"),
      HasSubstr("expected path = \"folder\" and weight = number"));
  EXPECT_THAT(refused_list("[{weight = 1}]"), HasSubstr("has no path"));
  for (const char* list : {"[]", "['a']", "[1]", "[{path = 'a'}"}) {
    EXPECT_THAT(
        refused_list(list),
        HasSubstr("data.train expected a folder in quotes, or a list of"))
        << list;
  }
}

TEST(Config, ParameterGroupsAreTables) {
  const Config config = parse_config(
      kSmall + std::string(R"(
[optimizer]
decay = "matrices"
[[optimizer.param_groups]]
pattern = "embed_tokens|\\.\"x"
lr_mult = 0.5
wd_mult = 0
beta1 = 0.8
[[optimizer.param_groups]]
pattern = 'norm\.weight$'
name = "sgd"
momentum = 0.9
[[optimizer.param_groups]]
pattern = "mlp"
state_dtype = "int8"
)"),
      "run.toml");
  EXPECT_EQ(config.optimizer.decay, Decay::matrices);
  const std::vector<ParameterRule> rules{
      {.pattern = "embed_tokens|\\.\"x",
       .lr_mult = 0.5,
       .wd_mult = 0,
       .beta1 = 0.8},
      {.pattern = "norm\\.weight$",
       .algorithm = Algorithm::sgd,
       .momentum = 0.9},
      {.pattern = "mlp", .state_dtype = StateFormat::int8}};
  EXPECT_EQ(config.optimizer.param_groups, rules);
  EXPECT_TRUE(config.optimizer.needs_state_blocks());
  EXPECT_EQ(config.optimizer.fewest_state_nbytes(), 2 + 8.0 / 256);
  EXPECT_EQ(config.optimizer.state_nbytes(), 8);
  const std::string text = to_toml(config);
  EXPECT_EQ(parse_config(text, "again.toml").optimizer.param_groups, rules);
  EXPECT_THAT(
      text,
      HasSubstr("{ pattern = \"norm\\\\.weight$\", name = \"sgd\", momentum = "
                "0.9 },"));
  EXPECT_THAT(
      text,
      HasSubstr("{ pattern = \"mlp\", state_dtype = \"int8\" },"));
  EXPECT_EQ(
      parse_config(
          kSmall,
          "run.toml",
          {"optimizer.param_groups=[{pattern = 'a', eps = 1e-6}]"})
          .optimizer.param_groups,
      (std::vector<ParameterRule>{{.pattern = "a", .eps = 1e-6}}));
}

TEST(Config, ParameterGroupsAreChecked) {
  const auto refused_list = [](const std::string& list) {
    return refused({"optimizer.param_groups=" + list});
  };
  EXPECT_THAT(refused_list("[{lr_mult = 2}]"), HasSubstr("has no pattern"));
  EXPECT_THAT(
      refused_list("[{pattern = 'a', lr_mul = 2}]"),
      HasSubstr("has no 'lr_mul' in a table of its list; did you mean "
                "'lr_mult'?"));
  EXPECT_THAT(
      refused_list("[{pattern = 'a', name = 'adam'}]"),
      HasSubstr("did you mean 'adamw'?"));
  EXPECT_THAT(
      refused_list("[{pattern = 1}]"),
      HasSubstr("pattern: expected text in quotes, got 1"));
  for (const char* value : {"-1", "'2'", "true", "nan"}) {
    EXPECT_THAT(
        refused_list(fmt::format("[{{pattern = 'a', lr_mult = {}}}]", value)),
        HasSubstr("lr_mult: expected a number >= 0, got "))
        << value;
  }
  EXPECT_THAT(
      refused_list("[{pattern = 'a', beta1 = 2}]"),
      HasSubstr("beta1: expected a number in [0, 1], got 2"));
  EXPECT_THAT(
      refused_list("[{pattern = 'a', beta1 = 1}]"),
      HasSubstr("pattern \"a\": beta1 must be below 1"));
  EXPECT_THAT(
      refused_list("[{pattern = 'a', eps = 0}]"),
      HasSubstr("pattern \"a\": eps must be above 0, got 0"));
  EXPECT_THAT(
      refused_list("[{pattern = 'a', name = 'sgd', beta1 = 0.5}]"),
      HasSubstr("pattern \"a\" sets beta1, but it has no effect with name = "
                "\"sgd\""));
  EXPECT_THAT(
      refused_list("[{pattern = 'a', state_dtype = 'int4'}]"),
      HasSubstr("state_dtype"));
  EXPECT_THAT(
      refused_list("[{pattern = 'a', name = 'sgd', state_dtype = 'int8'}]"),
      HasSubstr("pattern \"a\" sets state_dtype, but it has no effect with "
                "name = \"sgd\""));
  EXPECT_THAT(
      refused(
          {"optimizer.param_groups=[{pattern = 'a', state_dtype = 'int8'}]",
           "parallelism.granularity=chunk"}),
      HasSubstr("chunks split blocks of 256 elements"));
  for (const char* list : {"1", "['a']", "[{pattern = 'a'}"}) {
    EXPECT_THAT(
        refused_list(list),
        HasSubstr("expected a list of { pattern = \"regex\", ... }"))
        << list;
  }
  // A key of one algorithm is used if a group has it.
  EXPECT_THAT(
      refused({"optimizer.momentum=0.5"}),
      HasSubstr("optimizer.momentum"));
  parse_config(
      kSmall,
      "run.toml",
      {"optimizer.momentum=0.5",
       "optimizer.param_groups=[{pattern = 'a', name = 'sgd'}]"});
}

TEST(Config, MuonHasItsOwnKeys) {
  const Config config = parse_config(
      kSmall,
      "run.toml",
      {"optimizer.name=muon",
       "optimizer.ns_steps=3",
       "optimizer.ns_coefficients=2, -1.5, 0.5",
       "optimizer.adjust_lr_fn=original",
       "optimizer.momentum=0.9",
       "optimizer.beta2=0.99"});
  EXPECT_EQ(config.optimizer.ns_steps, 3);
  EXPECT_EQ(
      config.optimizer.ns_coefficients,
      (std::array<double, 3>{2, -1.5, 0.5}));
  for (const char* text : {"2, -1.5", "2, -1.5, b", "1, 2, 3, 4"}) {
    EXPECT_THAT(
        refused(
            {"optimizer.name=muon",
             fmt::format("optimizer.ns_coefficients={}", text)}),
        HasSubstr("optimizer.ns_coefficients: expected three numbers"));
  }
  EXPECT_EQ(config.optimizer.adjust_lr_fn, AdjustLr::original);
  EXPECT_EQ(config.optimizer.fewest_state_nbytes(), 4);
  EXPECT_THAT(
      refused({"optimizer.ns_steps=3"}),
      HasSubstr("it belongs to muon"));
  EXPECT_THAT(
      refused({"optimizer.name=muon", "optimizer.ns_steps=100"}),
      HasSubstr("optimizer.ns_steps"));
  EXPECT_THAT(
      refused({"optimizer.name=muon", "lora.rank=8"}),
      HasSubstr("Muon does not support adapters"));
  EXPECT_THAT(
      refused({"optimizer.name=muon", "cuda_graph.impl=full_iteration"}),
      HasSubstr("Muon is not supported with a graph of the whole step"));
  // A parameter group of Muon uses AdamW's keys, too, where it has no matrices.
  parse_config(
      kSmall,
      "run.toml",
      {"optimizer.name=sgd",
       "optimizer.beta2=0.5",
       "optimizer.param_groups=[{pattern = 'a', name = 'muon', "
       "momentum = 0.5, eps = 1e-6}]"});
}

TEST(Config, TheShapeOfADecayIsOfWsd) {
  EXPECT_EQ(
      parse_config(
          kSmall,
          "run.toml",
          {"lr_scheduler.name=wsd", "lr_scheduler.decay_type=sqrt"})
          .lr_scheduler.decay_type,
      LrSchedule::Decay::sqrt);
  EXPECT_THAT(
      refused({"lr_scheduler.decay_type=sqrt"}),
      HasSubstr("lr_scheduler.decay_type"));
  EXPECT_THAT(
      refused({"lr_scheduler.name=wsd", "lr_scheduler.decay_type=exp"}),
      HasSubstr("linear, sqrt, cosine, exponential"));
}

TEST(Config, TheWatchersTimeoutHasARange) {
  const Config config = parse_config(
      kSmall,
      "run.toml",
      {"comm.timeout_s=7.5", "comm.watcher=false"});
  EXPECT_EQ(config.comm.timeout_s, 7.5);
  EXPECT_FALSE(config.comm.watcher);
  EXPECT_TRUE(Config{}.comm.watcher);
  EXPECT_THAT(refused({"comm.timeout_s=0.5"}), HasSubstr("comm.timeout_s"));
}

TEST(Config, OverridesWinInOrder) {
  const Config config = parse_config(
      kSmall,
      "run.toml",
      {"training.steps=7",
       "training.steps=8",
       "optimizer.lr=1e-2",
       "run.output_dir=out/a=b",
       "data.train=\"quoted\"",
       "model.tie_embeddings=true",
       "model.rope_theta=500000"});
  EXPECT_EQ(config.training.steps, 8);
  EXPECT_EQ(config.optimizer.lr, 1e-2);
  EXPECT_EQ(config.run.output_dir, "out/a=b");
  EXPECT_EQ(
      config.data.train,
      (std::vector<data::SourceChoice>{{.path = "quoted"}}));
  EXPECT_EQ(config.model.tie_embeddings, true);
  EXPECT_EQ(config.model.rope_theta, 500000.0);
}

TEST(Config, PrintsItselfAndReadsItBack) {
  Config config = parse_config(
      kSmall,
      "run.toml",
      {"model.tie_embeddings=false",
       "optimizer.lr=0.1",
       "training.max_norm=3"});
  config.run.output_dir = "a \"b\" \\ c\n\x7f";
  const std::string text = to_toml(config);
  const Config back = parse_config(text, "saved");
  EXPECT_EQ(to_toml(back), text);
  EXPECT_EQ(back.run.output_dir, config.run.output_dir);
  EXPECT_EQ(back.optimizer.lr, 0.1);
  EXPECT_EQ(back.model.tie_embeddings, false);
  EXPECT_THAT(text, HasSubstr("\n[training]\nsteps = 600\n"));
  EXPECT_THAT(text, HasSubstr("# kv_heads is unset\n"));
  EXPECT_THAT(text, HasSubstr("max_norm = 3.0\n"));
}

TEST(Config, AResolvedConfigReadsBack) {
  const Config resolved = resolve_config(parse_config(kSmall, "run.toml"), 4);
  EXPECT_EQ(to_toml(parse_config(to_toml(resolved), "s")), to_toml(resolved));
}

TEST(Config, AValueWithoutAWordIsRefused) {
  Config config = parse_config(kSmall, "r");
  config.precision.main_params = at::kHalf;
  try {
    validate_config(config);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(
        error.message(),
        HasSubstr("precision.main_params expected one of float32, bfloat16"));
  }
}

TEST(Config, EveryKeyIsDescribedOnceAndReadable) {
  const std::string help = describe_config();
  std::set<std::string> names;
  for (const ConfigKey& key : config_keys()) {
    EXPECT_TRUE(names.emplace(key.full_name).second) << key.full_name;
    EXPECT_GT(key.help.size(), 5U) << key.full_name;
    EXPECT_THAT(help, HasSubstr(fmt::format("\n{} = ", key.name())));
    EXPECT_THAT(help, HasSubstr(std::string(key.help)));
  }
  for (const ConfigKey& key : config_keys()) {
    for (const UsedIf& used : key.used_if) {
      EXPECT_TRUE(names.contains(std::string(used.chooser))) << key.full_name;
    }
    for (const Conflict& conflict : key.conflicts) {
      for (const std::string_view name : conflict.with) {
        EXPECT_TRUE(names.contains(std::string(name))) << key.full_name;
      }
    }
  }
  // No two keys may point at one member.
  Config config;
  std::set<const void*> members;
  for (const ConfigKey& key : config_keys()) {
    std::visit(
        config::Overloaded{
            [&](const WordField& member) {
              auto words = member.words();
              if (words.empty()) {
                words = {"element", "block:4"};
              }
              if (key.full_name == "optimizer.ns_coefficients") {
                words = {"1, 2, 3", "3, 2, 1"};
              }
              const auto word = words[words[0] == member.get() ? 1 : 0];
              Config changed;
              std::get<WordField>(key.field(changed)).set(word);
              EXPECT_EQ(
                  differing_keys(changed, config),
                  fmt::format(
                      "  [{}] {} = \"{}\"",
                      key.section(),
                      key.name(),
                      word));
            },
            [&](auto* member) {
              EXPECT_TRUE(members.insert(member).second) << key.full_name;
            }},
        key.field(config));
  }
}

TEST(Config, UnknownNamesPointAtTheNearest) {
  EXPECT_EQ(
      refused_text("global_batchsize = 4\n"),
      "run.toml:14:20: section [training] has no key 'global_batchsize'; did "
      "you mean 'global_batch_size'?");
  EXPECT_EQ(
      refused_text("[trainin]\nsteps = 4\n"),
      "run.toml:14:1: unknown section [trainin]; did you mean [training]?");
  // A key of another section: that one is meant.
  EXPECT_THAT(
      refused_text("weight_decay = 4\n"),
      HasSubstr("did you mean 'optimizer.weight_decay'?"));
  EXPECT_THAT(
      message(ErrorCode::config, "steps = 3\n"),
      HasSubstr("run.toml:1:9: key 'steps' stands in no section"));
  EXPECT_THAT(
      message(ErrorCode::config, "training = 3\n"),
      HasSubstr("expected a section [training], got 3"));
  EXPECT_EQ(
      refused({"training.stesp=3"}),
      "--set training.stesp=3: section [training] has no key 'stesp'; did you "
      "mean 'steps'?");
  EXPECT_THAT(
      refused({"validation.steps=3"}),
      HasSubstr("has no key 'steps' any more; give 'sequences'"));
  EXPECT_THAT(
      refused({"traning.steps=3"}),
      HasSubstr("did you mean [training]?"));
}

TEST(Config, NamesOfOtherTrainersHaveHints) {
  for (const auto& [key, hint] :
       {std::pair{"training.epochs", "give training.steps, the number of"},
        {"training.num_train_epochs", "give training.steps, the number of"},
        {"training.learning_rate", "give optimizer.lr"},
        {"optimizer.learning_rate", "give optimizer.lr"},
        {"training.bf16", "give precision.compute = \"bfloat16\""},
        {"training.Per-Device-Train-Batch-Size", "give training.local_batch_"},
        {"training.gradient_accumulation_steps", "training.global_batch_size"},
        {"training.max_seq_len", "give training.seq_len"},
        {"model.base_model", "give model.init_from"},
        {"lora.lora_r", "give lora.rank"},
        {"job.dump_folder", "did you mean [run]?"},
        {"checkpointing.interval", "did you mean [checkpoint]?"}}) {
    EXPECT_THAT(refused({fmt::format("{}=1", key)}), HasSubstr(hint)) << key;
  }
  EXPECT_THAT(
      refused({"num_train_epochs=3"}),
      HasSubstr("expected --set section.key=value; give training.steps, "));
  EXPECT_THAT(
      message(ErrorCode::config, "learning_rate = 1e-4\n"),
      HasSubstr("and so on; give optimizer.lr"));
  EXPECT_THAT(
      message(ErrorCode::config, "weight_decay = 1e-4\n"),
      HasSubstr("and so on; give optimizer.weight_decay"));
  EXPECT_THAT(
      message(ErrorCode::config, "name = \"adamw\"\n"),
      HasSubstr("; give optimizer.name or lr_scheduler.name"));
}

// A hint names keys that there are, and no key of ours has another's name.
TEST(Config, HintsNameKeysThatThereAre) {
  std::set<std::string> names;
  std::set<std::string> sections;
  for (const ConfigKey& key : config_keys()) {
    names.insert(std::string(key.full_name));
    sections.insert(std::string(key.section()));
  }
  const std::regex key_pattern("([a-z0-9_]+)\\.([a-z0-9_]+)");
  int num_named = 0;
  for (const std::string& other : config::other_names()) {
    const std::string hint = config::hint_for_other_name(other);
    for (std::sregex_iterator i(hint.begin(), hint.end(), key_pattern), end;
         i != end;
         ++i) {
      if (sections.contains((*i)[1].str())) {
        EXPECT_TRUE(names.contains(i->str())) << other << ": " << hint;
        EXPECT_NE((*i)[2].str(), other);
        ++num_named;
      }
    }
  }
  EXPECT_GT(num_named, 150);
  for (const char* section : {"job", "train", "eval", "logging", "peft"}) {
    EXPECT_TRUE(
        sections.contains(std::string(config::section_for_other_name(section))))
        << section;
  }
}

TEST(Config, WithNothingNearTheMessageSaysWhatThereIs) {
  EXPECT_THAT(
      refused({"quantum.bits=3"}),
      AllOf(
          HasSubstr("unknown section [quantum]; there are [run], [model], "),
          HasSubstr("[debug]")));
  EXPECT_THAT(
      refused({"training.mask_prompts=true"}),
      HasSubstr("has no key 'mask_prompts'; its keys are steps, seq_len, "));
  EXPECT_THAT(
      refused({"lr_scheduler.warmup=3"}),
      HasSubstr("did you mean 'warmup_steps'?"));
}

TEST(Config, NumbersAsPeopleTypeThem) {
  const auto config = [](const std::vector<std::string>& overrides) {
    return parse_config(kSmall, "run.toml", overrides);
  };
  for (const char* text :
       {"1e3", "1_000", "+1000", "1000.0", "1000.", "01000"}) {
    EXPECT_EQ(
        config({fmt::format("training.steps={}", text)}).training.steps,
        1000)
        << text;
  }
  for (const char* text :
       {".001", "1e-3", "1.e-3", "+.001", "1E-3", "00.001"}) {
    EXPECT_EQ(
        config({fmt::format("optimizer.lr={}", text)}).optimizer.lr,
        0.001)
        << text;
  }
  for (const char* text : {"True", "TRUE", "true"}) {
    EXPECT_TRUE(
        config({fmt::format("profiling.enabled={}", text)}).profiling.enabled)
        << text;
  }
  for (const char* text : {"1e-1", "1.5", "1e30", ".", "e3", "1e", "--1", ""}) {
    EXPECT_THAT(
        refused({fmt::format("training.steps={}", text)}),
        HasSubstr("training.steps expected an integer"))
        << text;
  }
}

TEST(Config, ATildeIsTheHomeFolder) {
  const char* before = std::getenv("HOME");
  const std::string old = before == nullptr ? "/" : before;
  ::setenv("HOME", "/home/me", 1);
  const Config config = parse_config(
      kSmall,
      "run.toml",
      {"run.output_dir=~/run",
       "checkpoint.folder='~/checkpoints'",
       "model.init_from=~/hf",
       "profiling.folder=~",
       "profiling.enabled=true",
       "validation.freq=1",
       "data.train=[{ path = \"~/a\", weight = 1 }, { path = \"b~\", weight "
       "= 2 }]",
       "data.validation=~/v"});
  ::setenv("HOME", old.c_str(), 1);
  EXPECT_EQ(config.run.output_dir, "/home/me/run");
  EXPECT_EQ(config.checkpoint.folder, "/home/me/checkpoints");
  EXPECT_EQ(config.model.init_from, "/home/me/hf");
  EXPECT_EQ(config.profiling.folder, "/home/me");
  EXPECT_EQ(config.data.train.at(0).path, "/home/me/a");
  EXPECT_EQ(config.data.train.at(1).path, "b~");
  EXPECT_EQ(config.data.validation.at(0).path, "/home/me/v");
}

TEST(Config, TypesAreChecked) {
  EXPECT_EQ(
      refused_text("local_batch_size = \"4\"\n"),
      "run.toml:14:20: training.local_batch_size expected an integer, got "
      "'4'");
  EXPECT_THAT(
      refused_text("local_batch_size = 4.5\n"),
      HasSubstr("expected an integer, got 4.5"));
  EXPECT_THAT(
      refused_text("max_norm = true\n"),
      HasSubstr("training.max_norm expected a number, got true"));
  EXPECT_THAT(
      refused_text("[model]\n"),
      HasSubstr("run.toml:14:"));  // given twice
  EXPECT_THAT(
      refused_text("[run]\noutput_dir = 3\n"),
      HasSubstr("run.output_dir expected text in quotes, got 3"));
  EXPECT_THAT(
      refused_text("[profiling]\nenabled = 1\n"),
      HasSubstr("profiling.enabled expected true or false, got 1"));
  EXPECT_THAT(
      refused_text("max_norm = \n"),
      AllOf(StartsWith("run.toml:14:"), HasSubstr("not TOML")));
  EXPECT_EQ(
      refused({"training.steps=many"}),
      "--set training.steps=many: training.steps expected an integer, got "
      "'many'");
  EXPECT_THAT(
      refused({"training.steps=1.5"}),
      HasSubstr("expected an integer, got 1.5"));
  EXPECT_THAT(
      refused({"training.steps=1\nother=2"}),
      HasSubstr("expected one value"));
  for (const char* text : {"steps=3", "training.steps", "=", ""}) {
    EXPECT_THAT(refused({text}), HasSubstr("expected --set section.key=value"));
  }
}

TEST(Config, ChoicesAndRangesAreChecked) {
  EXPECT_THAT(
      refused({"precision.compute=bf16"}),
      HasSubstr("expected one of float32, bfloat16, got \"bf16\"; did you mean "
                "\"bfloat16\"?"));
  EXPECT_THAT(
      refused({"parallelism.strategy=zero4"}),
      HasSubstr("did you mean"));
  EXPECT_THAT(
      refused({"optimizer.name=adam"}),
      HasSubstr("did you mean \"adamw\"?"));
  EXPECT_THAT(
      refused({"lr_scheduler.name=cos"}),
      HasSubstr("linear, cosine, wsd"));
  EXPECT_THAT(
      refused({"activation_checkpoint.mode=some"}),
      HasSubstr("none, selective, full"));
  EXPECT_THAT(
      refused({"training.steps=0"}),
      HasSubstr(
          "training.steps expected a number in [1, 1000000000000], got 0"));
  EXPECT_THAT(
      refused({"lr_scheduler.min_lr_factor=1.5"}),
      HasSubstr("expected a number in [0, 1], got 1.5"));
  EXPECT_THAT(
      refused({"lr_scheduler.decay_ratio=-0.5"}),
      HasSubstr("lr_scheduler.decay_ratio expected"));
  EXPECT_THAT(refused({"optimizer.lr=nan"}), HasSubstr("got nan"));
  EXPECT_THAT(refused({"run.seed=-1"}), HasSubstr("run.seed expected"));
}

TEST(Config, ContradictionsAreNamed) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"optimizer.momentum=0.9"},
       "optimizer.momentum is set, but optimizer.name = \"adamw\" does not use "
       "it; it belongs to sgd"},
      {{"optimizer.name=sgd", "optimizer.beta2=0.99"},
       "optimizer.beta2 is set, but optimizer.name = \"sgd\""},
      {{"lr_scheduler.name=constant", "lr_scheduler.decay_ratio=0.5"},
       "lr_scheduler.decay_ratio is set, but lr_scheduler.name = "
       "\"constant\""},
      {{"lr_scheduler.warmup_steps=601"},
       "lr_scheduler.warmup_steps = 601 with training.steps = 600: the "
       "warm-up is longer"},
      {{"parallelism.strategy=optim_grads",
        "parallelism.reshard_after_forward=false"},
       "parallelism.reshard_after_forward is set, but parallelism.strategy = "
       "\"optim_grads\""},
      {{"parallelism.strategy=optim", "parallelism.memory_budget=40"},
       "parallelism.memory_budget is set, but parallelism.strategy = "
       "\"optim\""},
      {{"parallelism.reshard_after_forward=false",
        "parallelism.memory_budget=40"},
       "parallelism.memory_budget is set, but "
       "parallelism.reshard_after_forward = \"false\""},
      {{"parallelism.memory_budget=-1"}, "parallelism.memory_budget"},
      {{"parallelism.strategy=optim", "parallelism.post_forward_ranks=2"},
       "parallelism.post_forward_ranks is set, but parallelism.strategy = "
       "\"optim\""},
      {{"parallelism.reshard_after_forward=false",
        "parallelism.post_forward_ranks=2"},
       "parallelism.post_forward_ranks is set, but "
       "parallelism.reshard_after_forward = \"false\""},
      {{"parallelism.post_forward_ranks=1"},
       "parallelism.post_forward_ranks = 1: one rank has the full weights; set "
       "parallelism.reshard_after_forward = false"},
      {{"parallelism.post_forward_ranks=4",
        "parallelism.context_parallel_degree=2"},
       "parallelism.post_forward_ranks = 4: expected a divisor of "
       "parallelism.context_parallel_degree = 2"},
      {{"parallelism.post_forward_ranks=4",
        "parallelism.context_parallel_degree=4",
        kGathersKeys,
        "parallelism.context_parallel_a2a_degree=2"},
       "parallelism.post_forward_ranks = 4: expected a divisor of "
       "parallelism.context_parallel_a2a_degree = 2"},
      {{"parallelism.context_parallel_degree=4",
        kGathersKeys,
        "parallelism.context_parallel_a2a_degree=3"},
       "parallelism.context_parallel_a2a_degree = 3: expected a divisor of "
       "parallelism.context_parallel_degree = 4"},
      {{"parallelism.context_parallel_degree=2",
        kGathersKeys,
        "parallelism.context_parallel_a2a_degree=1",
        "training.seq_len=6"},
       "training.seq_len = 6: expected a multiple of 4, two chunks for each of "
       "the 2 groups"},
      {{"parallelism.context_parallel_degree=2",
        kGathersKeys,
        "parallelism.context_parallel_a2a_degree=1",
        "parallelism.context_parallel_comm=copies"},
       "context_parallel_a2a_degree = 1: no ranks exchange heads"},
      {{"parallelism.context_parallel_degree=4",
        "parallelism.context_parallel_method=a2a",
        "parallelism.context_parallel_a2a_degree=2"},
       "parallelism.context_parallel_a2a_degree is set, but "
       "parallelism.context_parallel_method = \"a2a\" does not use it; it "
       "belongs to \"a2a+all_gather\""},
      {{"parallelism.context_parallel_degree=4",
        "parallelism.context_parallel_a2a_degree=2"},
       "parallelism.context_parallel_a2a_degree is set, but "
       "parallelism.context_parallel_method = \"auto\" does not use it"},
      {{"parallelism.context_parallel_a2a_degree=1"},
       "parallelism.context_parallel_a2a_degree is set, but "
       "parallelism.context_parallel_degree"},
      {{"parallelism.post_forward_ranks=2", "float8.recipe=rowwise"},
       "parallelism.post_forward_ranks = 2 with float8.recipe = \"rowwise\""},
      {{"parallelism.strategy=optim", "parallelism.keep_compute_weights=false"},
       "parallelism.keep_compute_weights is set, but parallelism.strategy = "
       "\"optim\""},
      {{"parallelism.strategy=no_shard", "parallelism.copy_engines=all"},
       "parallelism.copy_engines is set, but parallelism.strategy = "
       "\"no_shard\""},
      {{"parallelism.strategy=optim_grads", "parallelism.copy_engines=forward"},
       "parallelism.copy_engines = \"forward\" with parallelism.strategy = "
       "\"optim_grads\": the strategy does not all-gather weights in forward"},
      {{"parallelism.copy_engines=forward",
        "parallelism.keep_compute_weights=false"},
       "parallelism.copy_engines = \"forward\" with "
       "parallelism.keep_compute_weights = false: compute weights are"},
      {{"parallelism.copy_engines=backward"}, "backward"},
      {{"parallelism.strategy=hsdp"},
       "parallelism.strategy = \"hsdp\" with "
       "parallelism.data_parallel_replicate_degree = 1: the strategy needs an "
       "outer axis"},
      {{"parallelism.data_parallel_replicate_degree=-1"},
       "parallelism.data_parallel_replicate_degree = -1 with "
       "parallelism.data_parallel_shard_degree = -1: only one of them can"},
      {{"parallelism.data_parallel_shard_degree=0"},
       "parallelism.data_parallel_shard_degree expected -1 or a number in "
       "[1, 1048576], got 0"},
      {{"parallelism.granularity=block:0"}, "got \"block:0\""},
      {{"parallelism.granularity=rows"}, "got \"rows\""},
      {{"training.global_batch_size=0"},
       "expected -1 or a number in [1, 1073741824], got 0"},
      {{"data.train="}, "data.train is missing"},
      {{"run.output_dir="}, "run.output_dir is empty"},
      {{"model.heads=5"},
       "model.heads = 5 with model.dim = 192: the width must be a multiple"},
      {{"model.kv_heads=4"},
       "model.kv_heads = 4 with model.heads = 6: the heads must be a "
       "multiple"},
      {{"model.max_seq_len=128"},
       "model.max_seq_len = 128 with training.seq_len = 256: the sequences"},
      {{"model.preset=a", "model.hf_config=b"}, "contradict each other"},
      {{"profiling.enabled=true", "profiling.step=601"},
       "profiling.enabled = true with profiling.step = 601 and training.steps "
       "= 600: the step comes after the last one"},
      {{"optimizer.beta1=1"}, "optimizer.beta1 must be below 1, got 1"},
      {{"optimizer.name=muon", "optimizer.beta2=1"},
       "optimizer.beta2 must be below 1, got 1"},
      {{"optimizer.name=muon", "optimizer.momentum=1"},
       "optimizer.momentum must be below 1, got 1"},
      {{"optimizer.eps=0"}, "optimizer.eps must be above 0, got 0"},
      {{"optimizer.name=muon", "optimizer.muon_eps=0"},
       "optimizer.muon_eps must be above 0, got 0"},
      {{"optimizer.name=sgd", "optimizer.offload_states=true"},
       "optimizer.offload_states = true with optimizer.momentum unset: SGD"},
      {{"activation_checkpoint.offload=true"},
       "it belongs to runs that recompute activations; set"},
      {{"activation_checkpoint.mode=full",
        "activation_checkpoint.offload=true",
        "parallelism.delay_wgrad=true"},
       "set offload, or both keys of [parallelism], to false"},
      {{"activation_checkpoint.mode=full",
        "activation_checkpoint.offload=true",
        "cuda_graph.impl=unit"},
       "set offload to false, or cuda_graph.impl to \"none\""},
      {{"checkpoint.keep_latest_k=2"},
       "checkpoint.keep_latest_k is set, but checkpoint.interval = \"0\""},
      {{"checkpoint.export_hf_at_end=true"},
       "checkpoint.export_hf_at_end is set, but checkpoint.interval"},
      {{"checkpoint.folder=../elsewhere"},
       "checkpoint.folder expected a folder below run.output_dir"},
      {{"checkpoint.folder="}, "or an absolute one, got \"\""},
      {{"weights.every=5"},
       "weights.every is set, but weights.send = \"\" does not use it"},
      {{"weights.send=node:30000"}, "weights.send expected a URL such as"},
      {{"weights.send=http://node:30000", "weights.timeout_s=300"},
       "weights.timeout_s = 300 expected less than comm.timeout_s = 300"},
      {{"weights.send=http://node:30000", "lora.rank=8"},
       "weights.send = \"http://node:30000\" with lora.rank = 8: adapters"},
      {{"training.on_nonfinite=rewind"},
       "training.on_nonfinite = \"rewind\" with checkpoint.interval = 0: a "
       "rewind requires checkpoints"},
      {{"cuda_graph.impl=full_iteration", "cuda_graph.modules=attn"},
       "\"full_iteration\" with cuda_graph.modules = \"attn\": the whole step"},
      {{"cuda_graph.impl=full_iteration", "parallelism.copy_engines=all"},
       "\"full_iteration\" with parallelism.copy_engines = \"all\": copies"},
      {{"cuda_graph.impl=full_iteration", "diagnostics.nan_check=true"},
       "\"full_iteration\" with diagnostics.nan_check"},
      {{"cuda_graph.impl=full_iteration", "diagnostics.overlap_check=true"},
       "diagnostics.overlap_check = true: this check hooks into the step"},
      {{"cuda_graph.impl=full_iteration", "diagnostics.poison=true"},
       "\"full_iteration\" with diagnostics.poison"},
      {{"cuda_graph.impl=full_iteration", "diagnostics.strict=true"},
       "\"full_iteration\" with diagnostics.strict"},
      {{"debug.emulate_graphs=true"},
       "debug.emulate_graphs is set, but cuda_graph.impl = \"none\""},
  };
  for (const auto& [overrides, expected] : cases) {
    EXPECT_THAT(refused(overrides), HasSubstr(expected));
  }
  EXPECT_THAT(
      message(ErrorCode::config, "[data]\ntrain = \"c\"\n[model]\ndim = 8\n"),
      HasSubstr("'layers' is missing"));
}

TEST(Config, WhatCudaGraphsDoNotGoWithIsNamed) {
  const std::string graphs = "cuda_graph.impl=unit";
  EXPECT_THAT(
      refused({graphs, "diagnostics.strict=true"}),
      HasSubstr("cuda_graph.impl = \"unit\" with diagnostics.strict = true"));
  const std::string selective = "activation_checkpoint.mode=selective";
  EXPECT_THAT(
      refused({graphs, selective}),
      HasSubstr(
          "with activation_checkpoint.mode = \"selective\": a block cannot be "
          "captured"));
  EXPECT_EQ(
      parse_config(
          kSmall,
          "run.toml",
          {graphs, selective, "cuda_graph.modules=attn"})
          .cuda_graph.modules,
      "attn");
  EXPECT_THAT(
      refused({graphs, "cuda_graph.modules=attn,moe"}),
      HasSubstr("cuda_graph.modules: moe is not recorded: "));
  EXPECT_THAT(
      refused({graphs, "cuda_graph.modules=attn,head"}),
      HasSubstr("cuda_graph.modules: expected a comma-separated list of attn, "
                "mlp, moe_router and moe_preprocess, or an empty value for "
                "full blocks; got 'head'"));
  EXPECT_THAT(
      refused({"cuda_graph.impl=layers"}),
      HasSubstr("cuda_graph.impl expected one of none, unit"));
  EXPECT_THAT(
      refused({"cuda_graph.modules=attn"}),
      HasSubstr("set cuda_graph.impl to unit"));
}

TEST(Config, WhatFullRecomputeSaves) {
  const std::string full = "activation_checkpoint.mode=full";
  const std::string save = "activation_checkpoint.save=";
  const auto parsed = [&](const std::string& value) {
    return parse_config(kSmall, "run.toml", {full, save + value})
        .activation_checkpoint;
  };
  EXPECT_TRUE(parsed("attention").saves_attention());
  EXPECT_TRUE(parsed("[\"attention\"]").saves_attention());
  EXPECT_FALSE(parsed("[]").saves_attention());
  const Config config =
      parse_config(kSmall, "run.toml", {full, save + "attention"});
  EXPECT_THAT(to_toml(config), HasSubstr("save = [\"attention\"]\n"));
  EXPECT_EQ(
      parse_config(to_toml(config), "again.toml").activation_checkpoint.save,
      config.activation_checkpoint.save);
  EXPECT_THAT(
      refused({full, save + "attn"}),
      HasSubstr("activation_checkpoint.save expected one of attention, got "
                "\"attn\""));
  EXPECT_THAT(
      refused({full, save + "[1]"}),
      HasSubstr("expected text in quotes, or a list of such texts, got"));
  EXPECT_THAT(
      refused({save + "attention"}),
      HasSubstr("it belongs to runs that recompute attention; set "
                "activation_checkpoint.mode to full"));
  EXPECT_THAT(
      refused(
          {full,
           save + "attention",
           "cuda_graph.impl=unit",
           "cuda_graph.modules=attn,mlp"}),
      HasSubstr("activation_checkpoint.save = [\"attention\"] with "
                "cuda_graph.modules = \"attn,mlp\""));
  EXPECT_THAT(
      refused({full, save + "attention", "parallelism.delay_wgrad=true"}),
      HasSubstr("blocks in pieces recompute attention with its piece"));
}

TEST(Config, WhatRecomputedBlocksDoNotGoWithIsNamed) {
  const std::string full = "activation_checkpoint.mode=full";
  const std::string layers = "activation_checkpoint.layers=";
  EXPECT_THAT(
      refused({layers + "1"}),
      HasSubstr("it belongs to runs that recompute activations"));
  EXPECT_THAT(refused({full, layers + "0"}), HasSubstr("layers"));
  EXPECT_THAT(
      refused({full, layers + "1", "parallelism.delay_wgrad=true"}),
      HasSubstr("blocks in pieces are all recomputed or none"));
  EXPECT_THAT(
      refused(
          {"activation_checkpoint.mode=selective",
           layers + "1",
           "activation_checkpoint.mlp_chunk_tokens=5"}),
      HasSubstr("chunks are recomputed in all blocks"));
}

TEST(Config, WhatFeedForwardChunksDoNotGoWithIsNamed) {
  const std::string full = "activation_checkpoint.mode=full";
  const std::string chunk = "activation_checkpoint.mlp_chunk_tokens=64";
  EXPECT_THAT(
      refused({chunk}),
      HasSubstr("it belongs to runs that recompute the feed-forward part; set "
                "activation_checkpoint.mode to selective or full"));
  EXPECT_THAT(
      refused(
          {full, chunk, "precision.compute=bfloat16", "float8.recipe=rowwise"}),
      HasSubstr("scales of FP8 activations would depend on the chunks"));
  EXPECT_THAT(
      refused({full, chunk, "lora.rank=4", "lora.dropout=0.1"}),
      HasSubstr("use lora.dropout = 0"));
  for (const char* modules : {"", "attn,mlp"}) {
    EXPECT_THAT(
        refused(
            {full,
             chunk,
             "cuda_graph.impl=unit",
             std::string("cuda_graph.modules=") + modules}),
        HasSubstr("a feed-forward part with recomputations inside cannot be "
                  "captured"));
  }
  for (const std::vector<std::string>& graphs :
       std::vector<std::vector<std::string>>{
           {"cuda_graph.impl=full_iteration"},
           {"cuda_graph.impl=unit", "cuda_graph.modules=attn"}}) {
    std::vector<std::string> keys{full, chunk};
    keys.insert(keys.end(), graphs.begin(), graphs.end());
    EXPECT_EQ(
        parse_config(kSmall, "run.toml", keys)
            .activation_checkpoint.mlp_chunk_tokens,
        64);
  }
}

TEST(Config, GoodGranularitiesAndPresets) {
  for (const char* text : {"element", "row", "tensor", "block:128"}) {
    parse_config(kSmall, "r", {std::string("parallelism.granularity=") + text});
  }
  const Config config = parse_config(
      "[data]\ntrain = \"random\"\n[model]\npreset = \"llama3_8b\"\n",
      "r");
  EXPECT_EQ(config.model.preset, "llama3_8b");
}

TEST(ResolveConfig, FillsInTheRest) {
  const Config config = parse_config(
      kSmall,
      "r",
      {"parallelism.data_parallel_replicate_degree=2",
       "training.local_batch_size=3"});
  const Config resolved = resolve_config(config, 8);
  EXPECT_EQ(resolved.parallelism.data_parallel_shard_degree, 4);
  EXPECT_EQ(resolved.training.global_batch_size, 24);
  const Config replicated = resolve_config(
      parse_config(
          kSmall,
          "r",
          {"parallelism.data_parallel_replicate_degree=-1",
           "parallelism.data_parallel_shard_degree=2",
           "parallelism.strategy=hsdp"}),
      6);
  EXPECT_EQ(replicated.parallelism.data_parallel_replicate_degree, 3);
}

TEST(ResolveConfig, RanksThatShareLayersReadTheSameSamples) {
  const Config resolved = resolve_config(
      parse_config(
          kSmall,
          "r",
          {"parallelism.tensor_parallel_degree=2",
           "parallelism.data_parallel_replicate_degree=2",
           "training.local_batch_size=3"}),
      8);
  EXPECT_EQ(resolved.parallelism.data_parallel_shard_degree, 2);
  EXPECT_EQ(resolved.training.global_batch_size, 12);
}

TEST(ResolveConfig, RanksThatShareSequencesReadTheSameSamples) {
  const Config resolved = resolve_config(
      parse_config(
          kSmall,
          "r",
          {"parallelism.context_parallel_degree=2",
           "parallelism.tensor_parallel_degree=2",
           "training.local_batch_size=3"}),
      16);
  EXPECT_EQ(resolved.parallelism.data_parallel_shard_degree, 4);
  EXPECT_EQ(resolved.training.global_batch_size, 12);
  EXPECT_EQ(resolved.parallelism.num_data_ranks(16), 4);
  EXPECT_EQ(resolved.parallelism.num_token_ranks(16), 8);
}

// Of 16 ranks.
Config gathering(
    std::int64_t context,
    std::int64_t tensor,
    std::int64_t ranks_per_host,
    std::vector<std::string> options = {kGathersKeys}) {
  options.push_back(
      fmt::format("parallelism.context_parallel_degree={}", context));
  options.push_back(
      fmt::format("parallelism.tensor_parallel_degree={}", tensor));
  return resolve_config(parse_config(kSmall, "r", options), 16, ranks_per_host);
}

TEST(ResolveConfig, RanksOfAHostExchangeHeads) {
  const auto head_ranks = [](auto... args) {
    return gathering(args...).parallelism.head_ranks();
  };
  EXPECT_EQ(head_ranks(8, 1, 4), 4);
  EXPECT_EQ(head_ranks(8, 2, 4), 2);
  EXPECT_EQ(head_ranks(4, 2, 2), 1);
  EXPECT_EQ(head_ranks(2, 4, 2), 1);
  EXPECT_EQ(head_ranks(4, 1, 6), 2);
  const std::string two = "parallelism.context_parallel_a2a_degree=2";
  using Options = std::vector<std::string>;
  EXPECT_EQ(head_ranks(8, 1, 0, Options{kGathersKeys, two}), 2);
  // The mesh is {edp, cp, etp}, so a host has 4 of the ranks of cp.
  const Options experts{
      kGathersKeys,
      "model.family=moe",
      "model.num_experts=8",
      "model.experts_per_token=2",
      "model.moe_ffn_dim=64",
      "parallelism.expert_parallel_degree=8",
      "parallelism.expert_tensor_parallel_degree=2"};
  EXPECT_EQ(head_ranks(8, 1, 8, experts), 4);
}

// A GPU has not measured the other method yet.
TEST(ResolveConfig, AllRanksExchangeHeadsUnlessAskedOtherwise) {
  for (const char* method : {"auto", "a2a"}) {
    for (const std::int64_t ranks_per_host : {0, 1, 4, 16}) {
      const config::Parallelism p =
          gathering(
              8,
              1,
              ranks_per_host,
              {fmt::format("parallelism.context_parallel_method={}", method)})
              .parallelism;
      EXPECT_EQ(p.head_ranks(), 8);
      EXPECT_EQ(p.context_parallel_a2a_degree, 0);
    }
  }
}

TEST(ResolveConfig, GatheringKeysNeedsSeveralGroupsOfHeads) {
  const auto refused = [](std::int64_t ranks_per_host,
                          const std::vector<std::string>& options) {
    try {
      gathering(8, 1, ranks_per_host, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::config);
      return error.message();
    }
    return std::string("accepted");
  };
  for (const std::int64_t ranks_per_host : {8, 16, 32}) {
    EXPECT_THAT(
        refused(ranks_per_host, {kGathersKeys}),
        HasSubstr("expected fewer ranks that exchange heads than "
                  "context_parallel_degree = 8, got all of them; use \"a2a\""));
  }
  EXPECT_THAT(
      refused(4, {kGathersKeys, "parallelism.context_parallel_a2a_degree=8"}),
      HasSubstr("got all of them"));
  EXPECT_THAT(
      refused(1, {kGathersKeys, "parallelism.context_parallel_comm=copies"}),
      HasSubstr("no ranks exchange heads"));
  EXPECT_THAT(
      refused(0, {kGathersKeys}),
      HasSubstr("found none; set parallelism.context_parallel_a2a_degree"));
}

TEST(ResolveConfig, ErrorsShowBothSides) {
  const auto refused_at = [](std::int64_t world,
                             const std::vector<std::string>& overrides) {
    const Config config = parse_config(kSmall, "r", overrides);
    try {
      resolve_config(config, world);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::config);
      return error.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(
      refused_at(
          4,
          {"parallelism.data_parallel_replicate_degree=2",
           "parallelism.data_parallel_shard_degree=3"}),
      HasSubstr("= 2 * 3 must be the number of ranks, 4"));
  EXPECT_THAT(
      refused_at(
          4,
          {"parallelism.tensor_parallel_degree=2",
           "parallelism.data_parallel_shard_degree=4"}),
      HasSubstr("= 1 * 4 must be the number of ranks, 4 / "
                "tensor_parallel_degree = 2"));
  EXPECT_THAT(
      refused_at(
          8,
          {"parallelism.tensor_parallel_degree=2",
           "parallelism.context_parallel_degree=2",
           "parallelism.data_parallel_shard_degree=4"}),
      HasSubstr("= 1 * 4 must be the number of ranks, 8 / "
                "tensor_parallel_degree = 2 / context_parallel_degree = 2"));
  EXPECT_THAT(
      refused_at(
          8,
          {"parallelism.context_parallel_degree=8",
           "parallelism.expert_parallel_degree=2"}),
      HasSubstr("parallelism.expert_parallel_degree = 2 must divide "
                "data_parallel_shard_degree = 1 of 8 ranks, or be a multiple "
                "of context_parallel_degree = 8"));
  EXPECT_THAT(
      refused_at(
          6,
          {"parallelism.context_parallel_degree=2",
           "parallelism.expert_parallel_degree=4"}),
      HasSubstr("parallelism.expert_parallel_degree = 4 / "
                "context_parallel_degree = 2 must divide "
                "data_parallel_shard_degree = 3 of 6 ranks"));
  EXPECT_THAT(
      refused_at(6, {"parallelism.context_parallel_degree=4"}),
      HasSubstr("parallelism.context_parallel_degree = 4: expected a divisor "
                "of the 6 ranks"));
  EXPECT_THAT(
      refused_at(6, {"parallelism.tensor_parallel_degree=4"}),
      HasSubstr("parallelism.tensor_parallel_degree = 4: expected a divisor of "
                "the 6 ranks"));
  EXPECT_THAT(
      refused_at(5, {"parallelism.data_parallel_replicate_degree=2"}),
      HasSubstr(
          "5 ranks cannot be divided by data_parallel_replicate_degree = 2"));
  EXPECT_THAT(
      refused_at(
          4,
          {"training.global_batch_size=10", "training.local_batch_size=2"}),
      HasSubstr("training.global_batch_size = 10 must be a multiple of "
                "local_batch_size * ranks = 2 * 4"));
  EXPECT_THAT(
      refused_at(
          2,
          {"parallelism.strategy=hsdp",
           "parallelism.data_parallel_replicate_degree=-1",
           "parallelism.data_parallel_shard_degree=2"}),
      HasSubstr("needs an outer axis"));
}

TEST(Config, FilesAreReadAndSaved) {
  const auto folder = std::filesystem::temp_directory_path() /
                      fmt::format("flatshard-config-{}", ::getpid());
  Config config = parse_config(kSmall, "r");
  config.run.output_dir = (folder / "deep/run").string();
  const auto saved = save_config(config.run.output_dir, to_toml(config));
  EXPECT_EQ(saved, folder / "deep/run/config.toml");
  EXPECT_EQ(to_toml(load_config(saved)), to_toml(config));
  std::filesystem::remove_all(folder);
  try {
    load_config("/none/run.toml");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_THAT(
        error.message(),
        HasSubstr("cannot read the config /none/run.toml"));
  }
}

// Each of them would be an error if the file itself had it.
TEST(Config, OverridesSwitchFeaturesOff) {
  const std::string file = R"(
[model]
preset = "llama3_8b"
[data]
train = "corpus"
validation = "other"
[training]
steps = 700
on_nonfinite = "rewind"
[lr_scheduler]
name = "wsd"
warmup_steps = 30
min_lr_factor = 0.05
[optimizer]
beta2 = 0.9
[validation]
freq = 100
sequences = 20
[checkpoint]
interval = 50
keep_latest_k = 3
)";
  const auto notes_of = [&](const std::vector<std::string>& overrides) {
    std::vector<std::string> notes;
    const Config config = parse_config(file, "run.toml", overrides, &notes);
    // A config.toml that is written is a config like any other.
    parse_config(to_toml(config), "config.toml");
    return fmt::format("{}", fmt::join(notes, "\n"));
  };
  EXPECT_EQ(notes_of({}), "");
  EXPECT_EQ(notes_of({"training.steps=70"}), "");
  EXPECT_EQ(
      notes_of({"validation.freq=0"}),
      "data.validation = \"other\" is not used, since --set validation.freq=0\n"
      "validation.sequences = 20 is not used, since --set validation.freq=0");
  EXPECT_EQ(
      notes_of({"lr_scheduler.name=constant"}),
      "lr_scheduler.min_lr_factor = 0.05 is not used, since --set "
      "lr_scheduler.name=constant");
  EXPECT_EQ(
      notes_of({"optimizer.name=sgd"}),
      "optimizer.beta2 = 0.9 is not used, since --set optimizer.name=sgd");
  EXPECT_EQ(
      notes_of({"checkpoint.interval=0"}),
      "checkpoint.keep_latest_k = 3 is not used, since --set "
      "checkpoint.interval=0\n"
      "training.on_nonfinite = \"stop\" instead of \"rewind\", since --set "
      "checkpoint.interval=0 leaves nothing to rewind to");
  // A decay lasts a fifth of the steps.
  EXPECT_EQ(
      notes_of({"training.steps=10"}),
      "lr_scheduler.warmup_steps = 8 instead of 30, since --set "
      "training.steps=10");
  EXPECT_EQ(
      notes_of({"training.steps=3", "profiling.enabled=true"}),
      "lr_scheduler.warmup_steps = 2 instead of 30, since --set "
      "training.steps=3\n"
      "profiling.step = 3 instead of 5, since there are no more "
      "training.steps");
  // A user who sets both means something else.
  EXPECT_THROW(
      notes_of({"validation.freq=0", "validation.sequences=2"}),
      Error);
  EXPECT_THROW(
      notes_of({"training.steps=5", "lr_scheduler.warmup_steps=6"}),
      Error);
}

}  // namespace
}  // namespace flatshard
