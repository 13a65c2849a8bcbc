// A forward in pieces, each with its own backward.
#include "flatshard/nn/detached.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <stdexcept>
#include <vector>

namespace flatshard::nn {
namespace {

constexpr int kLayers = 4;
constexpr int kMicrobatches = 3;
constexpr std::int64_t kRows = 6;
constexpr std::int64_t kDim = 8;

at::Tensor values(std::uint64_t seed, at::IntArrayRef sizes) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

// attend: h -> (h + f(h), its rows); experts: rows -> rows; combine: both -> h.
struct ToyLayer {
  at::Tensor attend, expert, gain;

  explicit ToyLayer(std::uint64_t seed)
      : attend(values(seed, {kDim, kDim})),
        expert(values(seed + 1, {kDim, kDim})),
        gain(values(seed + 2, {kDim})) {
    for (at::Tensor* p : {&attend, &expert, &gain}) {
      p->set_requires_grad(true);
    }
  }
  TensorList run_attend(const TensorList& in) const {
    const at::Tensor h = in[0] + at::tanh(at::mm(in[0], attend)) * 0.1;
    return {h, h * gain};
  }
  TensorList run_experts(const TensorList& in) const {
    return {at::tanh(at::mm(in[0], expert))};
  }
  static TensorList run_combine(const TensorList& in) {
    return {in[0] + in[1] * 0.5};
  }
};

struct ToyStack {
  std::vector<ToyLayer> layers;
  bool fails = false;

  ToyStack() {
    for (int l = 0; l < kLayers; ++l) {
      layers.emplace_back(10 * l);
    }
  }
  static at::Tensor input(int m) { return values(100 + m, {kRows, kDim}); }

  // Returns the loss of an undivided graph.
  double plain(int m) const {
    at::Tensor h = input(m);
    for (const ToyLayer& layer : layers) {
      const TensorList a = layer.run_attend({h});
      h = ToyLayer::run_combine({a[0], layer.run_experts({a[1]})[0]})[0];
    }
    const at::Tensor loss = h.square().mean();
    torch::autograd::backward({loss}, {at::ones({})});
    return loss.item<double>();
  }

  // Returns the loss with a detached node for each part. `failing` is the
  // forward that throws, or the number of forwards and the backward.
  double cut(int m, int failing = -1) const {
    int step = 0;
    const auto next = [&] {
      if (step++ == failing) {
        throw std::runtime_error("a node fails");
      }
    };
    std::vector<DetachedNode> attend(kLayers), experts(kLayers),
        combine(kLayers);
    DetachedNode head;
    at::Tensor h = input(m);
    for (int l = 0; l < kLayers; ++l) {
      const ToyLayer& layer = layers[l];
      next();
      const TensorList a = attend[l].forward({h}, [&](const TensorList& in) {
        return layer.run_attend(in);
      });
      EXPECT_TRUE(a[0].is_leaf());
      next();
      const TensorList e = experts[l].forward(
          {a[1]},
          [&](const TensorList& in) { return layer.run_experts(in); });
      h = combine[l].forward({a[0], e[0]}, ToyLayer::run_combine)[0];
    }
    const TensorList loss = head.forward({h}, [](const TensorList& in) {
      return TensorList{in[0].square().mean()};
    });
    at::Tensor g = head.backward({at::ones({})})[0];
    for (int l = kLayers - 1; l >= 0; --l) {
      const TensorList c = combine[l].backward({g});
      next();
      const TensorList e = experts[l].backward({c[1]});
      next();
      g = attend[l].backward({c[0], e[0]})[0];
    }
    EXPECT_FALSE(g.defined());  // the input wanted none
    return loss[0].item<double>();
  }

