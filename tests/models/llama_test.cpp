#include "flatshard/models/llama.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "flatshard/models/flops.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/nn/recompute.h"
#include "tests/support/counted_operation.h"
#include "tests/support/sum_order.h"

#include <map>

namespace flatshard::models {
namespace {

ModelConfig small(bool tied = false) {
  return {
      .dim = 24,
      .layers = 2,
      .heads = 6,
      .kv_heads = 2,
      .ffn_dim = 40,
      .vocab_size = 31,
      .max_seq_len = 16,
      .rope_theta = 1000.0,
      .tie_embeddings = tied};
}

Llama make(
    const ModelConfig& config,
    at::ScalarType dtype = at::kFloat,
    LlamaOptions options = {}) {
  Llama model(config, options);
  nn::materialize(
      *model,
      at::kCPU,
      dtype,
      nn::random_fill(at::make_generator<at::CPUGeneratorImpl>(4)));
  return model;
}

at::Tensor tokens(std::uint64_t seed) {
  return at::randint(
      31,
      {3, 11},
      at::make_generator<at::CPUGeneratorImpl>(seed),
      at::kLong);
}

using Weights = std::map<std::string, at::Tensor>;

// Returns the model written down once more, with plain ATen and Hugging Face
// names.
at::Tensor
reference_logits(const ModelConfig& c, Weights& w, const at::Tensor& ids) {
  const std::int64_t b = ids.size(0), t = ids.size(1), d = c.dim / c.heads;
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return x * (x.square().mean(-1, true) + c.norm_eps).rsqrt() * w.at(name);
  };
  const at::Tensor angle = at::outer(
      at::arange(t, at::kDouble),
      at::pow(c.rope_theta, at::arange(0, d, 2, at::kDouble) / -double(d)));
  const at::Tensor cos = at::cat({angle, angle}, -1).cos();
  const at::Tensor sin = at::cat({angle, angle}, -1).sin();
  const auto heads = [&](const at::Tensor& x) {
    return x.view({b, t, -1, d}).transpose(1, 2);
  };
  const auto rotate = [&](const at::Tensor& x) {
    const auto half = x.chunk(2, -1);
    return x * cos + at::cat({-half[1], half[0]}, -1) * sin;
  };
  const at::Tensor hidden_from =
      at::ones({t, t}, at::kBool).tril().logical_not();
  at::Tensor x = at::embedding(w.at("model.embed_tokens.weight"), ids);
  for (std::int64_t i = 0; i < c.layers; ++i) {
    const std::string p = "model.layers." + std::to_string(i) + ".";
    const auto project = [&](const at::Tensor& in, const char* name) {
      return at::linear(in, w.at(p + name + ".weight"));
    };
    const at::Tensor h = norm(x, p + "input_layernorm.weight");
    const at::Tensor q = rotate(heads(project(h, "self_attn.q_proj")));
    const std::int64_t n = c.heads / c.kv_heads;
    const at::Tensor k =
        rotate(heads(project(h, "self_attn.k_proj"))).repeat_interleave(n, 1);
    const at::Tensor v =
        heads(project(h, "self_attn.v_proj")).repeat_interleave(n, 1);
    const at::Tensor a =
        (at::matmul(q, k.transpose(2, 3)) / std::sqrt(double(d)))
            .masked_fill(hidden_from, -INFINITY)
            .softmax(-1);
    x = x + project(
                at::matmul(a, v).transpose(1, 2).reshape({b, t, -1}),
                "self_attn.o_proj");
    const at::Tensor m = norm(x, p + "post_attention_layernorm.weight");
    x = x +
        project(
            at::silu(project(m, "mlp.gate_proj")) * project(m, "mlp.up_proj"),
            "mlp.down_proj");
  }
  const std::string head =
      c.tie_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
  return at::linear(norm(x, "model.norm.weight"), w.at(head));
}

double error(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor g = got.detach().to(at::kDouble);
  const at::Tensor e = want.detach();
  return ((g - e).norm() / e.norm()).item<double>();
}

struct Case {
  bool tied;
  at::ScalarType dtype;
  ActivationCheckpoint checkpoint;
};

class LlamaModel : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    Cases,
    LlamaModel,
    ::testing::Values(
        Case{false, at::kFloat, ActivationCheckpoint::none},
        Case{true, at::kFloat, ActivationCheckpoint::full},
        Case{false, at::kFloat, ActivationCheckpoint::selective},
        Case{false, at::kBFloat16, ActivationCheckpoint::none}));

