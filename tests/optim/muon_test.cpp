#include "flatshard/optim/muon/muon.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Version.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "flatshard/core/error.h"
#include "flatshard/optim/muon/newton_schulz.h"
#include "flatshard/optim/optimizer.h"
#include "tests/support/ranks.h"
#include "tests/support/shard_values.h"

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;

constexpr double kLr = 0.02;
constexpr double kDecay = 0.1;
constexpr double kMomentum = 0.95;
constexpr int kSteps = 5;

struct TestParameter {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<MatrixShape> matrices;  ///< empty: AdamW
  std::string split;                  ///< "rows", "columns", "experts" or ""
};

/// Two to one, because then Newton-Schulz brings all singular values of a
/// random matrix near 1. Multiples of 32 elements: see muon_update.h.
const std::vector<TestParameter> kParameters = {
    {"q", {64, 32}, {{64, 32}}, "rows"},
    {"norm", {33}, {}, ""},
    {"qkv", {96, 64}, {{32, 64}, {32, 64}, {32, 64}}, ""},
    {"o", {32, 64}, {{32, 64}}, "columns"},
    {"bias", {7}, {}, ""},
    {"gate_up", {4, 64, 16}, {}, "experts"},  // gate and up of each: below
    {"down", {4, 16, 32}, {}, "experts"},
    {"embedding", {40, 16}, {}, ""}};

std::vector<MatrixShape> matrices_of(const GroupParameter& parameter) {
  for (const TestParameter& p : kParameters) {
    if (p.name != parameter.names.front()) {
      continue;
    }
    if (p.name == "gate_up") {
      return std::vector<MatrixShape>(8, {32, 16});
    }
    if (p.name == "down") {
      return std::vector<MatrixShape>(4, {16, 32});
    }
    return p.matrices;
  }
  return one_matrix(parameter);
}

struct MuonCase {
  std::string name;
  std::string strategy = "zero3";
  std::vector<MeshAxis> axes = {{"dp", 1}};
  Granularity granularity;
  std::string split;     ///< of TestParameter: over the first axis
  bool overlap = false;  ///< on a separate stream
};

using Values = std::map<std::string, at::Tensor>;

/// The state of all ranks after some steps.
struct MuonResult {
  Values weights;
  Values momentum;
};

Values draw(int step) {
  auto generator = at::detail::createCPUGenerator(100 + step);
  Values values;
  for (const TestParameter& p : kParameters) {
    values[p.name] = at::randn(p.shape, generator);
  }
  return values;
}

at::Tensor part_at(
    const at::Tensor& whole,
    const TensorSlice& slice,
    const std::vector<std::int64_t>& shape) {
  const std::int64_t n = c10::multiply_integers(shape);
  std::vector<at::Tensor> parts;
  for (const Rectangle& box : slice.boxes(shape, 0, n)) {
    at::Tensor part = whole;
    for (std::int64_t d = 0; d < part.dim(); ++d) {
      part = part.narrow(d, box.start[d], box.length[d]);
    }
    parts.push_back(part.reshape({-1}));
  }
  return at::cat(parts);
}

/// The parameters of a test, sharded. Split ones are a separate group.
class TestGroups {
 public:
  TestGroups(const MuonCase& c, const std::shared_ptr<Mesh>& mesh) {
    std::vector<GroupParameter> rest;
    std::vector<GroupParameter> split;
    for (const TestParameter& p : kParameters) {
      GroupParameter parameter{
          .names = {p.name},
          .shape = p.shape,
          .placement = {.granularity = c.granularity},
          .init = InitSpec::zeros()};
      const bool is_split = !c.split.empty() && p.split == c.split;
      if (is_split) {
        const std::int64_t dim = c.split == "columns" ? 1 : 0;
        parameter.shape[dim] /= mesh->axis(0).size;
        parameter.placement.slice =
            TensorSlice().cut(dim, mesh->coordinate(0), mesh->axis(0).size);
      }
      (is_split ? split : rest).push_back(parameter);
    }
    add(c, rest, mesh, mesh);
    if (!split.empty()) {
      add(c, split, mesh->sub_mesh({mesh->axis(1).name}), mesh);
    }
  }

  std::vector<ParamGroup*> pointers() const {
    std::vector<ParamGroup*> all;
    for (const auto& group : groups_) {
      all.push_back(group.get());
    }
    return all;
  }