  TensorList take_gradients() {
    TensorList grads;
    for (ToyLayer& layer : layers) {
      for (at::Tensor* p : {&layer.attend, &layer.expert, &layer.gain}) {
        grads.push_back(p->grad());
        p->mutable_grad() = at::Tensor();
      }
    }
    return grads;
  }
};

void expect_same(const TensorList& a, const TensorList& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(a[i].defined() && b[i].defined()) << i;
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

TEST(DetachedNode, AStackOfNodesHasTheGradientsOfTheWholeGraph) {
  ToyStack stack;
  std::vector<double> plain, cut;
  for (int m = 0; m < kMicrobatches; ++m) {
    plain.push_back(stack.plain(m));
  }
  const TensorList want = stack.take_gradients();
  for (int m = 0; m < kMicrobatches; ++m) {
    cut.push_back(stack.cut(m));
  }
  EXPECT_EQ(plain, cut);
  expect_same(stack.take_gradients(), want);
}

TEST(DetachedNode, AnExceptionInAnyNodeLeavesTheNextStepRight) {
  ToyStack stack;
  stack.cut(0);
  const TensorList want = stack.take_gradients();
  for (int failing = 0; failing < 4 * kLayers; ++failing) {
    EXPECT_THROW(stack.cut(1, failing), std::runtime_error) << failing;
    stack.take_gradients();
    stack.cut(0);
    expect_same(stack.take_gradients(), want);
  }
}

TEST(DetachedNode, TheGraphGoesWithItsBackwardAlsoWhenThatThrows) {
  DetachedNode node;
  const at::Tensor x = at::ones({3}).set_requires_grad(true);
  const auto body = [](const TensorList& in) {
    at::Tensor y = in[0] * 2;
    y.register_hook([](const at::Tensor&) -> void {
      throw std::runtime_error("in the backward");
    });
    return TensorList{y};
  };
  node.forward({x}, body);
  EXPECT_TRUE(node.has_graph());
  EXPECT_THROW(node.backward({at::ones({3})}), std::runtime_error);
  EXPECT_FALSE(node.has_graph());
  EXPECT_FALSE(x.grad().defined());
  EXPECT_THROW(node.backward({at::ones({3})}), Error);
}

// An input and an output that no operation saves are not kept alive.
TEST(DetachedNode, KeepsNothingThatItsOperationsDoNot) {
  DetachedNode node;
  at::Tensor x = at::ones({3}).set_requires_grad(true);
  TensorList out = node.forward({x}, [](const TensorList& in) {
    return TensorList{in[0] * 2};
  });
  const c10::weak_intrusive_ptr<c10::StorageImpl> input(
      x.storage().getWeakStorageImpl());
  const c10::weak_intrusive_ptr<c10::StorageImpl> output(
      out[0].storage().getWeakStorageImpl());
  x.reset();
  out.clear();
  EXPECT_TRUE(input.expired());
  EXPECT_TRUE(output.expired());
  EXPECT_TRUE(at::equal(node.backward({at::ones({3})})[0], at::full({3}, 2.0)));
}

TEST(DetachedNode, RefusesAnotherNumberOfGradients) {
  DetachedNode node;
  node.forward({at::ones({3})}, [](const TensorList& in) { return in; });
  EXPECT_THROW(node.backward({}), Error);
  EXPECT_TRUE(node.has_graph());
}

TEST(DetachedNode, PassesOverWhatIsUndefinedOrNotAskedFor) {
  DetachedNode node;
  const at::Tensor a = at::ones({2}).set_requires_grad(true);
  const at::Tensor b = at::ones({2}).set_requires_grad(true);
  const at::Tensor ids = at::arange(2);
  const TensorList out =
      node.forward({a, ids, at::Tensor(), b}, [](const TensorList& in) {
        return TensorList{in[0] * in[1], in[3] * 3, in[1]};
      });
  EXPECT_TRUE(out[0].requires_grad());
  EXPECT_FALSE(out[2].requires_grad());
  const TensorList grads =
      node.backward({at::full({2}, 5.0), at::Tensor(), at::Tensor()});
  ASSERT_EQ(grads.size(), 4U);
  EXPECT_TRUE(at::equal(grads[0], at::arange(2) * 5.0));
  EXPECT_FALSE(grads[1].defined());
  EXPECT_FALSE(grads[2].defined());
  EXPECT_FALSE(grads[3].defined());
}

}  // namespace
}  // namespace flatshard::nn