/// Returns the tolerance of forward and backward of `small()`.
double passes_tolerance() {
  const ModelConfig config = small();
  return testing::sum_tolerance(
      {.addends = config.ffn_dim,
       .in_a_row = testing::sums_of_steps(config.layers, 1)});
}

// In bfloat16 2 layers of about 12 roundings each are on a path, in the norm of
// a tensor: 24 half-ulps.
TEST_P(LlamaModel, LossLogitsAndGradientsMatchPlainTorch) {
  const Case& c = GetParam();
  const double tol = c.dtype == at::kFloat ? passes_tolerance() : 24 * 0x1p-8;
  const ModelConfig config = small(c.tied);
  Llama model = make(config, c.dtype, {.activation_checkpoint = c.checkpoint});
  Weights weights;
  for (const auto& p : nn::named_parameters(*model)) {
    // Larger weights than at initialization, so that every part matters.
    const at::NoGradGuard no_grad;
    if (p.name != "lm_head.weight" || !c.tied) {
      p.tensor.mul_(p.info->init.kind == InitSpec::Kind::normal ? 8 : 1);
    }
    weights[to_hf_name(p.name)] = p.tensor.detach().to(at::kDouble);
  }
  for (auto& [name, weight] : weights) {
    weight.set_requires_grad(true);
  }
  const at::Tensor ids = tokens(1), targets = tokens(2);
  const at::Tensor loss = forward_loss(model, ids, targets);
  loss.backward();
  const at::Tensor want_logits = reference_logits(config, weights, ids);
  const at::Tensor want =
      at::cross_entropy_loss(want_logits.view({-1, 31}), targets.view({-1}));
  want.backward();
  EXPECT_LE(error(loss, want), tol);
  EXPECT_LE(error(logits(model, ids), want_logits), tol);
  for (const auto& p : nn::named_parameters(*model)) {
    if (c.tied && p.name == "lm_head.weight") {
      continue;
    }
    EXPECT_LE(
        error(p.tensor.grad(), weights.at(to_hf_name(p.name)).grad()),
        tol)
        << p.name;
  }
}

TEST(LlamaRecompute, IsBitwiseTheSame) {
  std::vector<std::vector<at::Tensor>> runs;
  for (const auto& [mode, keep] :
       {std::pair{ActivationCheckpoint::none, false},
        {ActivationCheckpoint::full, false},
        {ActivationCheckpoint::full, true},
        {ActivationCheckpoint::selective, false}}) {
    Llama model = make(
        small(),
        at::kFloat,
        {.activation_checkpoint = mode, .keep_attention = keep});
    const at::Tensor loss = model(tokens(1), tokens(2));
    loss.backward();
    std::vector<at::Tensor> run{loss.detach()};
    for (const at::Tensor& p : model->parameters()) {
      run.push_back(p.grad());
    }
    runs.push_back(run);
  }
  for (std::size_t i = 0; i < runs[0].size(); ++i) {
    EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << i;
    EXPECT_TRUE(at::equal(runs[0][i], runs[2][i])) << i;
    // The selective mode adds the residual before the norm, not inside it.
    const double size = runs[0][i].abs().max().item<double>();
    EXPECT_LE(
        (runs[0][i] - runs[3][i]).abs().max().item<double>(),
        passes_tolerance() * size)
        << i;
  }
}

nn::Module& module_of(Llama& model, const std::string& name) {
  for (const auto& item : model->named_modules()) {
    if (item.key() == name) {
      return dynamic_cast<nn::Module&>(*item.value());
    }
  }
  throw std::runtime_error("no module " + name);
}

// With its residual, down is the only addmm of a forward: it makes the result
// of the part that runs again. Nothing reads it.
TEST(LlamaRecompute, ASecondRunMakesNoResultOfItsPart) {
  const auto products = [](const char* of, const LlamaOptions& options) {
    Llama model = make(small(), at::kFloat, options);
    testing::CountedOperation counted(of);
    model(tokens(1), tokens(2)).backward();
    return counted.take();
  };
  using enum ActivationCheckpoint;
  const std::int64_t mm = products("aten::mm", {});
  const std::int64_t addmm = products("aten::addmm", {});
  const LlamaOptions once{.activation_checkpoint = full};
  EXPECT_EQ(products("aten::mm", once) - mm, 2 * 6);
  EXPECT_EQ(products("aten::addmm", once), addmm);
  const LlamaOptions first{
      .activation_checkpoint = full,
      .checkpointed_layers = 1};
  EXPECT_EQ(products("aten::mm", first) - mm, 6);
  const LlamaOptions half{.activation_checkpoint = selective};
  EXPECT_EQ(products("aten::mm", half) - mm, 2 * 2);
  EXPECT_EQ(products("aten::addmm", half), addmm);
  for (const auto mode : {full, selective}) {
    const LlamaOptions one{
        .activation_checkpoint = mode,
        .mlp_chunk_tokens = 33};
    EXPECT_EQ(
        products("aten::mm", one),
        products("aten::mm", mode == full ? once : half));
    EXPECT_EQ(products("aten::addmm", one), addmm);
  }
}

