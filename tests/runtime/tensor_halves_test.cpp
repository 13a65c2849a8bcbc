// Two ranks that share layers have the bits of one rank that computes both
// halves and adds them.
#include "flatshard/models/llama.h"
#include "flatshard/nn/embedding.h"
#include "flatshard/nn/rope.h"
#include "flatshard/nn/swiglu.h"
#include "flatshard/tensor_parallel/collective_tensor_parallel.h"
#include "flatshard/tensor_parallel/peer_tensor_parallel.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace flatshard::testing {
namespace {

using NamedTensors = std::map<std::string, at::Tensor>;
/// The tensors of each half: tokens, features or rows.
using Halves = std::array<at::Tensor, 2>;

constexpr std::int64_t kHalvesSeq = 10;

models::ModelConfig halves_config() {
  return {
      .dim = 16,
      .layers = 2,
      .heads = 4,
      .kv_heads = 2,
      .head_dim = 4,
      .ffn_dim = 24,
      .vocab_size = 30,
      .max_seq_len = kHalvesSeq,
      .rope_theta = 1000.0,
      .initializer_range = 0.2};
}

struct HalvesResult {
  double loss = 0;
  NamedTensors grads;  ///< of whole parameters
};

NamedTensors whole_weights() {
  models::Llama whole(halves_config());
  nn::materialize(
      *whole,
      at::kCPU,
      at::kFloat,
      nn::random_fill(at::make_generator<at::CPUGeneratorImpl>(4)));
  NamedTensors weights;
  for (const nn::NamedParameter& p : nn::named_parameters(*whole)) {
    weights[p.name] = p.tensor.detach().clone();
  }
  return weights;
}

at::Tensor random_tokens(std::uint64_t seed) {
  return at::randint(
      30,
      {1, kHalvesSeq},
      at::make_generator<at::CPUGeneratorImpl>(seed),
      at::kLong);
}

nn::TensorParallelPtr two_ranks(Mesh& mesh, bool copies) {
  const auto group = mesh.communicator(0, Purpose::exchange).shared_from_this();
  if (copies) {
    return std::make_shared<PeerTensorParallel>(group);
  }
  return std::make_shared<CollectiveTensorParallel>(group);
}

HalvesResult run_two_ranks(
    bool copies,
    const NamedTensors& weights,
    const at::Tensor& tokens,
    const at::Tensor& targets) {
  HalvesResult result;
  std::mutex mutex;
  run_ranks(2, [&](RankContext& context) {
    const auto mesh = context.mesh();
    models::LlamaOptions options;
    options.ranks = two_ranks(*mesh, copies);
    models::Llama llama(halves_config(), options);
    const nn::ParameterParts parts = nn::parts_below(*llama);
    const auto part_of = [&](const std::string& name, const at::Tensor& whole) {
      const auto found = parts.find(name);
      return found == parts.end() ? whole
                                  : whole.narrow(
                                        found->second.dim,
                                        found->second.part.begin,
                                        found->second.part.size());
    };
    nn::materialize(
        *llama,
        at::kCPU,
        at::kFloat,
        [&](const std::string& name, const InitSpec&, at::Tensor& tensor) {
          tensor.copy_(part_of(name, weights.at(name)));
        });
    const at::Tensor loss = llama(tokens, targets);
    loss.backward();
    const std::lock_guard lock(mutex);
    result.loss = loss.item<double>();
    for (const nn::NamedParameter& p : nn::named_parameters(*llama)) {
      at::Tensor& whole = result.grads[p.name];
      if (!whole.defined()) {
        whole = at::zeros_like(weights.at(p.name));
      }
      part_of(p.name, whole).add_(p.tensor.grad());
    }
  });
  return result;
}

bool is_row_parallel(const std::string& name) {
  return name.find("o_proj") != std::string::npos ||
         name.find("down_proj") != std::string::npos;
}

/// Both halves on one rank, added as `+` adds.
class BothHalves {
 public:
  explicit BothHalves(const NamedTensors& weights) : weights_(weights) {}

  HalvesResult run(const at::Tensor& tokens, const at::Tensor& targets) {
    Halves x =
        halves_of(nn::embedding(tokens, leaf("model.embed_tokens.weight")));
    for (int i = 0; i < 2; ++i) {
      const std::string block = "model.layers." + std::to_string(i) + ".";
      Halves attention = attend(
          block + "self_attn.",
          norm(block + "input_layernorm.weight", x, {}));
      const at::Tensor normed =
          norm(block + "post_attention_layernorm.weight", x, attention);
      x = feed_forward(block + "mlp.", x, normed);
    }
    HalvesResult result{
        .loss = head(norm("lm_head.norm.weight", x, {}), targets)};
    result.grads = std::move(grads_);
    for (const auto& [name, parts] : leaves_) {
      result.grads[name] = parts.size() == 1
                               ? parts[0].grad()
                               : at::cat(
                                     {parts[0].grad(), parts[1].grad()},
                                     is_row_parallel(name) ? 1 : 0);
    }
    return result;
  }

 private:
  static Halves halves_of(const at::Tensor& tokens) {
    const auto parts = tokens.chunk(2, 1);
    return {parts[0], parts[1]};
  }

  // Returns a parameter that both halves read.
  const at::Tensor& leaf(const std::string& name) {
    leaves_[name] = {weights_.at(name).clone().requires_grad_()};
    return leaves_[name][0];
  }