  void set_weights(const Values& values) {
    for (const auto& group : groups_) {
      for (NamedShard& shard : group->main_shards()) {
        if (shard.tensor.numel() > 0) {
          shard.tensor.copy_(part_of(shard, values.at(shard.name())));
        }
      }
    }
  }

  /// Reduces a sum that only the first rank of each group adds to.
  void reduce(const Values& gradients) {
    for (const auto& group : groups_) {
      const at::Tensor flat = at::zeros({group->layout().numel()});
      for (std::size_t i = 0; i < group->parameters().size(); ++i) {
        const GroupParameter& p = group->parameters()[i];
        const at::Tensor part =
            part_at(gradients.at(p.names.front()), p.slice(), p.shape);
        if (group->mesh()->rank() == 0) {
          flat.narrow(0, group->layout().tensor_offset(i), part.numel())
              .copy_(part);
        }
      }
      group->gradients().reduce(flat, group->plan_reduction(true, true));
    }
  }

  static void put(const std::vector<NamedShard>& shards, Values& values) {
    for (const NamedShard& shard : shards) {
      at::Tensor& whole = values[shard.name()];
      if (!whole.defined()) {
        whole = at::full(shard.whole_shape(), NAN);
      }
      put_into(shard, whole);
    }
  }

 private:
  void add(
      const MuonCase& c,
      std::vector<GroupParameter> parameters,
      std::shared_ptr<Mesh> mesh,
      const std::shared_ptr<Mesh>& model_mesh) {
    const int num_axes = mesh->num_axes();
    groups_.push_back(std::make_unique<ParamGroup>(
        GroupSpec{
            .name = "block",
            .parameters = std::move(parameters),
            .mesh = std::move(mesh),
            .strategy = Strategy::named(
                num_axes > 1           ? c.strategy
                : c.strategy == "hsdp" ? "zero3"
                                       : c.strategy,
                num_axes),
            .model_mesh = model_mesh},
        ParamGroupOptions{
            .precision = Precision::full(),
            .scaling = GradScaling::sum},
        Initializer(5)));
  }

  std::vector<std::unique_ptr<ParamGroup>> groups_;
};

ParameterRules muon_rules(double weight_decay = kDecay) {
  return {
      .rest =
          {.algorithm = Algorithm::muon,
           .weight_decay = weight_decay,
           .momentum = kMomentum},
      .muon = {.matrices_of = matrices_of}};
}

MuonResult train(const MuonCase& c, int num_steps = kSteps) {
  int world = 1;
  for (const MeshAxis& axis : c.axes) {
    world *= static_cast<int>(axis.size);
  }
  MuonResult result;
  std::mutex mutex;
  run_ranks(world, [&](RankContext& context) {
    TestGroups groups(c, context.mesh(c.axes));
    groups.set_weights(draw(0));
    Optimizer optimizer(groups.pointers(), muon_rules());
    if (c.overlap) {
      optimizer.set_stream(make_stream(
          at::kCPU,
          "optimizer",
          {.delay_seed = static_cast<std::uint64_t>(context.rank),
           .max_delay_us = 200}));
    }
    for (int step = 1; step <= num_steps; ++step) {
      groups.reduce(draw(step));
      optimizer.step(kLr);
      optimizer.zero_grad();
    }
    optimizer.wait();
    const std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < optimizer.groups().size(); ++i) {
      TestGroups::put(optimizer.groups()[i]->main_shards(), result.weights);
      for (const auto& [name, shards] : optimizer.state_shards(i)) {
        if (name == "momentum_buffer") {
          TestGroups::put(shards, result.momentum);
        }
      }
    }
  });
  return result;
}

/// torch.optim.Muon's step, written with the operations of its source.
void torch_muon(at::Tensor w, const at::Tensor& g, at::Tensor m) {
  m.lerp_(g, 1 - kMomentum);
  at::Tensor x = g.lerp(m, kMomentum).to(at::kBFloat16);
  const bool is_tall = w.size(0) > w.size(1);
  if (is_tall) {
    x = x.t();
  }
  x.div_(at::linalg_vector_norm(x, 2).clamp(1e-7));
  for (int i = 0; i < 5; ++i) {
    const at::Tensor gram = at::matmul(x, x.t());
    const at::Tensor update = at::addmm(gram, gram, gram, -4.7750, 2.0315);
    x = at::addmm(x, update, x, 3.4445);
  }
  if (is_tall) {
    x = x.t();
  }
  const double ratio =
      std::sqrt(std::max(1.0, double(w.size(0)) / double(w.size(1))));
  w.mul_(1 - kLr * kDecay);
  w.add_(x, -(kLr * ratio));
}

