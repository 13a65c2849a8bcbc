#include "flatshard/checkpoint/weights_file.h"

#include "flatshard/checkpoint/init_weights.h"
#include "flatshard/comm/collective_log.h"
#include "flatshard/core/error.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/group/weight_write.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

#include <ATen/ATen.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::unique_ptr<ParamGroup> make_group(
    const std::shared_ptr<Mesh>& mesh,
    const std::string& strategy,
    const std::string& prefix,
    Precision precision = {}) {
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = prefix,
          .parameters =
              {{.names = {prefix + "weight", "tied." + prefix},
                .shape = {9, 5},
                .init = InitSpec::normal(0, 1)},
               {.names = {prefix + "scale"},
                .shape = {},
                .init = InitSpec::uniform(0, 1)},
               {.names = {prefix + "bias"},
                .shape = {33},
                .init = InitSpec::normal(0, 1)}},
          .mesh = mesh,
          .strategy = Strategy::named(strategy, mesh->num_axes())},
      ParamGroupOptions{.precision = precision},
      Initializer(4));
}

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

at::Tensor initial(const char* name, std::vector<std::int64_t> shape) {
  const at::Tensor values = at::empty(shape);
  Initializer(4).fill(
      values,
      name,
      std::string_view(name).ends_with("scale") ? InitSpec::uniform(0, 1)
                                                : InitSpec::normal(0, 1),
      0);
  return values;
}

TEST(SaveWeights, TheFileIsTheSameForAllStrategiesAndRanks) {
  const TempFolder folder;
  struct Case {
    std::string strategy;
    std::vector<MeshAxis> axes;
    int world;
  };
  std::vector<std::string> files;
  for (const Case& c : std::vector<Case>{
           {"zero0", {{"dp", 2}}, 2},
           {"zero1", {{"dp", 2}}, 2},
           {"zero3", {{"dp", 1}}, 1},
           {"zero3", {{"dp", 2}}, 2},
           {"hfsdp", {{"outer", 1}, {"dp", 2}}, 2},
           {"hfsdp", {{"outer", 2}, {"dp", 2}}, 4}}) {
    const auto path =
        folder / fmt::format("{}_{}.safetensors", c.strategy, c.world);
    run_ranks(c.world, [&](RankContext& context) {
      const auto mesh = context.mesh(c.axes);
      const auto a = make_group(mesh, c.strategy, "a.");
      const auto b = make_group(mesh, c.strategy, "b.");
      save_weights({a.get(), b.get()}, path, {{"format", "pt"}});
    });
    files.push_back(read(path));
    EXPECT_EQ(files.back(), files.front()) << c.strategy << " " << c.world;
  }

  const WeightsFile file(folder / "zero3_2.safetensors");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  const at::Tensor weight = at::empty({9, 5});
  file.read("b.weight", weight);
  EXPECT_TRUE(weight.equal(initial("b.weight", {9, 5})));
  const at::Tensor scale = at::empty({});
  file.read("a.scale", scale);
  EXPECT_TRUE(scale.equal(initial("a.scale", {})));
  const at::Tensor bias = at::empty({33}, at::kBFloat16);
  file.read("a.bias", bias);
  EXPECT_TRUE(bias.equal(initial("a.bias", {33}).to(at::kBFloat16)));
}

TEST(SaveWeights, B33_RanksWithoutAPieceSaveToo) {
  const TempFolder folder;
  const auto path = folder / "w.safetensors";
  run_ranks(5, [&](RankContext& context) {
    std::vector<GroupParameter> parameters;
    for (const char* name : {"a", "b"}) {
      parameters.push_back(
          {.names = {name},
           .shape = {3},
           .placement = {.granularity = Granularity::tensor()},
           .init = InitSpec::normal(0, 1)});
    }
    parameters.push_back({.names = {"empty"}, .shape = {0, 2}});
    const ParamGroup group(
        {.name = "few",
         .parameters = std::move(parameters),
         .mesh = context.mesh(),
         .strategy = Strategy::named("zero3", 1)},
        {},
        Initializer(4));
    save_weights({&group}, path);
  });
  for (const char* name : {"a", "b"}) {
    const at::Tensor values = at::empty({3});
    WeightsFile(path).read(name, values);
    EXPECT_TRUE(values.equal(initial(name, {3}))) << name;
  }
  WeightsFile(path).read("empty", at::empty({0, 2}));
}

