#include "flatshard/nn/module.h"

#include <gtest/gtest.h>

#include <torch/csrc/autograd/variable.h>

#include "flatshard/core/error.h"

namespace user {
struct Batch {
  at::Tensor tokens;
  std::vector<at::Tensor> extra;
};
template <class F>
void for_each_tensor(const Batch& batch, F&& fn) {
  flatshard::nn::for_each_tensor(batch.tokens, fn);
  flatshard::nn::for_each_tensor(batch.extra, fn);
}
}  // namespace user

namespace flatshard::nn {
namespace {

using Nested = std::map<std::string, std::vector<std::pair<int, at::Tensor>>>;

class ScaleImpl : public Module {
 public:
  ScaleImpl() : Module("Scale") {
    weight_ = declare_parameter("weight", {3, 4}, InitSpec::normal(0, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight_; }
  const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor weight_;
};
FLATSHARD_MODULE(Scale);

class Nested_Impl : public Module {
 public:
  Nested forward(
      const user::Batch& batch,
      std::optional<at::Tensor> mask,
      int number) {
    FLATSHARD_CHECK(number >= 0, usage, "expected number >= 0, got {}", number);
    return {{"a", {{1, batch.tokens}, {2, batch.extra.at(0)}}}};
  }
};
FLATSHARD_MODULE(Nested_);

TEST(ForEachTensor, FindsTensorsInNestedContainersInOrder) {
  const at::Tensor a = at::ones({1}), b = at::ones({2}), c = at::ones({3});
  const auto value = std::make_tuple(
      7,
      std::string("text"),
      std::vector<std::array<at::Tensor, 1>>{{a}},
      std::optional<at::Tensor>(),
      user::Batch{.tokens = b, .extra = {c, at::Tensor()}},
      std::variant<int, at::Tensor>(a));
  const TensorList found = collect_tensors(value);
  ASSERT_EQ(found.size(), 4U);
  EXPECT_TRUE(found[0].is_same(a));
  EXPECT_TRUE(found[1].is_same(b));
  EXPECT_TRUE(found[2].is_same(c));
  EXPECT_TRUE(found[3].is_same(a));
}

TEST(Module, ParametersAreDeclaredWithoutMemoryAndKeepTheirIdentity) {
  Scale scale;
  const at::Tensor before = scale->weight();
  EXPECT_TRUE(before.is_meta());
  EXPECT_TRUE(before.requires_grad());
  const c10::TensorImpl* impl = before.unsafeGetTensorImpl();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    set_parameter_data(before, at::full({3, 4}, 2, dtype));
    EXPECT_EQ(scale->weight().unsafeGetTensorImpl(), impl);
    EXPECT_EQ(scale->parameters()[0].unsafeGetTensorImpl(), impl);
    EXPECT_EQ(scale->weight().scalar_type(), dtype);
    EXPECT_TRUE(scale->weight().is_cpu());
    EXPECT_TRUE(scale->weight().is_leaf());
    const at::Tensor x = at::ones({3, 4}, dtype);
    scale(x).sum().backward();
    EXPECT_EQ(scale->weight().grad().scalar_type(), dtype);
    scale->weight().mutable_grad() = at::Tensor();
  }
}

TEST(Module, AnAccumulatorMadeOnMetaIsRenewed) {
  Scale scale;
  const auto old = torch::autograd::impl::grad_accumulator(scale->weight());
  set_parameter_data(scale->weight(), at::ones({3, 4}));
  EXPECT_NE(torch::autograd::impl::grad_accumulator(scale->weight()), old);
  scale(at::ones({3, 4})).sum().backward();
  EXPECT_TRUE(scale->weight().grad().defined());
}

TEST(Module, SetParameterDataChecksTheShape) {
  Scale scale;
  try {
    set_parameter_data(scale->weight(), at::ones({2, 2}));
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_EQ(
        e.message(),
        "expected data of the parameter's shape [3, 4], got [2, 2]");
  }
}

TEST(Module, InfoAndAttributes) {
  Scale scale;
  scale->set_attribute("weight", "weight_decay", "none");
  const auto found = named_parameters(*scale);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].name, "weight");
  EXPECT_EQ(found[0].info->init, InitSpec::normal(0, 1));
  EXPECT_EQ(found[0].info->attributes.at("weight_decay"), "none");
  EXPECT_EQ(found[0].owner, scale.get());
  try {
    scale->init_spec("bias");
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_EQ(
        e.message(),
        "expected a parameter declared by module Scale, got 'bias'");
  }
}

TEST(Module, MaterializeFillsOnceAlsoWhenTied) {
  Module root("Root");
  auto first = std::make_shared<ScaleImpl>();
  auto second = std::make_shared<Module>("Second");
  root.register_module("first", first);
  root.register_module("second", second);
  second->share_parameter("weight", *first, "weight");
  std::vector<std::string> names;
  materialize(
      root,
      at::kCPU,
      at::kBFloat16,
      [&](const std::string& name, const InitSpec&, at::Tensor& tensor) {
        names.push_back(name);
        tensor.fill_(3);
      });
  EXPECT_EQ(names, std::vector<std::string>{"first.weight"});
  EXPECT_EQ(named_parameters(root).size(), 2U);
  EXPECT_EQ(second->parameters()[0].sum().item<float>(), 36.0F);
}

TEST(Hooks, R22_RunInOrderAroundForwardAndCanBeRemoved) {
  Scale scale;
  set_parameter_data(scale->weight(), at::ones({3, 4}));
  std::string events;
  const at::Tensor x = at::ones({3, 4});
  auto first = scale->add_forward_pre_hook(
      [&](Module& module, const TensorList& inputs) {
        EXPECT_EQ(&module, scale.get());
        EXPECT_TRUE(inputs.at(0).is_same(x));
        events += "a";
      });
  auto second = scale->add_forward_pre_hook(
      [&](Module&, const TensorList&) { events += "b"; });
  at::Tensor seen;
  auto after = scale->add_forward_hook(
      [&](Module&, const TensorList&, const TensorList& outputs) {
        seen = outputs.at(0);
        events += "c";
      });
  const at::Tensor y = scale(x);
  EXPECT_TRUE(y.is_same(seen));
  EXPECT_EQ(events, "abc");
  first.remove();
  scale(x);
  EXPECT_EQ(events, "abcbc");
  scale->forward(x);
  EXPECT_EQ(events, "abcbc");
  { const HookHandle gone = std::move(after); }
  second.keep();
  second.remove();
  scale(x);
  EXPECT_EQ(events, "abcbcb");
}

TEST(Hooks, OutliveTheirModule) {
  HookHandle handle;
  {
    Scale scale;
    handle = scale->add_forward_pre_hook([](Module&, const TensorList&) {});
  }
  handle.remove();
}

TEST(Hooks, SeeTensorsInNestedArgumentsAndResults) {
  Nested_ module;
  std::size_t num_inputs = 0;
  std::size_t num_outputs = 0;
  auto hook = module->add_forward_hook(
      [&](Module&, const TensorList& in, const TensorList& out) {
        num_inputs = in.size();
        num_outputs = out.size();
      });
  const user::Batch batch{.tokens = at::ones({1}), .extra = {at::ones({2})}};
  const Nested result = module(batch, std::optional(at::ones({3})), 1);
  EXPECT_EQ(result.at("a").size(), 2U);
  EXPECT_EQ(num_inputs, 3U);
  EXPECT_EQ(num_outputs, 2U);
}

TEST(Hooks, ErrorHooksSeeTheExceptionAndItGoesOn) {
  Nested_ module;
  int errors = 0;
  int afters = 0;
  auto after = module->add_forward_hook(
      [&](Module&, const TensorList&, const TensorList&) { ++afters; });
  auto error =
      module->add_forward_error_hook([&](Module&, std::exception_ptr e) {
        EXPECT_THROW(std::rethrow_exception(e), Error);
        ++errors;
        throw std::runtime_error("must not hide the first one");
      });
  EXPECT_THROW(module(user::Batch{}, std::nullopt, -1), Error);
  EXPECT_EQ(errors, 1);
  EXPECT_EQ(afters, 0);
  auto pre = module->add_forward_pre_hook([](Module&, const TensorList&) {
    FLATSHARD_THROW(comm, "gather failed");
  });
  EXPECT_THROW(module(user::Batch{}, std::nullopt, 1), Error);
  EXPECT_EQ(errors, 2);
}

TEST(Hooks, LeaveInPlaceOperationsLegal) {
  Scale scale;
  set_parameter_data(scale->weight(), at::ones({3, 4}));
  auto pre = scale->add_forward_pre_hook([](Module&, const TensorList&) {});
  auto after = scale->add_forward_hook(
      [](Module&, const TensorList&, const TensorList&) {});
  at::Tensor x = at::ones({3, 4}).requires_grad_() * 2;
  at::Tensor y = scale(x.mul(1));
  y.add_(1);
  y.sum().backward();
  EXPECT_EQ(scale->weight().grad().sum().item<float>(), 24.0F);
}

}  // namespace
}  // namespace flatshard::nn