/// Calls visit(matrix of a, of b, of c) for each matrix of a parameter.
template <class F>
void for_matrices(
    const TestParameter& p,
    const std::vector<at::Tensor>& of,
    F&& visit) {
  const auto shapes = matrices_of({.names = {p.name}, .shape = p.shape});
  std::int64_t row = 0;
  for (const MatrixShape& shape : shapes) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& t : of) {
      parts.push_back(t.view({-1, t.size(-1)}).narrow(0, row, shape.rows));
    }
    visit(parts);
    row += shape.rows;
  }
}

bool is_muon(const TestParameter& p) {
  return !matrices_of({.names = {p.name}, .shape = p.shape}).empty();
}

MuonResult reference() {
  Values w = draw(0);
  Values m;
  for (int step = 1; step <= kSteps; ++step) {
    const Values g = draw(step);
    for (const TestParameter& p : kParameters) {
      if (!is_muon(p)) {
        continue;
      }
      if (step == 1) {
        m[p.name] = at::zeros(p.shape);
      }
      for_matrices(p, {w[p.name], g.at(p.name), m[p.name]}, [](const auto& t) {
        torch_muon(t[0], t[1], t[2]);
      });
    }
  }
  return {w, m};
}

// A batch multiplies by other kernels, in bfloat16: titan's bound.
constexpr double kBatchTolerance = 2e-2;

constexpr double kExpertTolerance = kBatchTolerance * kLr * kSteps * 2;

/// Compares what torch computed on a processor without fused multiply-adds.
constexpr double kUnfusedTolerance = 1e-3;

void expect_equal(const MuonResult& a, const MuonResult& b) {
  for (const TestParameter& p : kParameters) {
    const at::Tensor& x = a.weights.at(p.name);
    const at::Tensor& y = b.weights.at(p.name);
    if (p.split == "experts") {
      EXPECT_TRUE(at::allclose(x, y, 0, kExpertTolerance))
          << p.name << (x - y).abs().max();
    } else {
      EXPECT_TRUE(x.equal(y)) << p.name << (x - y).abs().max();
    }
    if (is_muon(p)) {
      EXPECT_TRUE(a.momentum.at(p.name).equal(b.momentum.at(p.name))) << p.name;
    }
  }
}

TEST(Muon, EqualsTorchOnOneProcess) {
  const MuonResult ours = train({});
  const MuonResult theirs = reference();
  // Torch fuses a multiplication and an addition in kernels for AVX.
  const bool fuses = at::get_cpu_capability().starts_with("AVX");
  for (const TestParameter& p : kParameters) {
    if (!is_muon(p)) {
      continue;
    }
    const at::Tensor& x = ours.weights.at(p.name);
    const at::Tensor& y = theirs.weights.at(p.name);
    const at::Tensor& m = ours.momentum.at(p.name);
    const at::Tensor& n = theirs.momentum.at(p.name);
    if (!fuses) {
      EXPECT_TRUE(at::allclose(x, y, 0, kUnfusedTolerance)) << p.name;
      EXPECT_TRUE(at::allclose(m, n)) << p.name;
      continue;
    }
    if (p.split == "experts") {
      EXPECT_TRUE(at::allclose(x, y, 0, kExpertTolerance))
          << p.name << (x - y).abs().max();
    } else {
      EXPECT_TRUE(x.equal(y)) << p.name << (x - y).abs().max();
    }
    EXPECT_TRUE(m.equal(n)) << p.name;
  }
}

class MuonMeshes : public ::testing::TestWithParam<MuonCase> {};

TEST_P(MuonMeshes, EqualOneRank) {
  static const MuonResult one = train({});
  expect_equal(train(GetParam()), one);
}

