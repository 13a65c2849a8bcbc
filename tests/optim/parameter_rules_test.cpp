// Which parameter group a parameter belongs to.
#include "flatshard/optim/parameter_rules.h"

#include "flatshard/core/error.h"
#include "tests/support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::unique_ptr<ParamGroup> group_of(std::vector<GroupParameter> parameters) {
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "block",
          .parameters = std::move(parameters),
          .mesh = Mesh::single(at::kCPU),
          .strategy = Strategy::named("zero3", 1)},
      ParamGroupOptions{},
      Initializer(0));
}

// Returns an attention with a norm, and an embedding that is also the head.
std::vector<std::unique_ptr<ParamGroup>> model() {
  std::vector<std::unique_ptr<ParamGroup>> groups;
  groups.push_back(group_of(
      {{.names = {"layers.0.attention.qkv.weight"}, .shape = {24, 8}},
       {.names = {"layers.0.attention.qkv.bias"}, .shape = {24}},
       {.names = {"layers.0.norm.weight"}, .shape = {8}},
       {.names = {"layers.0.experts.up_bias"}, .shape = {4, 8}}}));
  groups.push_back(
      group_of({{.names = {"embed.weight", "head.weight"}, .shape = {10, 8}}}));
  return groups;
}

std::vector<ParamGroup*> pointers(
    const std::vector<std::unique_ptr<ParamGroup>>& groups) {
  std::vector<ParamGroup*> all;
  for (const auto& group : groups) {
    all.push_back(group.get());
  }
  return all;
}

// Returns the title of the group of each parameter.
std::vector<std::string> titles(const ParameterRules& rules) {
  const auto groups = model();
  const ParameterGroups found = parameter_groups(pointers(groups), rules);
  std::vector<std::string> titles;
  for (const auto& of_group : found.of_parameters) {
    for (const std::size_t index : of_group) {
      titles.push_back(found.groups.at(index).title);
    }
  }
  return titles;
}

std::string message(const ParameterRules& rules) {
  try {
    titles(rules);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config);
    return error.message();
  }
  ADD_FAILURE() << "expected an error";
  return {};
}

TEST(ParameterRules, TheFirstMatchWins) {
  EXPECT_THAT(
      titles({.rules = {{.pattern = "bias$"}, {.pattern = "qkv|norm"}}}),
      ElementsAre("qkv|norm", "bias$", "qkv|norm", "bias$", "the rest"));
  EXPECT_THAT(
      titles({.rules = {{.pattern = "qkv|norm"}, {.pattern = "bias$"}}}),
      ElementsAre("qkv|norm", "qkv|norm", "qkv|norm", "bias$", "the rest"));
}

TEST(ParameterRules, EveryNameOfAParameterIsSearched) {
  for (const char* pattern : {"^embed", "^head"}) {
    EXPECT_EQ(titles({.rules = {{.pattern = pattern}}}).back(), pattern);
  }
}

TEST(ParameterRules, OnlyMatricesDecay) {
  EXPECT_THAT(
      titles({.rules = {{.pattern = "norm"}}, .decay = Decay::matrices}),
      ElementsAre(
          "the rest",
          "the rest, no decay",
          "norm, no decay",
          "the rest, no decay",
          "the rest"));
  const auto groups = model();
  for (const Decay decay : {Decay::all, Decay::matrices}) {
    const ParameterGroups found = parameter_groups(
        pointers(groups),
        {.rest = {.weight_decay = 0.5}, .decay = decay});
    const auto decay_of = [&](std::size_t group, std::size_t parameter) {
      return found.groups[found.of_parameters[group][parameter]]
          .values.weight_decay;
    };
    EXPECT_EQ(decay_of(0, 0), 0.5);
    EXPECT_EQ(decay_of(0, 1), decay == Decay::all ? 0.5 : 0.0);
    EXPECT_EQ(decay_of(1, 0), 0.5);
  }
}

TEST(ParameterRules, MultipliersActOnTheRestsValues) {
  const auto groups = model();
  const ParameterGroups found = parameter_groups(
      pointers(groups),
      {.rest = {.lr_mult = 2, .weight_decay = 0.5, .beta1 = 0.7},
       .rules = {
           {.pattern = "embed", .lr_mult = 0.5, .wd_mult = 4, .beta2 = 0.6}}});
  ASSERT_EQ(found.groups.size(), 2U);
  const ParameterGroupValues& embed = found.groups[0];
  EXPECT_EQ(
      embed.values,
      (ParameterValues{
          .lr_mult = 1,
          .weight_decay = 2,
          .beta1 = 0.7,
          .beta2 = 0.6}));
  EXPECT_EQ(embed.num_parameters, 1);
  EXPECT_EQ(embed.numel, 80);
  EXPECT_EQ(found.groups[1].num_parameters, 4);
  EXPECT_EQ(found.groups[1].numel, 24 * 8 + 24 + 8 + 32);
  EXPECT_THAT(
      found.table(),
      AllOf(
          HasSubstr("group     parameters         elements  values\n"),
          HasSubstr("embed              1               80  adamw, lr x 1, "
                    "weight decay 2, betas 0.7 and 0.6, eps 1e-08\n"),
          HasSubstr("the rest           4              256  adamw, lr x 2")));
}

