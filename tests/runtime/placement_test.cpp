// Parameters stored on a part of the mesh: experts. Along one axis, ranks have
// different slices. All against the same model on one process.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <cmath>

#include "flatshard/checkpoint/checkpointer.h"
#include "flatshard/checkpoint/load.h"
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/core/error.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/grad_norm.h"
#include "tests/runtime/training.h"
#include "tests/support/message_of.h"
#include "tests/support/sum_order.h"
#include "tests/support/temp_folder.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;

constexpr std::int64_t kExpertDim = 12;
constexpr std::int64_t kNumExperts = 4;
constexpr int kRanks = 4;
constexpr int kNumMicrobatches = 2;
constexpr std::uint64_t kExpertSeed = 5;
constexpr double kExpertLr = 1e-2;
constexpr double kMaxNorm = 0.3;

/// Returns the tolerance of weights against one process, and of norms relative
/// to its norms: only the sums over ranks and microbatches have another order.
/// AdamW divides a gradient by its own size, and the smallest of N gradients is
/// about 1 / N of their addends.
double expert_tolerance() {
  constexpr double kMostGrown = kNumExperts * kExpertDim * kExpertDim;
  return testing::sum_tolerance(
      {.addends = kRanks * kNumMicrobatches,
       .in_a_row = 3,  // steps
       .size = kExpertLr * kMostGrown});
}

/// A dense layer, and experts that all see every row. A block's experts may be
/// a part of all.
class ExpertBlockImpl : public nn::Module {
 public:
  explicit ExpertBlockImpl(std::int64_t num_experts) {
    up_ = register_module(
        "up",
        nn::Linear(
            kExpertDim,
            kExpertDim,
            nn::LinearOptions{
                .bias = true,
                .init = InitSpec::normal(0, 0.2F)}));
    experts_ = declare_parameter(
        "experts",
        {num_experts, kExpertDim, kExpertDim},
        InitSpec::normal(0, 0.3F));
  }

  /// @param begin  first expert that is used, as an index into this block.
  at::Tensor
  forward(const at::Tensor& x, std::int64_t begin, std::int64_t count) {
    const at::Tensor h = x + at::tanh(up_(x));
    const at::Tensor used = experts_.narrow(0, begin, count);
    return h + at::tanh(at::matmul(h, used)).sum(0);
  }

 private:
  nn::Linear up_{nullptr};
  at::Tensor experts_;
};
FLATSHARD_MODULE(ExpertBlock);

class ExpertModelImpl : public nn::Module {
 public:
  explicit ExpertModelImpl(std::int64_t num_experts) {
    for (int i = 0; i < 2; ++i) {
      blocks_.push_back(register_module(
          "block" + std::to_string(i),
          ExpertBlock(num_experts)));
    }
    out_ = register_module(
        "out",
        nn::Linear(
            kExpertDim,
            kExpertDim,
            nn::LinearOptions{.init = InitSpec::normal(0, 0.2F)}));
  }

  at::Tensor
  forward(const at::Tensor& x, std::int64_t begin, std::int64_t count) {
    at::Tensor h = x;
    for (ExpertBlock& block : blocks_) {
      h = block(h, begin, count);
    }
    return out_(h).square().mean();
  }

  std::vector<nn::Module*> unit_modules() {
    return {blocks_[0].get(), blocks_[1].get()};
  }

 private:
  std::vector<ExpertBlock> blocks_;
  nn::Linear out_{nullptr};
};
FLATSHARD_MODULE(ExpertModel);

at::Tensor input_of(int step, int rank, int microbatch) {
  const at::Tensor x = at::empty({5, kExpertDim});
  Initializer(kExpertSeed)
      .fill(
          x.view(-1),
          fmt::format("x {} {} {}", step, rank, microbatch),
          InitSpec::normal(0, 1),
          0);
  return x;
}

using Weights = std::map<std::string, at::Tensor>;

/// One process, no shards. Entry `s` of the results is that after step s.
struct PlainRun {
  std::vector<Weights> weights;
  std::vector<double> norms;
  std::vector<std::map<std::string, double>> grad_norms;
};