// The second run of the part around both reads the result of the first block,
// with or without gradients.
TEST(LlamaRecompute, L8_PartsInsideAnotherHaveTheirResults) {
  const auto gradients =
      [](const LlamaOptions& options, bool recompute, bool is_frozen) {
        Llama model = make(small(), at::kFloat, options);
        const auto first = [&](const at::Tensor& x) {
          const at::AutoGradMode grad_mode(
              at::GradMode::is_enabled() && !is_frozen);
          return model->blocks()[0](x);
        };
        const auto blocks = [&](const at::Tensor& x) {
          return model->blocks()[1](x + first(x));
        };
        const at::Tensor x =
            at::randn({3, 11, 24}, at::make_generator<at::CPUGeneratorImpl>(7))
                .requires_grad_();
        (recompute ? nn::checkpoint(*model, blocks, x) : blocks(x))
            .square()
            .sum()
            .backward();
        std::vector<at::Tensor> run{x.grad()};
        for (const at::Tensor& p : model->blocks()[is_frozen]->parameters()) {
          run.push_back(p.grad());
        }
        return run;
      };
  for (const auto mode :
       {ActivationCheckpoint::none,
        ActivationCheckpoint::full,
        ActivationCheckpoint::selective}) {
    for (const std::int64_t chunk : {0, 33}) {
      if (chunk > 0 && mode == ActivationCheckpoint::none) {
        continue;
      }
      const LlamaOptions options{
          .activation_checkpoint = mode,
          .mlp_chunk_tokens = chunk};
      for (const bool is_frozen : {false, true}) {
        const auto want = gradients(options, false, is_frozen);
        const auto got = gradients(options, true, is_frozen);
        for (std::size_t i = 0; i < want.size(); ++i) {
          EXPECT_TRUE(at::equal(got[i], want[i])) << i << " " << chunk;
        }
      }
    }
  }
}

// Hooks that read results run where there are any: in the first run. Hooks of
// units run in both.
TEST(LlamaRecompute, HooksReadResultsInTheFirstRun) {
  for (const LlamaOptions& options :
       {LlamaOptions{.activation_checkpoint = ActivationCheckpoint::full},
        LlamaOptions{.activation_checkpoint = ActivationCheckpoint::selective},
        LlamaOptions{
            .activation_checkpoint = ActivationCheckpoint::full,
           .mlp_chunk_tokens = 33}}) {
    for (const auto& [name, runs] :
         {std::pair("mlp", 1),
          {"mlp.down_proj", 1},
          {"mlp.up_proj", 2},
          {"self_attn",
           options.activation_checkpoint == ActivationCheckpoint::full ? 2
                                                                       : 1}}) {
      Llama model = make(small(), at::kFloat, options);
      nn::Module& module =
          module_of(model, std::string("model.layers.1.") + name);
      std::vector<at::Tensor> seen;
      const auto reader = module.add_forward_hook(
          [&](nn::Module&, const nn::TensorList&, const nn::TensorList& r) {
            seen.push_back(r.at(0).detach().clone());
          });
      model(tokens(1), tokens(2)).backward();
      ASSERT_EQ(seen.size(), static_cast<std::size_t>(runs)) << name;
      for (const at::Tensor& result : seen) {
        EXPECT_TRUE(at::equal(result, seen.front())) << name;
      }
    }
    Llama model = make(small(), at::kFloat, options);
    int calls = 0;
    const auto follower =
        module_of(model, "model.layers.1.mlp")
            .add_forward_hook(
                [&](nn::Module&, const nn::TensorList&, const nn::TensorList&) {
                  ++calls;
                },
                /*reads_values=*/false);
    model(tokens(1), tokens(2)).backward();
    EXPECT_EQ(calls, 2);
  }
}