  nn::Linear linear(int half, const std::string& name) {
    const at::Tensor& whole = weights_.at(name + ".weight");
    const at::Tensor part =
        whole.chunk(2, is_row_parallel(name) ? 1 : 0)[half].clone();
    nn::Linear layer(part.size(1), part.size(0));
    nn::set_parameter_data(layer->weight(), part);
    leaves_[name + ".weight"].push_back(layer->weight());
    return layer;
  }

  // Norms each half of the tokens, after adding `delta` to it, and returns all.
  at::Tensor norm(const std::string& name, Halves& x, const Halves& delta) {
    const at::Tensor& weight = leaf(name);
    Halves normed;
    for (int h = 0; h < 2; ++h) {
      std::tie(x[h], normed[h]) =
          nn::add_rms_norm(x[h], delta[h], weight, halves_config().norm_eps);
    }
    return at::cat({normed[0], normed[1]}, 1);
  }

  Halves attend(const std::string& name, const at::Tensor& normed) {
    nn::RopeTable rope({.head_dim = 4, .theta = 1000.0});
    const auto [cos, sin] = rope.get(kHalvesSeq, at::kCPU);
    const auto heads = [](const at::Tensor& t) {
      return t.view({1, kHalvesSeq, -1, 4});
    };
    Halves out;
    for (int h = 0; h < 2; ++h) {
      nn::Linear q = linear(h, name + "q_proj");
      nn::Linear k = linear(h, name + "k_proj");
      nn::Linear v = linear(h, name + "v_proj");
      const auto qkv = nn::linears(normed, {q.get(), k.get(), v.get()});
      out[h] = linear(h, name + "o_proj")(nn::causal_attention(
          nn::rope(heads(qkv[0]), cos, sin),
          nn::rope(heads(qkv[1]), cos, sin),
          heads(qkv[2])));
    }
    return halves_of(out[0] + out[1]);
  }

  Halves feed_forward(
      const std::string& name,
      const Halves& x,
      const at::Tensor& normed) {
    Halves out;
    for (int h = 0; h < 2; ++h) {
      nn::Linear gate = linear(h, name + "gate_proj");
      nn::Linear up = linear(h, name + "up_proj");
      nn::Linear down = linear(h, name + "down_proj");
      const auto outs = nn::linears(normed, {gate.get(), up.get()});
      out[h] = nn::swiglu_linear(outs[0], outs[1], *down, {});
    }
    const Halves sums = halves_of(out[0] + out[1]);
    return {sums[0] + x[0], sums[1] + x[1]};
  }

  // Loss and backward, with the softmax of both halves of the vocabulary.
  double head(const at::Tensor& hidden, const at::Tensor& targets) {
    const std::string name = "lm_head.weight";
    const at::Tensor rows = hidden.detach().view({kHalvesSeq, -1});
    const at::Tensor index = targets.view({-1});
    const auto weights = weights_.at(name).chunk(2, 0);
    Halves logits, lse, target;
    for (int h = 0; h < 2; ++h) {
      logits[h] = at::mm(rows, weights[h].t());
      lse[h] = logits[h].logsumexp(-1);
      const std::int64_t vocab = weights[h].size(0);
      const at::Tensor here = index - h * vocab;
      const at::Tensor other = here.lt(0).logical_or_(here.ge(vocab));
      target[h] = logits[h]
                      .gather(1, here.masked_fill(other, 0).unsqueeze(1))
                      .squeeze(1)
                      .masked_fill(other, 0);
    }
    const at::Tensor all = at::stack({lse[0], lse[1]}).logsumexp(0);
    const at::Tensor loss = (all - (target[0] + target[1])).sum() *
                            (1.0F / static_cast<float>(kHalvesSeq));
    at::Tensor dx;
    std::vector<at::Tensor> dw;
    for (int h = 0; h < 2; ++h) {
      at::Tensor p = (logits[h] - all.unsqueeze(1)).exp();
      const std::int64_t vocab = weights[h].size(0);
      for (std::int64_t t = 0; t < kHalvesSeq; ++t) {
        const auto at = index[t].item<std::int64_t>() - h * vocab;
        if (at >= 0 && at < vocab) {
          p[t][at].add_(-1.0F);
        }
      }
      p.mul_(1.0F / static_cast<float>(kHalvesSeq));
      const at::Tensor part = at::mm(p, weights[h]);
      dx = dx.defined() ? dx + part : part;
      dw.push_back(at::mm(p.t(), rows));
    }
    grads_[name] = at::cat(dw);
    hidden.backward(dx.view(hidden.sizes()));
    return loss.item<double>();
  }

  const NamedTensors& weights_;
  std::map<std::string, std::vector<at::Tensor>> leaves_;
  NamedTensors grads_;
};

class TensorParallelHalves : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(
    Copies,
    TensorParallelHalves,
    ::testing::Bool(),
    ::testing::PrintToStringParamName());

TEST_P(TensorParallelHalves, TwoRanksHaveTheBitsOfOneThatAddsBoth) {
  const NamedTensors weights = whole_weights();
  const at::Tensor tokens = random_tokens(5);
  const at::Tensor targets = random_tokens(6);
  const HalvesResult got = run_two_ranks(GetParam(), weights, tokens, targets);
  const HalvesResult want = BothHalves(weights).run(tokens, targets);
  EXPECT_EQ(got.loss, want.loss);
  ASSERT_EQ(got.grads.size(), want.grads.size());
  for (const auto& [name, grad] : want.grads) {
    ASSERT_TRUE(got.grads.contains(name)) << name;
    EXPECT_TRUE(at::equal(got.grads.at(name), grad))
        << name << " differs by "
        << (got.grads.at(name) - grad).abs().max().item<double>();
  }
}

}  // namespace
}  // namespace flatshard::testing