std::vector<MuonCase> mesh_cases() {
  std::vector<MuonCase> cases;
  for (const char* strategy : {"zero0", "zero1", "zero2", "zero3"}) {
    for (const std::int64_t ranks : {2, 3, 4}) {
      cases.push_back(
          {.name = fmt::format("{}_{}", strategy, ranks),
           .strategy = strategy,
           .axes = {{"dp", ranks}}});
    }
  }
  cases.push_back(
      {.name = "hsdp", .strategy = "hsdp", .axes = {{"outer", 2}, {"dp", 2}}});
  cases.push_back({.name = "overlap_3", .axes = {{"dp", 3}}, .overlap = true});
  for (const char* split : {"rows", "columns", "experts"}) {
    cases.push_back(
        {.name = fmt::format("split_{}", split),
         .axes = {{"tp", 2, AxisRole::model}, {"dp", 2}},
         .split = split});
  }
  for (const auto& [name, granularity] :
       {std::pair{"tensor", Granularity::tensor()},
        std::pair{"row", Granularity::row()}}) {
    cases.push_back(
        {.name = fmt::format("empty_shards_{}", name),
         .axes = {{"dp", 4}},
         .granularity = granularity});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(
    Muon,
    MuonMeshes,
    ::testing::ValuesIn(mesh_cases()),
    [](const auto& info) { return info.param.name; });

TEST(Muon, UpdatesHaveSingularValuesNearOne) {
  for (const std::int64_t ranks : {1, 3}) {
    const MuonCase c{.axes = {{"dp", ranks}}};
    const Values before = draw(0);
    const MuonResult after = train(c, 1);
    int num_matrices = 0;
    for (const TestParameter& p : kParameters) {
      for_matrices(
          p,
          {before.at(p.name), after.weights.at(p.name)},
          [&](const auto& t) {
            const double ratio = std::sqrt(
                std::max(1.0, double(t[0].size(0)) / double(t[0].size(1))));
            const at::Tensor update =
                (t[0] * (1 - kLr * kDecay) - t[1]) / (kLr * ratio);
            const at::Tensor s = at::linalg_svdvals(update);
            if (s.min().template item<float>() >= 0.6F &&
                s.max().template item<float>() <= 1.2F) {
              ++num_matrices;
            }
          });
    }
    EXPECT_EQ(num_matrices, 1 + 3 + 1 + 8 + 4);
  }
}

TEST(Muon, TheClipFactorScalesTheGradient) {
  const auto mesh = Mesh::single(at::kCPU);
  Values halves = draw(1);
  for (auto& [name, values] : halves) {
    values = values * 0.5;  // exact
  }
  const auto weights = [&](const Values& gradient, const at::Tensor& scale) {
    TestGroups groups({}, mesh);
    groups.set_weights(draw(0));
    Optimizer optimizer(groups.pointers(), muon_rules());
    groups.reduce(gradient);
    optimizer.step(kLr, scale);
    return groups.pointers()[0]->weights().main().local().clone();
  };
  EXPECT_TRUE(
      weights(draw(1), at::full({}, 0.5)).equal(weights(halves, at::Tensor())));
}

TEST(Muon, GroupsWithoutGradientsAreLeftAlone) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    TestGroups used({}, mesh);
    TestGroups idle({}, mesh);
    used.set_weights(draw(0));
    idle.set_weights(draw(0));
    Optimizer optimizer({idle.pointers()[0], used.pointers()[0]}, muon_rules());
    const at::Tensor before =
        idle.pointers()[0]->weights().main().local().clone();
    used.reduce(draw(1));
    optimizer.step(kLr);
    optimizer.zero_grad();
    EXPECT_TRUE(idle.pointers()[0]->weights().main().local().equal(before));
    EXPECT_FALSE(used.pointers()[0]->weights().main().local().equal(before));
    for (const auto& [name, state] : optimizer.state(0)) {
      EXPECT_EQ(state.abs().sum().item<double>(), 0) << name;
    }
    // Both in the next step, as if the first had not been for one of them.
    used.reduce(draw(2));
    idle.reduce(draw(1));
    optimizer.step(kLr);
    optimizer.zero_grad();
    EXPECT_EQ(optimizer.num_updates(0, 0), 1);
    EXPECT_EQ(optimizer.num_updates(1, 0), 2);
  });
}

/// Parts of other ranks are NaN in both.
bool is_same(const at::Tensor& a, const at::Tensor& b) {
  return at::allclose(a, b, 0, 0, /*equal_nan=*/true);
}

