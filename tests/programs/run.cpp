#include "tests/programs/model.h"
#include "tests/programs/program.h"

#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/group/initializer.h"
#include "flatshard/optim/sgd.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>

namespace flatshard::testing {
namespace {

using nlohmann::json;

constexpr std::int64_t kBatch = 3;
constexpr double kLr = 0.01;
// Float32 in another order of summation, through some tens of operations and a
// few steps, relative to the largest element of a tensor. A value that is lost
// or counted twice is off by its own size.
constexpr double kTolerance = 1e-3;
constexpr double kLargest = 10;

using Tensors = std::map<std::string, at::Tensor>;

// The results of plain autograd: one entry per step.
struct Reference {
  bool valid = true;
  std::vector<Tensors> grads;
  std::vector<Tensors> weights;
  std::vector<at::Tensor> values;  ///< losses and input gradients of one rank
};

bool has_backward(const std::string& kind) {
  return kind.starts_with("f") && !kind.starts_with("fail")
             ? true
             : kind == "retain" || kind == "leaf_input";
}

bool is_meant(const std::exception& error) {
  return std::string(error.what()).find("meant to fail") != std::string::npos;
}

// One rank's microbatch, on a sharded model or a plain one.
class Microbatch {
 public:
  Microbatch(
      ProgramModel& model,
      std::uint64_t seed,
      at::Device device,
      double scale,
      std::vector<at::Tensor>* values)
      : model_(model),
        seed_(seed),
        device_(device),
        scale_(scale),
        values_(values) {}

  /// @return true when a backward failed as it was meant to.
  bool run(const std::string& text) {
    const auto colon = text.find(':');
    const std::string kind = text.substr(0, colon);
    const int op =
        colon == std::string::npos ? -1 : std::stoi(text.substr(colon + 1));
    if (kind == "fb") {
      loss(forward(0)).backward();
    } else if (kind == "fb_x") {  // the extra outputs are dead
      note(forward(0).x.square().mean() * scale_).backward();
    } else if (kind == "ffb") {
      const Bundle a = forward(0);
      const Bundle b = forward(1);
      (loss(a) + loss(b)).backward();
    } else if (kind == "ffbb" || kind == "ffbb_swapped") {
      const Bundle a = forward(0);
      const Bundle b = forward(1);
      loss(kind == "ffbb" ? a : b).backward();
      loss(kind == "ffbb" ? b : a).backward();
    } else if (kind == "retain") {
      const at::Tensor l = loss(forward(0));
      l.backward({}, /*retain_graph=*/true);
      l.backward();
    } else if (kind == "fb_eval_between") {
      const Bundle out = forward(0);
      evaluate();
      loss(out).backward();
    } else if (kind == "eval") {
      evaluate();
    } else if (kind == "drop") {
      loss(forward(0));
    } else if (kind == "leaf_input") {
      loss(forward(0, /*leaf=*/true)).backward();
    } else if (kind == "grad_inputs") {
      const at::Tensor x = input(0).detach().requires_grad_();
      const Bundle out = model_(Bundle{x * 1.0, {}});
      values_->push_back(
          torch::autograd::grad({out.x.square().mean()}, {x})[0]);
    } else if (kind == "fail_forward") {
      model_.situation->fail_forward = op;
      try {
        forward(0);
      } catch (const std::exception& error) {
        model_.situation->fail_forward = -1;
        if (!is_meant(error)) {
          throw;
        }
      }
      model_.situation->fail_forward = -1;
    } else if (kind == "fail_backward") {
      model_.situation->fail_backward = op;
      try {
        loss(forward(0)).backward();
      } catch (const std::exception& error) {
        model_.situation->fail_backward = -1;
        if (!is_meant(error)) {
          throw;
        }
        return true;
      }
      model_.situation->fail_backward = -1;
    } else {
      throw std::invalid_argument("unknown microbatch " + kind);
    }
    return false;
  }

 private:
  at::Tensor input(int index) const {
    const Situation& now = *model_.situation;
    const at::Tensor x = at::empty({kBatch, kProgramDim});
    const std::string name = fmt::format(
        "input {} {} {} {}",
        now.step,
        now.microbatch,
        now.rank,
        index);
    Initializer(seed_).fill(x, name, InitSpec::normal(0, 1), 0);
    if (now.inputs_want_grad) {
      return x.to(device_).requires_grad_(true) * 1.0;
    }
    return x.to(device_);
  }