/// @param degrees  of each step: among how many slices the experts are divided.
PlainRun run_plain(const std::vector<int>& degrees) {
  ExpertModel model(kNumExperts);
  const Initializer initializer(kExpertSeed);
  std::vector<at::Tensor> tensors;
  const auto parameters = nn::named_parameters(*model);
  for (const nn::NamedParameter& p : parameters) {
    const at::Tensor values = at::empty(p.tensor.sizes());
    initializer.fill(values.view(-1), p.name, p.info->init, 0);
    nn::set_parameter_data(p.tensor, values);
    tensors.push_back(p.tensor);
  }
  torch::optim::AdamW adamw(
      tensors,
      torch::optim::AdamWOptions(kExpertLr)
          .betas({0.9, 0.95})
          .eps(1e-8)
          .weight_decay(0.1));
  PlainRun run;
  for (std::size_t step = 0; step < degrees.size(); ++step) {
    const std::int64_t count = kNumExperts / degrees[step];
    adamw.zero_grad();
    for (int microbatch = 0; microbatch < kNumMicrobatches; ++microbatch) {
      for (int rank = 0; rank < kRanks; ++rank) {
        const int slice = rank % degrees[step];
        (model(
             input_of(static_cast<int>(step), rank, microbatch),
             slice * count,
             count) /
         (kRanks * kNumMicrobatches))
            .backward();
      }
    }
    double square = 0;
    run.grad_norms.emplace_back();
    for (const nn::NamedParameter& p : parameters) {
      const double norm = p.tensor.grad().norm().item<double>();
      run.grad_norms.back()[p.name] = norm;
      square += norm * norm;
    }
    run.norms.push_back(std::sqrt(square));
    const double scale = std::min(1.0, kMaxNorm / (run.norms.back() + 1e-6));
    for (const nn::NamedParameter& p : parameters) {
      p.tensor.mutable_grad().mul_(scale);
    }
    adamw.step();
    run.weights.emplace_back();
    for (const nn::NamedParameter& p : parameters) {
      run.weights.back()[p.name] = p.tensor.detach().clone();
    }
  }
  return run;
}

struct ExpertCase {
  std::string strategy;
  bool hybrid = false;  ///< replicas along the first axis
  int degree = 2;       ///< slices of the experts
};

/// One rank's model on a mesh {edp, ep}.
struct ShardedRun {
  ShardedRun(
      const RankContext& context,
      const ExpertCase& c,
      const std::string& name = "mesh")
      : mesh(context.mesh(
            {{c.hybrid ? "replicate" : "edp", kRanks / c.degree},
             {"ep", c.degree}},
            name)),
        model(kNumExperts / c.degree) {
    const ParameterPlacement experts{
        .mesh = mesh->sub_mesh({mesh->axis(0).name}),
        .strategy = c.hybrid ? std::optional(Strategy::named("zero0", 1))
                             : std::nullopt,
        .grad_divisor = static_cast<double>(c.degree),
        .slice = TensorSlice().cut(0, mesh->coordinate("ep"), c.degree)};
    runtime = fully_shard(
        *model,
        mesh,
        {.units = model->unit_modules(),
         .strategy = c.strategy,
         .placement_of =
             [experts](const std::string& parameter) {
               return parameter.ends_with("experts") ? experts
                                                     : ParameterPlacement{};
             },
         .seed = kExpertSeed,
         .group = {.precision = Precision::full()},
         .runtime = {.streams = {.delay_seed = 3, .max_delay_us = 200}}});
    adamw = std::make_unique<AdamW>(runtime->groups(), AdamWOptions{});
    for (const auto& unit : runtime->units()) {
      for (const auto& group : unit->groups()) {
        groups.push_back(group.get());
      }
    }
  }

  /// @return  the norm before clipping.
  double step(int number, const PlainRun* plain = nullptr) {
    const std::int64_t count = kNumExperts / mesh->axis(1).size;
    for (int microbatch = 0; microbatch < kNumMicrobatches; ++microbatch) {
      runtime->set_is_last_microbatch(microbatch == kNumMicrobatches - 1);
      (model(input_of(number, mesh->rank(), microbatch), 0, count) /
       kNumMicrobatches)
          .backward();
    }
    const GradNorm clip = grad_norm_and_scale(runtime->groups(), kMaxNorm);
    if (plain != nullptr) {
      for (const ParameterNorm& norm : parameter_norms(*runtime)) {
        const double want = plain->grad_norms[number].at(norm.name);
        EXPECT_NEAR(norm.grad.value_or(-1), want, expert_tolerance() * want)
            << norm.name;
      }
    }
    adamw->step(kExpertLr, clip.scale);
    adamw->zero_grad();
    return clip.norm.item<double>();
  }

  std::shared_ptr<Mesh> mesh;
  ExpertModel model;
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<AdamW> adamw;
  std::vector<ParamGroup*> groups;
};

/// All ranks' values, by name. Each fills in its part.
struct AllWeights {
  std::mutex mutex;
  std::map<std::string, std::vector<float>> values;

  void expect_equal(const Weights& want, double tolerance) const {
    EXPECT_EQ(values.size(), want.size());
    for (const auto& [name, tensor] : want) {
      const auto& got = values.at(name);
      ASSERT_EQ(static_cast<std::int64_t>(got.size()), tensor.numel()) << name;
      const at::Tensor all = at::tensor(got).view(tensor.sizes());
      EXPECT_LE((all - tensor).abs().max().item<double>(), tolerance) << name;
    }
  }
};