// The other parameters of their group have gradients.
TEST(Muon, ParametersWithoutGradientsAreLeftAlone) {
  const MuonResult all = train({}, 2);
  const auto index_of = [](const std::string& name) {
    return std::ranges::find(kParameters, name, &TestParameter::name) -
           kParameters.begin();
  };
  for (const int world : {1, 2}) {
    run_ranks(world, [&](RankContext& context) {
      TestGroups groups({}, context.mesh());
      groups.set_weights(draw(0));
      Optimizer optimizer(groups.pointers(), muon_rules());
      const auto values = [&] {
        MuonResult now;
        TestGroups::put(groups.pointers()[0]->main_shards(), now.weights);
        for (const auto& [name, shards] : optimizer.state_shards(0)) {
          if (name == "momentum_buffer") {
            TestGroups::put(shards, now.momentum);
          }
        }
        return now;
      };
      const std::vector<std::string> idle{"qkv", "down", "embedding", "norm"};
      Optimizer::OfParameters without(1);
      without[0].resize(kParameters.size());
      for (const std::string& name : idle) {
        without[0][index_of(name)] = true;
      }
      groups.reduce(draw(1));
      optimizer.step(kLr);
      optimizer.zero_grad();
      const MuonResult before = values();
      groups.reduce(draw(2));
      optimizer.step(kLr, {}, without);
      optimizer.zero_grad();
      const MuonResult after = values();
      for (const TestParameter& p : kParameters) {
        const bool is_idle = std::ranges::count(idle, p.name) == 1;
        const auto same = [&](const Values& a, const Values& b) {
          return is_same(a.at(p.name), b.at(p.name));
        };
        const bool has_part =
            !before.weights.at(p.name).isnan().all().item<bool>();
        const bool stays = is_idle || !has_part;
        EXPECT_EQ(same(after.weights, before.weights), stays) << p.name;
        if (is_muon(p)) {
          EXPECT_EQ(same(after.momentum, before.momentum), stays) << p.name;
        }
        if (world == 1 && !is_idle) {
          EXPECT_TRUE(after.weights.at(p.name).equal(all.weights.at(p.name)))
              << p.name;
        }
        EXPECT_EQ(optimizer.num_updates(0, index_of(p.name)), is_idle ? 1 : 2);
      }
      // All of them once more.
      groups.reduce(draw(3));
      optimizer.step(kLr);
      const MuonResult last = values();
      for (const TestParameter& p : kParameters) {
        const bool has_part =
            !after.weights.at(p.name).isnan().all().item<bool>();
        EXPECT_EQ(
            is_same(last.weights.at(p.name), after.weights.at(p.name)),
            !has_part)
            << p.name;
      }
    });
  }
}

TEST(Muon, AStepThatFailedLeavesNothingToTheNextOne) {
  const auto mesh = Mesh::single(at::kCPU);
  // Returns the weights of two groups after a step of both.
  const auto weights = [&](bool fails) {
    std::vector<std::unique_ptr<ParamGroup>> groups;
    for (int i = 0; i < 2; ++i) {
      groups.push_back(std::make_unique<ParamGroup>(
          GroupSpec{
              .name = "block",
              .parameters =
                  {{.names = {"q"},
                    .shape = {64, 32},
                    .init = InitSpec::normal(0, 1)}},
              .mesh = mesh,
              .strategy = Strategy::named("zero3", 1)},
          ParamGroupOptions{.precision = Precision::full()},
          Initializer(5)));
    }
    Optimizer optimizer({groups[0].get(), groups[1].get()}, muon_rules());
    const auto reduce = [&](std::size_t i) {
      groups[i]->gradients().reduce(
          draw(1).at("q").reshape({-1}),
          groups[i]->plan_reduction(true, true));
    };
    if (fails) {
      reduce(0);
      // After the window has memory for the directions of one group.
      const at::Tensor not_a_scalar = at::ones({2});
      EXPECT_ANY_THROW(optimizer.step(kLr, not_a_scalar));
      optimizer.zero_grad();
    }
    reduce(0);
    reduce(1);
    optimizer.step(kLr);
    return at::cat(
        {groups[0]->weights().main().local(),
         groups[1]->weights().main().local()});
  };
  EXPECT_TRUE(weights(true).equal(weights(false)));
}

TEST(Muon, StatesCoverTheirOwnParametersOnly) {
  const auto mesh = Mesh::single(at::kCPU);
  TestGroups groups({}, mesh);
  const Optimizer optimizer(groups.pointers(), muon_rules());
  std::int64_t num_muon = 0;
  std::int64_t num_adamw = 0;
  for (const TestParameter& p : kParameters) {
    const std::int64_t n = c10::multiply_integers(p.shape);
    (is_muon(p) ? num_muon : num_adamw) += (n + 15) / 16 * 16;
  }
  EXPECT_EQ(optimizer.state_nbytes(), 4 * (num_muon + 2 * num_adamw));
  for (const auto& [name, shards] : optimizer.state_shards(0)) {
    for (const NamedShard& shard : shards) {
      const auto matrices =
          matrices_of({.names = shard.names, .shape = shard.shape});
      EXPECT_EQ(name == "momentum_buffer", !matrices.empty())
          << name << " of " << shard.name();
    }
  }
}

