// A custom schedule: the backward of one microbatch and the forward of the next
// alternate block by block, so that one can hide the waits of the other. Losses
// and weights equal the results of one microbatch after the other.
//   build-example/own_schedule           by the schedule
//   build-example/own_schedule plain     one after the other
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <flatshard/flatshard.h>

using namespace flatshard;

constexpr std::int64_t kDim = 8;
constexpr int kBlocks = 4;
constexpr int kMicrobatches = 3;
constexpr int kSteps = 60;

struct BlockImpl : nn::Module {
  nn::Linear up = register_module("up", nn::Linear(kDim, 4 * kDim));
  nn::Linear down = register_module("down", nn::Linear(4 * kDim, kDim));
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
};
FLATSHARD_MODULE(Block);

struct StackImpl : nn::Module {
  nn::Linear in = register_module("in", nn::Linear(kDim, kDim));
  std::vector<Block> blocks;
  StackImpl() {
    for (int l = 0; l < kBlocks; ++l) {
      blocks.push_back(register_module("block" + std::to_string(l), Block()));
    }
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
    at::Tensor h = in(x);
    for (Block& block : blocks) {
      h = block(h);
    }
    return at::mse_loss(h, target) / kMicrobatches;
  }
};
FLATSHARD_MODULE(Stack);

// One microbatch, in pieces whose backwards run separately.
struct Microbatch {
  Microbatch(Stack& model, std::shared_ptr<Runtime> runtime, at::Tensor input)
      : model(model),
        runtime(runtime),
        pass(std::make_unique<BackwardPass>(runtime)),
        x(std::move(input)),
        target(at::sin(2 * x)) {}

  // Starts the root's forward, so that it stays unsharded until the loss.
  void begin_forward() {
    pass->forward_begin(root());
    x = first.forward({x}, [&](const nn::TensorList& in) {
      return nn::TensorList{model->in(in[0])};
    })[0];
  }
  void forward(int l) {
    pass->forward_begin(unit(l));
    x = blocks[l].forward({x}, [&](const nn::TensorList& in) {
      // Not through the holder: it would report a call to the runtime.
      return nn::TensorList{model->blocks[l]->forward(in[0])};
    })[0];
    pass->forward_end(unit(l));
  }
  void end_forward() {
    loss = last.forward({x}, [&](const nn::TensorList& in) {
      return nn::TensorList{at::mse_loss(in[0], target) / kMicrobatches};
    })[0];
    pass->forward_end(root());
  }

  void begin_backward(bool is_last) {
    pass->open_backward({.is_last = is_last, .interleaved = !is_last});
    pass->backward_begin(root());
    gradient = last.backward({at::ones_like(loss)})[0];
  }
  void backward(int l) {
    pass->backward_begin(unit(l));
    pass->set_delay_wgrad(true, /*node=*/l);
    gradient = blocks[l].backward({gradient})[0];
    pass->set_delay_wgrad(false);
    pass->backward_end(unit(l));  // reshards, keeps the gradients
  }
  void weight_gradients(int l) { pass->run_wgrads(unit(l), l); }
  void end_backward() {
    first.backward({gradient});
    pass->backward_end(root());
    pass->close_backward();
  }

  UnitId root() const { return runtime->unit_of(*model); }
  UnitId unit(int l) const { return runtime->unit_of(*model->blocks[l]); }

  Stack model;
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<BackwardPass> pass;
  nn::DetachedNode first, last;
  std::vector<nn::DetachedNode> blocks = std::vector<nn::DetachedNode>(kBlocks);
  at::Tensor x, target, loss, gradient;
};

// F0; (B0 + F1); (B1 + F2); B2. @return the step's loss.
double run_step(std::vector<Microbatch>& step) {
  for (int m = 0; m <= kMicrobatches; ++m) {
    Microbatch* ahead = m < kMicrobatches ? &step[m] : nullptr;
    Microbatch* back = m > 0 ? &step[m - 1] : nullptr;
    if (ahead) {
      ahead->begin_forward();
    }
    if (back) {
      back->begin_backward(/*is_last=*/m == kMicrobatches);
    }
    for (int l = 0; l < kBlocks; ++l) {
      if (back) {
        back->backward(kBlocks - 1 - l);
      }
      if (ahead) {
        ahead->forward(l);
      }
      if (back) {
        back->weight_gradients(kBlocks - 1 - l);
      }
    }
    if (back) {
      back->end_backward();
    }
    if (ahead) {
      ahead->end_forward();
    }
  }
  double loss = 0;
  for (const Microbatch& m : step) {
    loss += m.loss.item<double>();
  }
  return loss;
}

int main(int argc, char** argv) {
  const bool plain = argc == 2 && std::string(argv[1]) == "plain";
  const at::Device device =
      num_cuda_devices() > 0 ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  Stack model;
  FullyShardOptions options{
      .strategy = "zero3",
      .group = {.precision = Precision::full()}};
  for (Block& block : model->blocks) {
    options.units.push_back(block.get());
  }
  const auto runtime = fully_shard(*model, Mesh::single(device), options);
  AdamW optimizer(runtime->groups(), {});
  double first = 0;
  double loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> inputs;
    for (int m = 0; m < kMicrobatches; ++m) {
      at::Generator random =
          at::make_generator<at::CPUGeneratorImpl>(kMicrobatches * step + m);
      inputs.push_back(at::randn({64, kDim}, random).to(device));
    }
    loss = 0;
    if (plain) {
      for (int m = 0; m < kMicrobatches; ++m) {
        runtime->set_is_last_microbatch(m + 1 == kMicrobatches);
        const at::Tensor part = model(inputs[m], at::sin(2 * inputs[m]));
        part.backward();
        loss += part.item<double>();
      }
    } else {
      std::vector<Microbatch> microbatches;
      for (const at::Tensor& input : inputs) {
        microbatches.emplace_back(model, runtime, input);
      }
      loss = run_step(microbatches);
    }
    first = step == 0 ? loss : first;
    optimizer.step(/*lr=*/1e-2);
    optimizer.zero_grad();
  }
  fmt::print("{} steps: loss {:.17g} -> {:.17g}\n", kSteps, first, loss);
  return loss < first ? 0 : 1;
}