class Placements4 : public ::testing::TestWithParam<ExpertCase> {};

TEST_P(Placements4, R23_ExpertsOnASubMeshEqualOneProcess) {
  const ExpertCase c = GetParam();
  const PlainRun plain = run_plain({c.degree, c.degree, c.degree});
  AllWeights weights;
  run_ranks(kRanks, [&](RankContext& context) {
    ShardedRun run(context, c);
    for (int step = 0; step < 3; ++step) {
      const double norm = run.step(step, &plain);
      EXPECT_NEAR(
          norm,
          plain.norms[step],
          expert_tolerance() * plain.norms[step]);
    }
    testing::collect_weights(*run.runtime, weights.mutex, weights.values);
  });
  weights.expect_equal(plain.weights.back(), expert_tolerance());
}

INSTANTIATE_TEST_SUITE_P(
    Experts,
    Placements4,
    ::testing::Values(
        ExpertCase{"zero1"},
        ExpertCase{"zero2"},
        ExpertCase{"zero3"},
        ExpertCase{"hsdp", /*hybrid=*/true},
        ExpertCase{"zero3", /*hybrid=*/false, /*degree=*/4},
        ExpertCase{"zero3", /*hybrid=*/false, /*degree=*/1}),
    [](const auto& info) {
      return fmt::format("{}_ep{}", info.param.strategy, info.param.degree);
    });

// Written at ep 2, read at 1, 4 and on HSDP: weights, states and what follows.
TEST(Placement, R23_ACheckpointIsOfTheWholeExperts) {
  const TempFolder folder;
  AllWeights written;
  run_ranks(kRanks, [&](RankContext& context) {
    ShardedRun run(context, {"zero3"});
    run.step(0);
    run.step(1);
    Checkpointer checkpointer(
        run.mesh,
        run.groups,
        run.adamw.get(),
        {.folder = folder.path()});
    checkpointer.save(2, {});
    checkpointer.wait();
    for (const SaveResult& result : checkpointer.take_results()) {
      EXPECT_FALSE(result.error) << result.error->what();
    }
    testing::collect_weights(*run.runtime, written.mutex, written.values);
    std::vector<const ParamGroup*> groups(run.groups.begin(), run.groups.end());
    save_weights(groups, folder.path() / "whole.safetensors");
  });
  const WeightsFile exported(folder.path() / "whole.safetensors");
  const at::Tensor experts = at::empty({kNumExperts, kExpertDim, kExpertDim});
  exported.read("block1.experts", experts);
  EXPECT_TRUE(
      experts.view(-1).equal(at::tensor(written.values.at("block1.experts"))));

  for (const ExpertCase& c :
       {ExpertCase{"zero3", false, 1},
        ExpertCase{"zero3", false, 4},
        ExpertCase{"hsdp", true, 2}}) {
    const PlainRun plain = run_plain({2, 2, c.degree});
    AllWeights loaded;
    AllWeights continued;
    run_ranks(kRanks, [&](RankContext& context) {
      ShardedRun run(context, c);
      const LoadedCheckpoint checkpoint = load_checkpoint(
          folder.path() / "step-2",
          run.groups,
          run.adamw.get());
      EXPECT_EQ(checkpoint.step, 2);
      testing::collect_weights(*run.runtime, loaded.mutex, loaded.values);
      run.step(2);
      testing::collect_weights(*run.runtime, continued.mutex, continued.values);
    });
    EXPECT_EQ(loaded.values, written.values);
    continued.expect_equal(plain.weights.back(), expert_tolerance());
  }
}

TEST(Placement, R23_AUnitChoiceIsForAllOfItsUnit) {
  run_ranks(kRanks, [](RankContext& context) {
    const auto mesh = context.mesh({{"edp", 2}, {"ep", 2}});
    ExpertModel model(2);
    nn::Module& block = *model->unit_modules()[1];
    const auto runtime = fully_shard(
        *model,
        mesh,
        {.units = model->unit_modules(),
         .unit_choices =
             {{.module = &block,
               .placement =
                   {.mesh = mesh->sub_mesh({"edp"}),
                    .strategy = Strategy::named("zero1", 1),
                    .granularity = Granularity::row(),
                    .grad_divisor = 2},
               .policy = UnitPolicy{.reshard_after_forward = false}},
              {.module = model.get(), .placement = {.grad_divisor = 3}}},
         .placement_of = [](const std::string& name) {
           return name == "block1.experts"
                      ? ParameterPlacement{.granularity = Granularity::tensor()}
                      : ParameterPlacement{};
         }});
    const UnitId id = runtime->unit_of(block);
    EXPECT_EQ(runtime->units()[id]->name(), "block1");
    for (const auto& unit : runtime->units()) {
      const bool chosen = unit->id() == id;
      const bool is_root = unit->id() == runtime->unit_of(*model);
      EXPECT_EQ(
          runtime->scheduler().units()[unit->id()].policy.reshard_after_forward,
          !chosen);
      for (const auto& group : unit->groups()) {
        EXPECT_EQ(group->mesh()->num_axes(), chosen ? 1 : 2);
        EXPECT_EQ(group->strategy().name, chosen ? "zero1" : "zero3");
        EXPECT_EQ(group->options().grad_divisor, chosen ? 2 : is_root ? 3 : 1);
        for (std::int64_t i = 0; i < group->layout().num_tensors(); ++i) {
          const TensorSpec& spec = group->layout().spec(i);
          EXPECT_EQ(
              spec.granularity,
              spec.name == "block1.experts" ? Granularity::tensor()
              : chosen                      ? Granularity::row()
                                            : Granularity())
              << spec.name;
        }
      }
    }
    EXPECT_THAT(
        message_of([&] {
          (void)runtime->unit_of(
              dynamic_cast<nn::Module&>(*block.children().front()));
        }),
        HasSubstr("expected the root or a module of FullyShardOptions::units"));
  });
}