  Bundle forward(int index, bool leaf = false) const {
    const at::Tensor x = input(index);
    const bool as_leaf = leaf && !model_.situation->inputs_want_grad;
    return model_(Bundle{as_leaf ? x.requires_grad_() : x, {}});
  }

  void evaluate() const {
    const at::NoGradGuard no_grad;
    loss(forward(7));
  }

  at::Tensor note(const at::Tensor& loss) const {
    values_->push_back(loss.detach() / scale_);
    return loss;
  }

  at::Tensor loss(const Bundle& out) const {
    at::Tensor sum = out.x.square().mean();
    for (const at::Tensor& extra : out.extra) {
      sum = sum + 0.5 * extra.square().mean();
    }
    return note(sum * scale_);
  }

  ProgramModel& model_;
  std::uint64_t seed_;
  at::Device device_;
  double scale_;
  std::vector<at::Tensor>* values_;
};

Tensors copies(const std::vector<nn::NamedParameter>& parameters, bool grads) {
  Tensors result;
  for (const auto& p : parameters) {
    const at::Tensor t = grads ? p.tensor.grad() : p.tensor.detach();
    result[p.name] = t.defined() ? t.clone() : t;
  }
  return result;
}

// Returns whether a backward changed a gradient of each model. Otherwise
// gradients of earlier microbatches may still wait for their last one.
bool reached_all(const Tensors& before, const Tensors& after) {
  std::map<std::string, bool> reached;  // by a model's prefix
  for (const auto& [name, grad] : after) {
    const auto dot = name.find('.');
    const bool is_other = name.starts_with("model") && dot != name.npos;
    const at::Tensor& old = before.at(name);
    reached[is_other ? name.substr(0, dot) : ""] |=
        grad.defined() && grad.numel() > 0 &&
        (!old.defined() || !old.equal(grad));
  }
  return std::ranges::all_of(reached, [](const auto& r) { return r.second; });
}

Reference
run_plain(const json& program, int my_rank, int world, at::Device device) {
  Reference reference;
  const std::uint64_t seed = program.at("seed");
  ProgramModel model(program);
  const Initializer values(seed);
  std::vector<nn::NamedParameter> parameters;
  for (std::size_t i = 0; i < model.roots.size(); ++i) {
    nn::materialize(
        *model.roots[i],
        device,
        at::kFloat,
        [&](const std::string& name, const InitSpec& spec, at::Tensor& t) {
          const at::Tensor host = at::empty(t.sizes());
          values.fill(host, name, spec, 0);
          t.copy_(host);
        });
    for (auto& p : nn::named_parameters(*model.roots[i])) {
      p.name = ProgramModel::prefix_of(i) + p.name;
      parameters.push_back(std::move(p));
    }
  }
  const auto drop_grads = [&] {
    for (const auto& p : parameters) {
      at::Tensor tensor = p.tensor;
      tensor.mutable_grad() = at::Tensor();
    }
  };
  std::vector<at::Tensor> others;
  try {
    int step_index = 0;
    for (const auto& step : program.at("steps")) {
      model.situation->step = step_index++;
      int index = 0;
      const auto& micro = step.at("micro");
      reference.valid &= has_backward(micro.back());
      for (const std::string kind : micro) {
        model.situation->microbatch = index++;
        int dropped = 0;
        const Tensors before = copies(parameters, true);
        for (int r = 0; r < world; ++r) {
          model.situation->rank = r;
          dropped += Microbatch(
                         model,
                         seed,
                         device,
                         1.0 / world,
                         r == my_rank ? &reference.values : &others)
                         .run(kind);
        }
        reference.valid &= dropped == 0 || dropped == world;
        if (dropped > 0) {
          drop_grads();
        }
        if (model.roots.size() > 1 && index == static_cast<int>(micro.size())) {
          reference.valid &= reached_all(before, copies(parameters, true));
        }
      }
      reference.grads.push_back(copies(parameters, true));
      {
        const at::NoGradGuard no_grad;
        for (const auto& p : parameters) {
          if (p.tensor.grad().defined()) {
            at::Tensor weight = p.tensor;
            weight.sub_(weight.grad() * kLr);
            weight.mutable_grad() = at::Tensor();
          }
        }
      }
      reference.weights.push_back(copies(parameters, false));
    }
  } catch (const std::exception&) {
    reference.valid = false;  // in-place on what autograd keeps, for instance
  }
  // A training that explodes amplifies the last bit.
  for (const auto* steps : {&reference.grads, &reference.weights}) {
    for (const Tensors& tensors : *steps) {
      for (const auto& [name, t] : tensors) {
        reference.valid &= !t.defined() || t.numel() == 0 ||
                           t.abs().max().item<double>() < kLargest;
      }
    }
  }
  return reference;
}

class Comparison {
 public:
  explicit Comparison(std::vector<std::string>& problems)
      : problems_(problems) {}