TEST(SaveWeights, NarrowMainWeightsKeepTheirDtype) {
  const TempFolder folder;
  const auto path = folder / "w.safetensors";
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto group = make_group(
        Mesh::single(at::kCPU),
        "zero3",
        "a.",
        {.compute = dtype, .main_params = dtype});
    save_weights({group.get()}, path);
    const at::Tensor weight = at::empty({9, 5});
    WeightsFile(path).read("a.weight", weight);
    EXPECT_TRUE(
        weight.equal(initial("a.weight", {9, 5}).to(dtype).to(at::kFloat)));
  }
}

TEST(SaveWeights, RenamesWhatTheFileCallsOtherwise) {
  const TempFolder folder;
  const auto path = folder / "w.safetensors";
  const auto group = make_group(Mesh::single(at::kCPU), "zero3", "a.");
  using Shape = std::vector<std::int64_t>;
  const at::Tensor buffer = at::arange(3, at::kFloat);
  save_weights(
      {group.get()},
      path,
      {},
      [](const std::string& name, const Shape& shape) {
        return std::vector<StoredEntry>{{"model." + name, shape}};
      },
      {{"buffer", buffer}});
  const at::Tensor bias = at::empty({33});
  WeightsFile(path).read("model.a.bias", bias);
  EXPECT_TRUE(bias.equal(initial("a.bias", {33})));
  const at::Tensor again = at::empty({3});
  WeightsFile(path).read("buffer", again);
  EXPECT_TRUE(again.equal(buffer));
}

TEST(SaveWeights, AParameterMayBeSeveralEntries) {
  const TempFolder folder;
  const auto path = folder / "model.safetensors";
  const auto group = make_group(Mesh::single(at::kCPU), "zero3", "a.");
  using Shape = std::vector<std::int64_t>;
  // Three rows of 11 instead of 33 elements.
  const StoredEntriesOf entries_of = [](const std::string& name,
                                        const Shape& shape) {
    std::vector<StoredEntry> entries{{name, shape}};
    if (name == "a.bias") {
      entries = {{"b.0", {11}}, {"b.1", {2, 5}}, {"b.2", {12}}};
    }
    return entries;
  };
  save_weights({group.get()}, path, {}, entries_of);
  const at::Tensor whole = initial("a.bias", {33});
  const at::Tensor part = at::empty({2, 5});
  WeightsFile(path).read("b.1", part);
  EXPECT_TRUE(part.flatten().equal(whole.narrow(0, 11, 10)));

  const auto other = make_group(Mesh::single(at::kCPU), "zero3", "a.");
  const at::NoGradGuard no_grad;
  other->weights().main().local().zero_();
  init_weights(folder.path(), {other.get()}, {.entries_of = entries_of});
  EXPECT_TRUE(
      other->weights().main().local().equal(group->weights().main().local()));
}

TEST(WeightsFile, B35_ErrorsNameTensorAndFile) {
  const TempFolder folder;
  const auto path = folder / "w.safetensors";
  const auto group = make_group(Mesh::single(at::kCPU), "zero3", "a.");
  save_weights({group.get()}, path);
  const WeightsFile file(path);
  const auto message = [&](const std::string& name, at::Tensor out) {
    try {
      file.read(name, out);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::format);
      return error.message();
    }
    ADD_FAILURE();
    return std::string();
  };
  EXPECT_THAT(message("a.weigth", at::empty({9, 5})), HasSubstr("a.weight"));
  EXPECT_THAT(
      message("a.weight", at::empty({5, 9})),
      AllOf(HasSubstr("a.weight"), HasSubstr("[9, 5]"), HasSubstr("[5, 9]")));
  EXPECT_THROW(save_weights({}, path), Error);
  try {
    save_weights({group.get()}, "/none/w.safetensors");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
  }
}