TEST(Placement, R23_SlotsArePlannedForThePoliciesOfUnits) {
  const auto arena_nbytes = [](bool by_choice, bool reshard) {
    std::int64_t nbytes = 0;
    // On one rank weights stay, and have no slots.
    run_ranks(2, [&](RankContext& context) {
      ExpertModel model(2);
      FullyShardOptions options{.units = model->unit_modules()};
      options.runtime.reshard_after_forward = by_choice || reshard;
      if (by_choice) {
        options.unit_choices.push_back({.module = model.get()});
        for (nn::Module* const unit : model->unit_modules()) {
          options.unit_choices.push_back({.module = unit});
        }
        for (UnitChoice& choice : options.unit_choices) {
          choice.policy = UnitPolicy{.reshard_after_forward = reshard};
        }
      }
      const auto runtime = fully_shard(*model, context.mesh(), options);
      if (context.rank == 0) {
        nbytes = runtime->executor().slots().places().arena_nbytes();
      }
    });
    return nbytes;
  };
  EXPECT_EQ(arena_nbytes(true, true), arena_nbytes(false, true));
  EXPECT_EQ(arena_nbytes(true, false), arena_nbytes(false, false));
  EXPECT_NE(arena_nbytes(true, false), arena_nbytes(true, true));
}

TEST(Placement, WhatCannotBeIsRefusedByName) {
  run_ranks(kRanks, [](RankContext& context) {
    const auto mesh = context.mesh({{"edp", 2}, {"ep", 2}});
    const auto refusal = [&](ParameterPlacement placement,
                             const std::string& strategy = "zero3") {
      ExpertModel model(2);
      return message_of([&] {
        (void)fully_shard(
            *model,
            mesh,
            {.units = model->unit_modules(),
             .strategy = strategy,
             .placement_of = [&](const std::string& name) {
               return name == "block0.experts" ? placement
                                               : ParameterPlacement{};
             }});
      });
    };
    const auto edp = mesh->sub_mesh({"edp"});
    EXPECT_THAT(
        refusal({.slice = TensorSlice().cut(0, 0, 2)}),
        HasSubstr("parameter block0.experts is a slice of a larger tensor, but "
                  "all ranks of the model share it"));
    EXPECT_THAT(
        refusal({.mesh = edp, .slice = TensorSlice().take(0, 4, {{3, 4}})}),
        HasSubstr("parameter block0.experts: expected a size of 1 in dimension "
                  "0 of this rank's slice, got shape [2, "));
    EXPECT_THAT(
        refusal({.mesh = edp, .slice = TensorSlice().cut(0, 0, 2)}, "hsdp"),
        HasSubstr(
            "a parameter on the sub-mesh {edp: 2} needs a separate strategy"));
    EXPECT_THAT(
        refusal({.mesh = Mesh::single(at::kCPU)}),
        HasSubstr("parameter block0.experts: expected the model's mesh {edp: "
                  "2, ep: 2} or a sub-mesh of it, got {dp: 1}"));
    const auto choices = [&](std::vector<nn::Module*> modules) {
      ExpertModel model(2);
      FullyShardOptions options;
      for (nn::Module* const module : modules) {
        options.unit_choices.push_back(
            {.module = module != nullptr ? module : model.get()});
      }
      return message_of([&] { (void)fully_shard(*model, mesh, options); });
    };
    ExpertModel other(2);
    EXPECT_THAT(
        choices({nullptr, nullptr}),
        HasSubstr("unit_choices: expected unit root once, got it twice"));
    EXPECT_THAT(
        choices({other.get()}),
        HasSubstr("FullyShardOptions::unit_choices is not below the root"));
  });
}

}  // namespace
}  // namespace flatshard