// Entries are Hugging Face's names of what is one parameter here.
TEST(ParameterRules, AFusedParameterIsMatchedAsAWhole) {
  const auto rules = [](const std::string& pattern) {
    return ParameterRules{
        .rules = {{.pattern = pattern}},
        .entry_names = [](const GroupParameter& p) {
          return p.names[0].find("qkv.weight") == std::string::npos
                     ? std::vector<std::string>()
                     : std::vector<std::string>{
                           "model.layers.0.q_proj.weight",
                           "model.layers.0.k_proj.weight"};
        }};
  };
  EXPECT_THAT(
      titles(rules("[qk]_proj")),
      ElementsAre("[qk]_proj", "the rest", "the rest", "the rest", "the rest"));
  EXPECT_THAT(
      message(rules("k_proj")),
      AllOf(
          HasSubstr("pattern \"k_proj\" matches model.layers.0.k_proj.weight "
                    "but not model.layers.0.q_proj.weight"),
          HasSubstr("part of parameter layers.0.attention.qkv.weight")));
  EXPECT_THAT(
      message(rules("v_porj")),
      HasSubstr("Names near it: model.layers.0.k_proj.weight, "
                "model.layers.0.q_proj.weight"));
}

// The final norm of a model belongs to the head and has another name there.
TEST(ParameterRules, ASingleEntryReplacesTheMainName) {
  const auto rules = [](const std::string& pattern) {
    return ParameterRules{
        .rules = {{.pattern = pattern}},
        .entry_names = [](const GroupParameter& p) {
          return std::vector<std::string>{
              p.names[0] == "embed.weight" ? "wte.weight" : p.names[0]};
        }};
  };
  for (const char* pattern : {"wte", "head"}) {
    EXPECT_EQ(titles(rules(pattern)).back(), pattern);
  }
  EXPECT_THAT(message(rules("embed")), HasSubstr("matches no parameter"));
}

TEST(ParameterRules, APatternWithoutAMatchIsAnError) {
  EXPECT_THAT(
      message({.rules = {{.pattern = "."}, {.pattern = "nrom\\.weight"}}}),
      AllOf(
          HasSubstr("pattern \"nrom\\.weight\" matches no parameter"),
          HasSubstr("Names near it: layers.0.norm.weight, ")));
}

TEST(ParameterRules, APatternWithoutAnEffectIsAnError) {
  EXPECT_THAT(
      message({.rules = {{.pattern = "."}, {.pattern = "norm"}}}),
      HasSubstr(
          "pattern \"norm\" matches only parameters of groups before it"));
  EXPECT_THAT(
      titles({.rules = {{.pattern = "norm"}, {.pattern = "."}}}),
      ElementsAre(".", ".", "norm", ".", "."));
}

// The matrix of the model's attention is the only one that Muon updates.
ParameterRules muon_rules(Algorithm rest, ParameterRule rule) {
  return {
      .rest = {.algorithm = rest},
      .rules = {std::move(rule)},
      .muon = {.matrices_of = [](const GroupParameter& p) {
        return p.names.front().ends_with("qkv.weight")
                   ? one_matrix(p)
                   : std::vector<MatrixShape>();
      }}};
}

TEST(ParameterRules, ARuleOfMuonWithoutAnEffectIsAnError) {
  const auto refused = [](Algorithm rest, ParameterRule rule) {
    return message(muon_rules(rest, std::move(rule)));
  };
  EXPECT_THAT(
      refused(
          Algorithm::adamw,
          {.pattern = "embed", .algorithm = Algorithm::muon}),
      HasSubstr("pattern \"embed\" sets name = \"muon\", but matches only "
                "parameters that Muon does not update"));
  EXPECT_THAT(
      refused(Algorithm::muon, {.pattern = "norm", .momentum = 0.5}),
      HasSubstr("pattern \"norm\" sets momentum, but matches only parameters "
                "that AdamW updates"));
  EXPECT_THAT(
      refused(Algorithm::muon, {.pattern = "qkv.weight", .beta2 = 0.5}),
      HasSubstr("pattern \"qkv.weight\" sets beta1, beta2 or eps, but matches "
                "only matrices that Muon updates"));
  EXPECT_THAT(
      titles(muon_rules(
          Algorithm::muon,
          {.pattern = "qkv", .beta2 = 0.5, .momentum = 0.5})),
      ElementsAre(
          "qkv",
          "qkv, no matrices",
          "the rest, no matrices",
          "the rest, no matrices",
          "the rest, no matrices"));
}

TEST(ParameterRules, ErrorsNameThePattern) {
  EXPECT_THAT(
      message({.rules = {{.pattern = "("}}}),
      HasSubstr("pattern \"(\" is not a regular expression"));
  EXPECT_THAT(
      message({.rules = {{.pattern = ""}}}),
      HasSubstr("expected a pattern, got an empty one"));
  EXPECT_THAT(
      message({.rules = {{.pattern = ".", .beta2 = 1.0}}}),
      HasSubstr("optimizer.beta2"));
  EXPECT_THAT(
      message({.rules = {{.pattern = ".", .lr_mult = -1}}}),
      HasSubstr("lr_mult -1"));
}

}  // namespace
}  // namespace flatshard::testing