// Peers may copy weights until a fence ends that.
TEST(InitWeights, WaitsForPeersThatCopyWeights) {
  const TempFolder folder;
  run_ranks(2, [&](RankContext& context) {
    const auto mesh = context.mesh();
    ParamGroup group(
        {.name = "group",
         .parameters =
             {{.names = {"weight"},
               .shape = {9, 5},
               .init = InitSpec::normal(0, 1)}},
         .mesh = mesh,
         .strategy = Strategy::named("zero3", 1),
         .peers_read = true},
        {.precision = Precision::full()},
        Initializer(4));
    save_weights({&group}, folder / "model.safetensors");
    mesh->world().barrier();
    // An evaluation: copies without a reduction after them.
    const at::Tensor whole = at::empty({group.layout().numel()});
    group.weights().gather(
        kComputePlane,
        kWhole,
        whole,
        group.weights().plan_gather(/*from_peers=*/true));
    const auto num_fences = [&] {
      std::int64_t n = 0;
      for (const CollectiveRecord& record : context.log->records()) {
        n += record.kind == CollectiveKind::fence;
      }
      return n;
    };
    const std::int64_t before = num_fences();
    mesh->world().barrier();
    init_weights(
        folder.path(),
        {&group},
        {.entries_of = [](const std::string& name,
                          const std::vector<std::int64_t>& shape) {
          return std::vector<StoredEntry>{{name, shape}};
        }});
    mesh->world().barrier();
    EXPECT_GT(num_fences(), before);
  });
}

/// A folder with tensors "a.bias" [33] and others of one dimension.
void write_folder(
    const TempFolder& folder,
    const std::vector<std::string>& names) {
  std::vector<SafetensorsSpec> specs;
  for (const std::string& name : names) {
    specs.push_back({name, "F32", {33}});
  }
  SafetensorsWriter writer(folder / "model.safetensors", specs);
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::vector<float> values(33, static_cast<float>(i + 1));
    writer.write(names[i], std::as_bytes(std::span(values)));
  }
  writer.finish();
}

std::unique_ptr<ParamGroup> group_of_one(
    const std::shared_ptr<Mesh>& mesh,
    const std::vector<std::string>& names) {
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "one",
          .parameters = {{.names = names, .shape = {33}}},
          .mesh = mesh,
          .strategy = Strategy::named("zero3", 1)},
      ParamGroupOptions{},
      Initializer(4));
}

bool all_equal(const ParamGroup& group, double value) {
  return group.weights()
      .main()
      .local()
      .narrow(0, 0, 33)
      .eq(value)
      .all()
      .item<bool>();
}

StoredEntriesOf same_names() {
  return [](const std::string& name, const std::vector<std::int64_t>& shape) {
    return std::vector<StoredEntry>{{name, shape}};
  };
}

TEST(InitWeights, WhatIsNotUsedComesBackByName) {
  const TempFolder folder;
  write_folder(folder, {"a", "rotary.inv_freq", "tower.x"});
  const auto group = group_of_one(Mesh::single(at::kCPU), {"a"});
  InitWeightsOptions options{.entries_of = same_names()};
  const auto init = [&] {
    return init_weights(folder.path(), {group.get()}, options);
  };
  EXPECT_THAT(
      message_of(init),
      AllOf(
          HasSubstr("the model has no parameter for tensor 'rotary.inv_freq', "
                    "'tower.x'"),
          HasSubstr("checkpoint.exclude = \"rotary.inv_freq\"")));
  options.unneeded = [](const std::string& name, std::size_t num_dims) {
    return name == "rotary.inv_freq" && num_dims == 1;
  };
  EXPECT_THAT(
      message_of(init),
      HasSubstr("the model has no parameter for "
                "tensor 'tower.x'"));
  options.exclude = {"tower.*"};
  EXPECT_THAT(init().names, ElementsAre("rotary.inv_freq", "tower.x"));
  EXPECT_TRUE(all_equal(*group, 1));
  // An excluded parameter keeps its values.
  group->weights().main().local().fill_(7);
  group->weights().adopt_foreign_writes();
  options.exclude = {"tower.*", "a"};
  EXPECT_THAT(init().names, ElementsAre("a", "rotary.inv_freq", "tower.x"));
  EXPECT_TRUE(all_equal(*group, 7));
}

TEST(InitWeights, OfATiedParameterTheMainNameCounts) {
  const TempFolder folder;
  write_folder(folder, {"head", "embedding"});
  const auto group =
      group_of_one(Mesh::single(at::kCPU), {"embedding", "head"});
  const auto init = [&] {
    return init_weights(
        folder.path(),
        {group.get()},
        {.entries_of = same_names()});
  };
  EXPECT_THAT(init().other_values, ElementsAre("head"));
  EXPECT_TRUE(all_equal(*group, 2));
  const TempFolder without;
  write_folder(without, {"head"});
  const UnusedWeights one =
      init_weights(without.path(), {group.get()}, {.entries_of = same_names()});
  EXPECT_THAT(one.other_values, ElementsAre());
  EXPECT_TRUE(all_equal(*group, 1));
}

}  // namespace
}  // namespace flatshard::testing