// Sums over runs of tokens are in another order.
TEST(LlamaTokenRuns, EqualTheWhole) {
  const auto gradients = [](LlamaOptions options) {
    Llama model = make(small(), at::kFloat, std::move(options));
    const at::Tensor loss = model(tokens(1), tokens(2));
    loss.backward();
    std::vector<at::Tensor> run{loss.detach()};
    for (const at::Tensor& p : model->parameters()) {
      run.push_back(p.grad());
    }
    return run;
  };
  const auto want = gradients({});
  for (const auto mode :
       {ActivationCheckpoint::full, ActivationCheckpoint::selective}) {
    for (const std::int64_t chunk : {7, 33, 1000}) {
      const auto got = gradients(
          {.activation_checkpoint = mode,
           .keep_attention = mode == ActivationCheckpoint::full,
           .mlp_chunk_tokens = chunk});
      for (std::size_t i = 0; i < want.size(); ++i) {
        const double size = want[i].abs().max().item<double>();
        EXPECT_LE(
            (got[i] - want[i]).abs().max().item<double>(),
            passes_tolerance() * size)
            << i << " " << chunk;
      }
    }
  }
  EXPECT_THROW(Llama(small(), LlamaOptions{.mlp_chunk_tokens = 7}), Error);
}

TEST(LlamaNames, AreHuggingFaces) {
  ModelConfig config = small();
  config.layers = 1;
  Llama model(config);
  std::vector<std::string> names;
  for (const auto& p : nn::named_parameters(*model)) {
    EXPECT_TRUE(p.tensor.is_meta());
    names.push_back(to_hf_name(p.name));
  }
  EXPECT_THAT(
      names,
      ::testing::UnorderedElementsAre(
          "model.embed_tokens.weight",
          "model.layers.0.input_layernorm.weight",
          "model.layers.0.self_attn.q_proj.weight",
          "model.layers.0.self_attn.k_proj.weight",
          "model.layers.0.self_attn.v_proj.weight",
          "model.layers.0.self_attn.o_proj.weight",
          "model.layers.0.post_attention_layernorm.weight",
          "model.layers.0.mlp.gate_proj.weight",
          "model.layers.0.mlp.up_proj.weight",
          "model.layers.0.mlp.down_proj.weight",
          "model.norm.weight",
          "lm_head.weight"));
}

TEST(LlamaSize, A405BModelIsBuiltWithoutMemoryAndCountsRight) {
  for (const std::string_view name : preset_names()) {
    const ModelConfig config = preset(name);
    Llama model(config);
    std::map<const c10::TensorImpl*, std::int64_t> numel;
    for (const at::Tensor& p : model->parameters()) {
      numel[p.unsafeGetTensorImpl()] = p.numel();
    }
    std::int64_t total = 0;
    for (const auto& [impl, n] : numel) {
      total += n;
    }
    EXPECT_EQ(total, num_parameters(config)) << name;
  }
}

TEST(LlamaUnits, HoldAllParametersInForwardOrder) {
  Llama model(small());
  const auto units = model->unit_modules();
  ASSERT_EQ(units.size(), 4U);
  std::size_t count = 0;
  for (const auto& unit : units) {
    count += unit->parameters().size();
  }
  EXPECT_EQ(count, model->parameters().size());
  std::vector<std::string> order;
  std::vector<nn::HookHandle> handles;
  for (const auto& unit : units) {
    handles.push_back(unit->add_forward_hook(
        [&](nn::Module& m, const nn::TensorList&, const nn::TensorList& out) {
          EXPECT_EQ(out.size(), 1U);
          order.push_back(m.name());
        }));
  }
  nn::materialize(*model, at::kCPU, at::kFloat, nn::random_fill());
  model(tokens(1), tokens(2));
  EXPECT_THAT(
      order,
      ::testing::ElementsAre(
          "Embedding",
          "LlamaBlock",
          "LlamaBlock",
          "LlamaHead"));
}

TEST(LlamaInit, ScalesResidualProjections) {
  Llama model(small());
  for (const auto& p : nn::named_parameters(*model)) {
    const bool scaled = p.name.find("o_proj") != std::string::npos ||
                        p.name.find("down_proj") != std::string::npos;
    if (p.tensor.dim() == 2) {
      EXPECT_FLOAT_EQ(p.info->init.stddev, scaled ? 0.01F : 0.02F) << p.name;
    }
  }
}

TEST(LlamaErrors, AreNamed) {
  Llama model = make(small());
  try {
    model(at::zeros({1, 17}, at::kLong));
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_EQ(
        e.message(),
        "expected at most max_seq_len = 16 tokens in a sequence, got 17");
  }
}

}  // namespace
}  // namespace flatshard::models