  void values(
      const at::Tensor& found,
      at::Tensor expected,
      const std::string& what) {
    if (found.numel() == 0) {
      return;
    }
    if (!expected.defined()) {
      expected = at::zeros_like(found);
    }
    const double size = expected.abs().max().item<double>();
    const double distance =
        (found.to(at::kFloat) - expected).abs().max().item<double>();
    if (!(distance <= kTolerance * size + 1e-6)) {
      say("{} is off by {:.3g} of {:.3g}", what, distance, size);
    }
  }

  template <class... Args>
  void say(fmt::format_string<Args...> format, Args&&... args) {
    problems_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  std::vector<std::string>& problems_;
};

/// The expected values of one model.
struct Expected {
  const Tensors& tensors;
  std::string prefix;

  const at::Tensor& at(const std::string& name) const {
    return tensors.at(prefix + name);
  }
};

void compare_shards(
    const std::vector<NamedShard>& shards,
    const Expected& expected,
    const std::string& what,
    Comparison& compare) {
  for (const NamedShard& shard : shards) {
    const at::Tensor whole = expected.at(shard.name());
    compare.values(
        shard.tensor,
        whole.defined()
            ? whole.flatten().narrow(0, shard.begin, shard.tensor.numel())
            : whole,
        fmt::format("{} of {}", what, shard.name()));
  }
}

void compare_gradients(
    const Runtime& runtime,
    const Expected& expected,
    const std::string& what,
    Comparison& compare) {
  for (const ParamGroup* group : runtime.groups()) {
    if (group->gradients().reduced().exists()) {
      const at::Tensor grad = group->gradients().reduced().local();
      compare_shards(group->shards_of(grad), expected, what, compare);
      continue;
    }
    for (const GroupParameter& p : group->parameters()) {
      const at::Tensor& grad = expected.at(p.names.front());
      if (grad.defined() && grad.numel() > 0) {
        compare.say("{} of {} never came", what, p.names.front());
      }
    }
  }
}

void compare_rest(
    const Runtime& runtime,
    const nn::Module& root,
    const std::string& where,
    Comparison& compare) {
  if (!runtime.scheduler().resting()) {
    compare.say(
        "{} these units are still in use: {}",
        where,
        fmt::join(runtime.scheduler().busy_units(), ", "));
  }
  if (runtime.executor().slots().pool().num_held() != 0) {
    compare.say(
        "{} {} slots are held",
        where,
        runtime.executor().slots().pool().num_held());
  }
  for (const auto& p : root.named_parameters()) {
    if (p.value().grad().defined()) {
      compare.say("{} parameter {} has a .grad", where, p.key());
    }
  }
}

FullyShardOptions options_of(const json& program, int rank) {
  FullyShardOptions options{
      .strategy = program.at("strategy"),
      .seed = program.at("seed"),
      .group =
          {.precision = Precision::full(),
           .post_forward_ranks = program.value("post_forward_ranks", 0)},
      .runtime = {
          .prefetch = program.at("prefetch"),
          .reshard_after_forward = program.at("reshard"),
          .offload_activations = program.value("offload", false),
          .streams = {
              .delay_seed = program.at("seed").get<std::uint64_t>() +
                            static_cast<std::uint64_t>(rank),
              .max_delay_us = program.at("delay_us")}}};
  const std::string granularity = program.at("granularity");
  if (granularity == "row") {
    options.granularity = Granularity::row();
  } else if (granularity == "tensor") {
    options.granularity = Granularity::tensor();
  }
  return options;
}

void run_sharded(
    const json& program,
    const std::shared_ptr<Mesh>& mesh,
    const Reference& reference,
    Comparison& compare) {
  ProgramModel model(program);
  std::vector<std::shared_ptr<Runtime>> runtimes;
  std::vector<ParamGroup*> groups;
  for (Node& root : model.roots) {
    FullyShardOptions options = options_of(program, mesh->rank());
    options.runtime.streams.delay_seed += runtimes.size() << 32;
    root->collect_units(options.units);
    runtimes.push_back(fully_shard(*root, mesh, options));
    for (ParamGroup* group : runtimes.back()->groups()) {
      groups.push_back(group);
    }
  }
  Sgd sgd(groups, SgdOptions{.momentum = 0});
  model.situation->rank = mesh->rank();
  std::vector<at::Tensor> values;
  int step_index = 0;
  for (const auto& step : program.at("steps")) {
    model.situation->step = step_index;
    const auto& micro = step.at("micro");
    for (std::size_t m = 0; m < micro.size(); ++m) {
      model.situation->microbatch = static_cast<int>(m);
      const bool last = m + 1 == micro.size();
      for (const auto& runtime : runtimes) {
        runtime->set_is_last_microbatch(last);
        runtime->set_sync_gradients(last || !step.value("no_sync", false));
      }
      Microbatch(model, program.at("seed"), mesh->device(), 1.0, &values)
          .run(micro[m]);
    }
    const std::string where = fmt::format("step {}:", step_index);
    for (std::size_t i = 0; i < runtimes.size(); ++i) {
      runtimes[i]->synchronize();
      compare_gradients(
          *runtimes[i],
          {reference.grads[step_index], ProgramModel::prefix_of(i)},
          where + " gradient",
          compare);
      compare_rest(*runtimes[i], *model.roots[i], where, compare);
    }
    sgd.step(kLr);
    sgd.zero_grad();
    for (std::size_t i = 0; i < runtimes.size(); ++i) {
      runtimes[i]->synchronize();
      for (const auto& unit : runtimes[i]->units()) {
        for (const auto& group : unit->groups()) {
          compare_shards(
              group->main_shards(),
              {reference.weights[step_index], ProgramModel::prefix_of(i)},
              where + " weight",
              compare);
        }
      }
    }
    ++step_index;
  }
  if (values.size() != reference.values.size()) {
    compare.say(
        "{} losses came, expected {}",
        values.size(),
        reference.values.size());
    return;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    compare.values(values[i], reference.values[i], fmt::format("loss {}", i));
  }
}

}  // namespace

std::vector<MeshAxis> axes_of(const nlohmann::json& program) {
  std::vector<MeshAxis> axes;
  for (const std::int64_t size : program.at("mesh")) {
    axes.push_back({"axis" + std::to_string(axes.size()), size});
  }
  return axes;
}

int world_of(const nlohmann::json& program) {
  int world = 1;
  for (const MeshAxis& axis : axes_of(program)) {
    world *= static_cast<int>(axis.size);
  }
  return world;
}

ProgramResult run_program(
    const nlohmann::json& program,
    const std::shared_ptr<Mesh>& mesh,
    const std::shared_ptr<CollectiveLog>& log) {
  ProgramResult result;
  const Reference reference =
      run_plain(program, mesh->rank(), mesh->size(), mesh->device());
  if (!reference.valid) {
    result.valid = false;
    return result;
  }
  log->clear();
  Comparison compare(result.problems);
  try {
    run_sharded(program, mesh, reference, compare);
  } catch (const std::exception& error) {
    compare.say("exception: {}", error.what());
  }
  result.collectives = log->records();
  return result;
}

std::vector<std::string> problems_of(const std::vector<ProgramResult>& ranks) {
  std::vector<std::string> problems;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (const std::string& problem : ranks[r].problems) {
      problems.push_back(fmt::format("rank {}: {}", r, problem));
    }
    if (ranks[r].collectives.size() != ranks[0].collectives.size()) {
      problems.push_back(fmt::format(
          "rank {} launched {} collectives, rank 0 {}",
          r,
          ranks[r].collectives.size(),
          ranks[0].collectives.size()));
    }
  }
  return problems;
}

}  // namespace flatshard::testing
