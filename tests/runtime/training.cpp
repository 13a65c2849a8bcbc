#include "tests/runtime/training.h"
#include "tests/support/sum_order.h"

#include "flatshard/group/initializer.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/grad_norm.h"
#include "flatshard/optim/sgd.h"
#include "tests/support/shard_values.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numeric>

namespace flatshard::testing {
namespace {

constexpr std::int64_t kDim = 24;
constexpr std::int64_t kBatch = 4;
constexpr int kBlocks = 3;
constexpr std::uint64_t kSeed = 11;
constexpr double kLr = 1e-2;
constexpr double kDecay = 0.1;

// Returns the batch of one rank in one microbatch of one step.
std::pair<at::Tensor, at::Tensor> batch(int step, int rank, int microbatch) {
  const Initializer values(kSeed);
  const std::string name =
      fmt::format("batch {} {} {}", step, rank, microbatch);
  const at::Tensor both = at::empty({2 * kBatch * kDim});
  values.fill(both, name, InitSpec::normal(0, 1), 0);
  return {
      both.narrow(0, 0, kBatch * kDim).view({kBatch, kDim}),
      both.narrow(0, kBatch * kDim, kBatch * kDim).view({kBatch, kDim})};
}

std::unique_ptr<Optimizer> make_optimizer(
    const std::string& name,
    const std::vector<ParamGroup*>& groups) {
  if (name == "sgd") {
    return std::make_unique<Sgd>(
        groups,
        SgdOptions{.momentum = 0.9, .weight_decay = kDecay});
  }
  return std::make_unique<AdamW>(groups, AdamWOptions{.weight_decay = kDecay});
}

}  // namespace

ToyBlockImpl::ToyBlockImpl(std::int64_t dim) {
  up_ = register_module(
      "up",
      nn::Linear(
          dim,
          dim,
          nn::LinearOptions{.bias = true, .init = InitSpec::normal(0, 0.2F)}));
  gain_ = declare_parameter("gain", {dim}, InitSpec::ones());
  shift_ = declare_parameter("shift", {}, InitSpec::normal(0, 0.1F));
}

at::Tensor ToyBlockImpl::forward(const at::Tensor& x) {
  return x + at::tanh(up_(x)) * gain_ + shift_;
}

ToyModelImpl::ToyModelImpl(
    std::int64_t dim,
    int num_blocks,
    bool with_root_parameter) {
  if (with_root_parameter) {
    temperature_ =
        declare_parameter("temperature", {3}, InitSpec::normal(0.3F, 0.1F));
  }
  for (int i = 0; i < num_blocks; ++i) {
    blocks_.push_back(
        register_module("block" + std::to_string(i), ToyBlock(dim)));
  }
  out_ = register_module(
      "out",
      nn::Linear(
          dim,
          dim,
          nn::LinearOptions{.init = InitSpec::normal(0, 0.2F)}));
}

at::Tensor ToyModelImpl::forward(
    const at::Tensor& x,
    const at::Tensor& target) {
  at::Tensor h = x;
  for (ToyBlock& block : blocks_) {
    h = block(h);
  }
  h = out_(h);
  if (temperature_.defined()) {
    h = h * temperature_.sum();
  }
  return at::mse_loss(h.to(at::kFloat), target);
}

std::vector<nn::Module*> ToyModelImpl::unit_modules() {
  std::vector<nn::Module*> units;
  for (ToyBlock& block : blocks_) {
    units.push_back(block.get());
  }
  units.push_back(out_.get());
  return units;
}

int TrainingCase::world() const {
  return static_cast<int>(std::accumulate(
      mesh.begin(),
      mesh.end(),
      std::int64_t{1},
      std::multiplies<>()));
}

void collect_weights(
    Runtime& runtime,
    std::mutex& mutex,
    std::map<std::string, std::vector<float>>& weights) {
  runtime.synchronize();
  const std::lock_guard lock(mutex);
  for (const auto& unit : runtime.units()) {
    for (const auto& group : unit->groups()) {
      for (const NamedShard& shard : group->main_shards()) {
        auto& whole = weights[shard.name()];
        whole.resize(c10::multiply_integers(shard.whole_shape()), NAN);
        put_into(
            shard,
            at::from_blob(
                whole.data(),
                {static_cast<std::int64_t>(whole.size())},
                at::kFloat));
      }
    }
  }
}

void train_rank(
    const TrainingCase& c,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    TrainingResult& result) {
  const int rank = mesh->rank();
  const int world = mesh->size();
  ToyModel model(kDim, kBlocks, c.with_root_parameter);
  const auto runtime = fully_shard(
      *model,
      mesh,
      {.units = model->unit_modules(),
       .strategy = c.strategy,
       .granularity = c.granularity,
       .seed = kSeed,
       .group =
           {.precision = c.precision,
            .scaling = c.scaling,
            .grads_in_reduce_dtype = c.grads_in_reduce_dtype,
            .keep_compute_weights = c.keep_compute_weights,
            .post_forward_ranks = c.post_forward_ranks,
            .offload = c.offload},
       .runtime = {
           .prefetch = c.prefetch,
           .reshard_after_forward = c.reshard_after_forward,
           .copy_engines = c.copy_engines,
           .slots_on_demand = c.slots_on_demand,
           .streams = {
               .delay_seed = 5 + static_cast<std::uint64_t>(rank),
               .max_delay_us = c.max_delay_us}}});
  const auto optimizer = make_optimizer(c.optimizer, runtime->groups());
  if (c.overlap_optimizer) {
    optimizer->set_stream(make_stream(
        mesh->device(),
        "optimizer",
        {.delay_seed = 50 + static_cast<std::uint64_t>(rank),
         .max_delay_us = c.max_delay_us}));
  }
  const int batch_world = c.batch_world > 0 ? c.batch_world : world;
  const int runs = batch_world / world;
  const double divisor = static_cast<double>(c.microbatches) * runs *
                         (c.scaling == GradScaling::sum ? world : 1);
  for (int step = 0; step < c.steps; ++step) {
    for (int m = 0; m < c.microbatches; ++m) {
      for (int r = 0; r < runs; ++r) {
        const bool last = m == c.microbatches - 1 && r == runs - 1;
        runtime->set_is_last_microbatch(last);
        runtime->set_sync_gradients(last || !c.no_sync);
        const auto [x, y] = batch(step, rank * runs + r, m);
        const at::Tensor loss = model(
            x.to(mesh->device(), c.precision.compute),
            y.to(mesh->device()));
        (loss / divisor).backward();
        const std::lock_guard lock(mutex);
        result.losses[step] +=
            loss.item<double>() / (batch_world * c.microbatches);
      }
    }
    if (c.evaluate) {
      const at::NoGradGuard no_grad;
      const auto [x, y] = batch(step, rank, 0);
      const double loss =
          model(x.to(mesh->device(), c.precision.compute), y.to(mesh->device()))
              .item<double>();
      const std::lock_guard lock(mutex);
      result.losses[step] += loss / world;
    }
    const GradNorm clip =
        c.evaluate ? GradNorm{.norm = at::zeros({})}
                   : grad_norm_and_scale(runtime->groups(), c.max_norm);
    optimizer->step(kLr, clip.scale);
    optimizer->zero_grad();
    const double norm = clip.norm.item<double>();
    const std::lock_guard lock(mutex);
    if (result.norms.size() == static_cast<std::size_t>(step)) {
      result.norms.push_back(norm);
    }
  }
  optimizer->wait();
  collect_weights(*runtime, mutex, result.weights);
}

TrainingResult train_toy(const TrainingCase& c) {
  TrainingResult result;
  result.losses.assign(c.steps, 0.0);
  std::mutex mutex;
  run_ranks(c.world(), [&](RankContext& context) {
    std::vector<MeshAxis> axes;
    for (std::size_t i = 0; i < c.mesh.size(); ++i) {
      axes.push_back({"axis" + std::to_string(i), c.mesh[i]});
    }
    train_rank(c, context.mesh(axes), mutex, result);
  });
  return result;
}

TrainingResult train_plain(const TrainingCase& c) {
  TrainingResult result;
  ToyModel model(kDim, kBlocks, c.with_root_parameter);
  const Initializer values(kSeed);
  nn::materialize(
      *model,
      at::kCPU,
      at::kFloat,
      [&](const std::string& name, const InitSpec& spec, at::Tensor& t) {
        values.fill(t, name, spec, 0);
      });
  auto parameters = nn::named_parameters(*model);
  std::vector<at::Tensor> m;
  std::vector<at::Tensor> v;
  for (const auto& p : parameters) {
    m.push_back(at::zeros_like(p.tensor));
    v.push_back(at::zeros_like(p.tensor));
  }
  const int world = c.batch_world > 0 ? c.batch_world : c.world();
  for (int step = 0; step < c.steps; ++step) {
    double total = 0;
    for (int mb = 0; mb < c.microbatches; ++mb) {
      for (int r = 0; r < world; ++r) {
        const auto [x, y] = batch(step, r, mb);
        const at::Tensor loss = model(x, y);
        (loss / (world * c.microbatches)).backward();
        total += loss.item<double>() / (world * c.microbatches);
      }
    }
    result.losses.push_back(total);
    const at::NoGradGuard no_grad;
    double square = 0;
    for (const auto& p : parameters) {
      square += p.tensor.grad().square().sum().item<double>();
    }
    const double norm = std::sqrt(square);
    result.norms.push_back(norm);
    const double scale = std::min(1.0, c.max_norm / (norm + 1e-6));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor w = parameters[i].tensor;
      const at::Tensor g = w.grad() * scale;
      w.mul_(1 - kLr * kDecay);
      if (c.optimizer == "sgd") {
        m[i].mul_(0.9).add_(g);
        w.sub_(m[i] * kLr);
      } else {
        const int t = step + 1;
        m[i].mul_(0.9).add_(g * 0.1);
        v[i].mul_(0.95).add_(g * g * 0.05);
        w.sub_(
            (m[i] / (1 - std::pow(0.9, t))) /
            ((v[i] / (1 - std::pow(0.95, t))).sqrt() + 1e-8) * kLr);
      }
      w.mutable_grad() = at::Tensor();
    }
  }
  for (const auto& p : parameters) {
    const at::Tensor flat = p.tensor.detach().flatten();
    result.weights[p.name].assign(
        flat.data_ptr<float>(),
        flat.data_ptr<float>() + flat.numel());
  }
  return result;
}

double training_tolerance(const TrainingCase& c, int world) {
  // AdamW divides a gradient by its own size. The smallest of N gradients is
  // about 1 / N of their addends, so the update is off by N times as much.
  constexpr double kMostGrown = (kBlocks + 1) * kDim * kDim;
  const bool wide = c.precision.compute == at::kFloat;
  const double tolerance = sum_tolerance(
      {.addends = std::int64_t{world} * c.microbatches,
       .in_a_row = c.steps,
       .size = kLr * kMostGrown,
       .roundoff = wide ? kFloatRoundoff : kBFloat16Roundoff});
  return std::min(tolerance, kLr * c.steps);  // further no update reaches
}

double weight_distance(const TrainingResult& a, const TrainingResult& b) {
  double largest = 0;
  double distance = 0;
  for (const auto& [name, values] : a.weights) {
    const auto& other = b.weights.at(name);
    if (values.size() != other.size()) {
      return INFINITY;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      largest = std::max(largest, std::abs(double{values[i]}));
      const double d = std::abs(double{values[i]} - double{other[i]});
      distance = std::isnan(d) ? INFINITY : std::max(distance, d);
    }
  }
  return distance / largest;
}

}  // namespace flatshard::testing