TEST(Muon, FactorsAreTorchs) {
  EXPECT_DOUBLE_EQ(lr_factor(AdjustLr::original, {64, 16}), 2);
  EXPECT_DOUBLE_EQ(lr_factor(AdjustLr::original, {16, 64}), 1);
  EXPECT_DOUBLE_EQ(lr_factor(AdjustLr::match_rms_adamw, {16, 64}), 1.6);
  EXPECT_DOUBLE_EQ(lr_factor(AdjustLr::match_rms_adamw, {64, 16}), 1.6);
  EXPECT_DOUBLE_EQ(lr_factor(AdjustLr::spectral_unclamped, {64, 16}), 2);
  EXPECT_DOUBLE_EQ(lr_factor(AdjustLr::spectral_unclamped, {16, 64}), 0.5);
}

TEST(Muon, ReportsBadOptions) {
  const auto message = [](MuonValues values, MatricesOf matrices) {
    const auto mesh = Mesh::single(at::kCPU);
    TestGroups groups({}, mesh);
    ParameterRules rules = muon_rules();
    rules.rest.muon = values;
    rules.muon.matrices_of = std::move(matrices);
    try {
      Optimizer(groups.pointers(), rules);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::config);
      return error.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(
      message({.newton_schulz = {.steps = 0}}, matrices_of),
      HasSubstr("optimizer.ns_steps from 1 to 99, got 0"));
  EXPECT_THAT(
      message({.newton_schulz = {.eps = 0}}, matrices_of),
      HasSubstr("optimizer.muon_eps > 0, got 0"));
  EXPECT_THAT(
      message(
          {},
          [](const GroupParameter&) {
            return std::vector<MatrixShape>{{3, 32}};
          }),
      HasSubstr("to be all of its rows, got 3 rows in 1 matrices"));
}

// Half of a symmetric matrix and half of the blocks on its diagonal.
TEST(NewtonSchulz, WorkOfALargeMatrixLeavesOutBlocksAboveTheDiagonal) {
  const NewtonSchulzWork work = newton_schulz_work(1, 4096, 14336);
  std::map<std::int64_t, std::int64_t> elements;  // of products, by k
  for (const MatmulBatch& of : work.matmuls) {
    elements[of.k] += of.count * of.m * of.n;
  }
  constexpr std::int64_t kSymmetric = 4096 * (4096 + 1024) / 2;
  EXPECT_EQ(elements.at(14336), kSymmetric);
  EXPECT_EQ(elements.at(4096), kSymmetric + 4096 * 14336);
  EXPECT_EQ(work.copied_nbytes, 2 * 4096 * 4096 * 2);
  EXPECT_EQ(work.scratch_nbytes, (2 * 4096 * 4096 + 4096 * 14336) * 2);
  EXPECT_EQ(
      newton_schulz_work(1, 14336, 4096).scratch_nbytes,
      work.scratch_nbytes);
}

TEST(NewtonSchulz, WorkOfABatchIsOfFullMatrices) {
  const NewtonSchulzWork work = newton_schulz_work(128, 768, 2048);
  ASSERT_EQ(work.matmuls.size(), 3U);
  for (const MatmulBatch& of : work.matmuls) {
    EXPECT_EQ(of.count, 128);
    EXPECT_EQ(of.m, 768);
  }
  EXPECT_EQ(work.copied_nbytes, 0);
  EXPECT_EQ(work.scratch_nbytes, 128 * 2 * (768 * 768 + 768 * 2048) * 2);
}

TEST(NewtonSchulz, ABatchIsItsMatrices) {
  auto generator = at::detail::createCPUGenerator(3);
  for (const bool is_tall : {false, true}) {
    const at::Tensor batch =
        at::randn({3, is_tall ? 32 : 16, is_tall ? 16 : 32}, generator);
    const at::Tensor together = newton_schulz(batch.clone(), {});
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::allclose(
          together[i],
          newton_schulz(batch[i].clone(), {}),
          1e-4,
          1e-5));
    }
  }
}

TEST(NewtonSchulz, AZeroMatrixStaysZero) {
  const at::Tensor zero = at::zeros({4, 8}, at::kBFloat16);
  EXPECT_TRUE(newton_schulz(zero.clone(), {}).equal(zero));
}

}  // namespace
}  // namespace flatshard::testing
