#include "tests/programs/model.h"

#include "flatshard/nn/linear.h"
#include "flatshard/nn/recompute.h"

#include <ATen/ATen.h>

#include <stdexcept>

namespace flatshard::testing {
namespace {

const InitSpec kWeight = InitSpec::normal(0, 0.4F);
const InitSpec kNearOne = InitSpec::normal(1, 0.1F);

// The gradient of `x` fails when it comes by.
void fail_in_backward(const at::Tensor& x) {
  if (x.requires_grad()) {
    x.register_hook(std::function<void(at::Tensor)>([](const at::Tensor&) {
      throw std::runtime_error("meant to fail in backward");
    }));
  }
}

}  // namespace

struct NodeImpl::Op {
  std::string kind;
  int number = 0;  ///< over the whole model
  nlohmann::json spec;
  nn::Linear linear{nullptr};
  at::Tensor p;
  at::Tensor q;
};

NodeImpl::NodeImpl(
    const nlohmann::json& spec,
    std::shared_ptr<Situation> situation,
    int& num_ops)
    : spec_(spec), situation_(std::move(situation)) {
  for (const auto& op : spec_.at("ops")) {
    add_op(op, num_ops++);
  }
  int index = 0;
  for (const auto& child : spec_.at("children")) {
    children_.push_back(register_module(
        "node" + std::to_string(index++),
        std::make_shared<NodeImpl>(child, situation_, num_ops)));
  }
}

void NodeImpl::add_op(const nlohmann::json& spec, int number) {
  auto op = std::make_shared<Op>();
  op->kind = spec.at("op");
  op->number = number;
  op->spec = spec;
  const std::string name = op->kind + std::to_string(ops_.size());
  const bool frozen = spec.value("frozen", false);
  const auto parameter = [&](std::vector<std::int64_t> shape, InitSpec init) {
    return declare_parameter(name, std::move(shape), init, !frozen);
  };
  if (op->kind == "linear" || op->kind == "twice" || op->kind == "lora") {
    op->linear = register_module(
        name,
        nn::Linear(
            kProgramDim,
            kProgramDim,
            nn::LinearOptions{.bias = op->kind == "linear", .init = kWeight}));
    if (frozen || op->kind == "lora") {
      for (auto& p : op->linear->parameters()) {
        p.set_requires_grad(false);
      }
    }
    if (op->kind == "lora") {
      op->p = declare_parameter(name + "_a", {kProgramDim, 2}, kWeight);
      op->q = declare_parameter(name + "_b", {2, kProgramDim}, kWeight);
    }
  } else if (op->kind == "gain") {
    op->p = parameter({kProgramDim}, kNearOne);
  } else if (op->kind == "scalar") {
    op->p = parameter({}, kWeight);
  } else if (op->kind == "empty") {
    op->p = parameter({0, 3}, kWeight);
  } else if (op->kind == "odd") {
    op->p = parameter({3, 1, 7}, kWeight);
  } else if (op->kind == "unused" || op->kind == "sometimes") {
    op->p = parameter({5}, kNearOne);
  } else if (op->kind == "shift_input") {
    op->p = parameter({kProgramDim}, kWeight);
  }
  ops_.push_back(std::move(op));
}

void NodeImpl::collect_units(std::vector<nn::Module*>& units, bool root) {
  if (is_unit() && !root) {
    units.push_back(this);
  }
  for (auto& child : children_) {
    child->collect_units(units, false);
  }
}

void NodeImpl::collect_nodes(std::vector<NodeImpl*>& nodes) {
  nodes.push_back(this);
  for (auto& child : children_) {
    child->collect_nodes(nodes);
  }
}

void NodeImpl::tie(const std::vector<NodeImpl*>& nodes) {
  std::vector<nn::Linear> linears;
  for (NodeImpl* node : nodes) {
    for (auto& op : node->ops_) {
      if (op->linear) {
        linears.push_back(op->linear);
      }
    }
  }
  int index = 0;
  for (auto& op : ops_) {
    if (op->kind == "tied" && !linears.empty()) {
      const auto to = op->spec.value("to", std::size_t{0}) % linears.size();
      op->p = share_parameter(
          "tied" + std::to_string(index++),
          *linears[to],
          "weight");
    }
  }
}

Bundle NodeImpl::call(const Op& op, const char* key, Bundle in) {
  if (children_.empty()) {
    return in;
  }
  const auto child =
      children_[op.spec.value(key, std::size_t{0}) % children_.size()];
  // Through the holder: a unit's hooks run.
  return Node(child)(std::move(in));
}

Bundle NodeImpl::forward(Bundle in) {
  for (auto& op : ops_) {
    if (situation_->fail_forward == op->number) {
      throw std::runtime_error("meant to fail in forward");
    }
    run(*op, in);
    if (situation_->fail_backward == op->number) {
      fail_in_backward(in.x);
    }
  }
  if (is_root_) {
    // A hook that fails on the output itself runs before the backward of any
    // unit: nothing is dropped then, as nothing was added.
    in.x = in.x * 1.0;
  }
  return in;
}

void NodeImpl::run(Op& op, Bundle& in) {
  at::Tensor& x = in.x;
  const std::string& kind = op.kind;
  const int step = situation_->step;
  if (kind == "linear") {  // its gradient goes into the slot
    x = x + 0.5 * at::tanh(op.linear(x));
  } else if (kind == "twice") {  // one weight used twice
    x = x + 0.5 * at::tanh(op.linear(at::tanh(op.linear(x))));
  } else if (kind == "lora") {  // the frozen weight's dgrad comes last
    x = x + 0.5 * at::tanh(op.linear(x) + at::mm(at::mm(x, op.p), op.q));
  } else if (kind == "tied") {  // another module's weight
    if (op.p.defined()) {
      x = x + 0.3 * at::tanh(at::mm(x, op.p));
    }
  } else if (kind == "gain") {  // its gradient arrives as a tensor
    x = x * op.p;
  } else if (kind == "scalar") {
    x = x + op.p;
  } else if (kind == "empty" || kind == "odd") {
    x = x + 0.1 * op.p.sum();
  } else if (kind == "unused") {
  } else if (kind == "sometimes") {  // on some ranks, in some steps
    if ((step * 5 + situation_->rank + op.number) % 3 != 0) {
      x = x * op.p.mean();
    } else if (
        situation_->has_dead_calls || situation_->fail_backward == op.number) {
      // A separate tensor: the failing hook must not be on the previous one.
      x = x * 1.0;
    }
  } else if (kind == "child") {
    in = call(op, "a", in);
  } else if (kind == "child_twice") {
    in = call(op, "a", call(op, "a", in));
  } else if (kind == "child_sometimes") {  // other units in each microbatch
    if ((step + situation_->microbatch + op.number) % 2 == 0) {
      in = call(op, "a", in);
    }
  } else if (kind == "rotate") {  // the order changes with the step
    const std::size_t n = children_.size();
    for (std::size_t i = 0; i < n; ++i) {
      in = Node(children_[(i + static_cast<std::size_t>(step)) % n])(in);
    }
  } else if (kind == "branch") {
    const Bundle a = call(op, "a", in);
    const Bundle b = call(op, "b", in);
    in = {0.5 * a.x + 0.5 * b.x, b.extra};
  } else if (kind == "detached") {  // the child gets no gradient
    x = x + 0.2 * call(op, "a", in).x.detach();
  } else if (kind == "dead") {  // a forward without a backward
    call(op, "a", in);
  } else if (kind == "no_grad") {  // an evaluation inside a forward
    at::Tensor y;
    {
      const at::NoGradGuard no_grad;
      y = call(op, "a", in).x;
    }
    x = x + 0.2 * y;
  } else if (kind == "checkpoint") {  // over one or two children
    nn::TensorList tensors = nn::collect_tensors(in);
    const auto self = std::static_pointer_cast<NodeImpl>(shared_from_this());
    tensors = nn::checkpoint(
        *this,
        [&op, self](const nn::TensorList& inputs) {
          Bundle bundle{inputs[0], {inputs.begin() + 1, inputs.end()}};
          bundle = self->call(op, "a", bundle);
          bundle = self->call(op, "b", bundle);
          return nn::collect_tensors(bundle);
        },
        tensors);
    in = {tensors[0], {tensors.begin() + 1, tensors.end()}};
  } else if (kind == "inplace_output") {
    in = call(op, "a", in);
    in.x.mul_(0.5).add_(0.1);
  } else if (kind == "shift_input") {
    x.add_(op.p);
  } else if (kind == "view") {
    x = x.view({-1, 2, kProgramDim / 2}).flatten(1);
  } else if (kind == "emit") {
    in.extra.push_back(x * 0.5);
  } else if (kind == "absorb") {
    if (!in.extra.empty()) {
      x = x + in.extra.back();
      in.extra.pop_back();
    }
  } else {
    throw std::invalid_argument("unknown operation " + kind);
  }
}

ProgramModel::ProgramModel(const nlohmann::json& program)
    : link(program.value("link", "chain")) {
  std::vector<nlohmann::json> models{program.at("model")};
  for (const auto& other : program.value("others", nlohmann::json::array())) {
    models.push_back(other);
  }
  for (const auto& model : models) {
    Node root(std::make_shared<NodeImpl>(model, situation, num_ops));
    std::vector<NodeImpl*> nodes;
    root->collect_nodes(nodes);
    root->is_root_ = true;
    for (NodeImpl* node : nodes) {
      node->tie(nodes);
    }
    roots.push_back(std::move(root));
  }
  const auto has = [text = nlohmann::json(models).dump()](const char* op) {
    return text.find(op) != std::string::npos;
  };
  situation->inputs_want_grad = has("\"sometimes\"");
  situation->has_dead_calls = has("\"dead\"") || has("\"detached\"");
}

std::string ProgramModel::prefix_of(std::size_t model) {
  return model == 0 ? "" : "model" + std::to_string(model) + ".";
}

Bundle ProgramModel::operator()(Bundle in) {
  Bundle out = roots[0](in);
  for (std::size_t i = 1; i < roots.size(); ++i) {
    if (link == "chain" || link == "back") {
      out = roots[i](out);
      continue;
    }
    at::Tensor x = link == "sum" ? in.x * 1.0 : out.x.detach();
    if (situation->inputs_want_grad && !x.requires_grad()) {
      x = x.requires_grad_() * 1.0;
    }
    const Bundle more = roots[i](Bundle{x, {}});
    out.x = out.x + more.x;
    out.extra.insert(out.extra.end(), more.extra.begin(), more.extra.end());
  }
  return link == "back" && roots.size() > 1 ? roots[0](out) : out;
}

}  // namespace flatshard::testing
