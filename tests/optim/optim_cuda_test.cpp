// The CUDA kernels against the CPU loops. Skips itself without a GPU.
#include "flatshard/device/stream.h"
#include "flatshard/optim/muon/muon_update.h"
#include "flatshard/optim/muon/newton_schulz.h"
#include "flatshard/optim/optimizer.h"
#include "tests/optim/float8_update.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <gtest/gtest.h>

#include <vector>

namespace flatshard {
namespace {

constexpr auto kSkipped = UpdateRange::kSkipped;

struct KernelCase {
  std::int64_t numel;
  std::vector<UpdateRange> ranges;  ///< of three rows
};

// More elements than one launch has threads, rows that change inside a vector
// of four, ranges of one element, skipped ones.
std::vector<KernelCase> kernel_cases() {
  return {
      {16, {}},
      {16, {{16, 1}}},
      {4096, {{1, 2}, {2, 0}, {1023, 1}, {4096, 0}}},
      {4096, {{6, kSkipped}, {7, 1}, {1025, 2}, {4094, kSkipped}, {4096, 0}}},
      {3 << 20, {{1000003, 1}, {3 << 20, 0}}}};
}

// Returns three rows whose scalars all differ.
template <class Step>
std::vector<UpdateRow> rows_of(Step step) {
  std::vector<UpdateRow> rows;
  for (const float factor : {1.0F, 0.5F, 0.25F}) {
    UpdateRow row = step.row();
    for (float* scalar :
         {&row.lr,
          &row.weight_decay,
          &row.beta1,
          &row.beta2,
          &row.eps,
          &row.step_size,
          &row.inverse_c2,
          &row.momentum}) {
      *scalar *= factor;
    }
    rows.push_back(row);
  }
  return rows;
}

FlatUpdate
host_update(const KernelCase& c, at::ScalarType grad, at::ScalarType compute) {
  auto generator = at::detail::createCPUGenerator(9);
  FlatUpdate update;
  update.main = at::randn({c.numel}, generator, at::kFloat);
  update.grad = at::randn({c.numel}, generator, at::kFloat).to(grad);
  if (compute != at::kFloat) {
    update.compute = update.main.to(compute);  // skipped ones stay
  }
  update.state0 = at::randn({c.numel}, generator, at::kFloat) * 0.1;
  update.state1 = at::rand({c.numel}, generator, at::kFloat) * 0.1;
  update.grad_scale = at::scalar_tensor(0.3F);
  update.ranges = c.ranges;
  return update;
}

FlatUpdate on_gpu(const FlatUpdate& host) {
  const auto move = [](const at::Tensor& t) {
    return t.defined() ? t.to(at::kCUDA) : t;
  };
  FlatUpdate update;
  update.main = move(host.main);
  update.grad = move(host.grad);
  update.compute = move(host.compute);
  update.state0 = move(host.state0);
  update.state1 = move(host.state1);
  update.grad_scale = move(host.grad_scale);
  update.ranges = host.ranges;
  update.upload_ranges(at::kCUDA);
  update.rows = host.rows;
  update.device_rows = upload_rows(host.rows, at::kCUDA);
  return update;
}

void expect_equal(const FlatUpdate& gpu, const FlatUpdate& host) {
  const auto same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.defined() == b.defined() && (!a.defined() || a.cpu().equal(b));
  };
  EXPECT_TRUE(same(gpu.main, host.main));
  EXPECT_TRUE(same(gpu.state0, host.state0));
  EXPECT_TRUE(same(gpu.state1, host.state1));
  EXPECT_TRUE(same(gpu.compute, host.compute));
  if (gpu.compute.defined()) {
    EXPECT_TRUE(gpu.compute.equal(gpu.main.to(gpu.compute.scalar_type())));
  }
}

class CudaUpdates : public ::testing::TestWithParam<
                        std::tuple<at::ScalarType, at::ScalarType>> {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU";
    }
  }
};

TEST_P(CudaUpdates, AdamW) {
  const auto [grad, compute] = GetParam();
  const AdamWStep step{
      .lr = 0.01F,
      .weight_decay = 0.1F,
      .beta1 = 0.9F,
      .beta2 = 0.95F,
      .eps = 1e-6F,
      .bias_correction1 = 0.271F,
      .bias_correction2 = 0.142625F};
  for (const KernelCase& c : kernel_cases()) {
    FlatUpdate host = host_update(c, grad, compute);
    host.rows = rows_of(step);
    const FlatUpdate gpu = on_gpu(host);
    for (int i = 0; i < 2; ++i) {
      flat_update(Algorithm::adamw, host);
      flat_update(Algorithm::adamw, gpu);
    }
    expect_equal(gpu, host);
  }
}

TEST_P(CudaUpdates, Sgd) {
  const auto [grad, compute] = GetParam();
  for (const bool with_momentum : {false, true}) {
    for (const KernelCase& c : kernel_cases()) {
      FlatUpdate host = host_update(c, grad, compute);
      host.state1 = at::Tensor();
      if (!with_momentum) {
        host.state0 = at::Tensor();
        host.grad_scale = at::Tensor();
      }
      FlatUpdate gpu = on_gpu(host);
      for (const bool first : {true, false}) {
        host.rows = rows_of(SgdStep{
            .lr = 0.1F,
            .weight_decay = 0.2F,
            .momentum = with_momentum ? 0.9F : 0.0F,
            .first = first});
        gpu.rows = host.rows;
        gpu.device_rows = upload_rows(host.rows, at::kCUDA);
        flat_update(Algorithm::sgd, host);
        flat_update(Algorithm::sgd, gpu);
      }
      expect_equal(gpu, host);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaUpdates,
    ::testing::Combine(
        ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
        ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf)),
    [](const auto& info) {
      return std::string(c10::toString(std::get<0>(info.param))) + "Grad" +
             c10::toString(std::get<1>(info.param)) + "Compute";
    });

// Full blocks of every format, and a shard of one format with a partial one.
struct StatesCase {
  std::int64_t numel;
  std::vector<StateRange> states;
  std::vector<UpdateRange> ranges;  ///< of three rows
};

std::vector<StatesCase> states_cases() {
  constexpr auto kFloat32 = StateFormat::float32;
  constexpr auto kBFloat16 = StateFormat::bfloat16;
  constexpr auto kInt8 = StateFormat::int8;
  return {
      {256, {{256, 0, kInt8}}, {}},
      {400, {{400, 0, kBFloat16}}, {{7, 1}, {300, kSkipped}, {400, 0}}},
      {2048,
       {{512, 0, kFloat32},
        {1280, -512, kInt8},
        {1536, -1280, kBFloat16},
        {2048, -768, kInt8}},
       {{256, 2}, {768, kSkipped}, {1024, 0}, {2048, 1}}},
      {3 << 20, {{3 << 20, 0, kInt8}}, {{3 << 20, 1}}}};
}

FlatUpdate host_states(
    const StatesCase& c,
    at::ScalarType grad,
    at::ScalarType main,
    bool rounds) {
  FlatUpdate update = host_update({c.numel, c.ranges}, grad, at::kBFloat16);
  update.rows = rows_of(kSomeStep);
  update.state0 = update.state1 = at::Tensor();
  update.main = update.main.to(main);
  if (main == at::kBFloat16) {
    update.compute = at::Tensor();
  }
  update.state_ranges = c.states;
  for (StateTensors* state : {&update.exp_avg, &update.exp_avg_sq}) {
    // Each has room for all.
    state->float32 = at::zeros({c.numel});
    state->bfloat16 = at::zeros({c.numel}, at::kBFloat16);
    state->codes =
        at::zeros({c.numel}, state == &update.exp_avg ? at::kChar : at::kByte);
    state->scales = at::zeros({c.numel / kStateBlock + 1});
  }
  if (rounds) {
    // The second parameter starts inside its blocks of random words, but not
    // inside a block of states.
    const std::int64_t unit =
        c.states.front().format == StateFormat::bfloat16 ? 16 : kStateBlock;
    const std::int64_t half = c.numel / 2 / unit * unit;
    update.rounding_ranges = {{half, 0, 17}, {c.numel, 148 - half, 18}};
    update.rounding_step = 5;
  }
  return update;
}

TEST_P(CudaUpdates, AdamWWithStatesInOtherFormats) {
  const auto [grad, main] = GetParam();
  if (main == at::kHalf) {
    GTEST_SKIP() << "main weights are float32 or bfloat16";
  }
  const auto moved = [](const StateTensors& s) {
    return StateTensors{
        s.float32.to(at::kCUDA),
        s.bfloat16.to(at::kCUDA),
        s.codes.to(at::kCUDA),
        s.scales.to(at::kCUDA)};
  };
  const auto expect_same = [](const StateTensors& a, const StateTensors& b) {
    EXPECT_TRUE(a.float32.cpu().equal(b.float32));
    EXPECT_TRUE(a.bfloat16.cpu().equal(b.bfloat16));
    EXPECT_TRUE(a.codes.cpu().equal(b.codes));
    EXPECT_TRUE(a.scales.cpu().equal(b.scales));
  };
  for (const bool rounds : {false, true}) {
    if (rounds && main != at::kBFloat16) {
      continue;
    }
    for (const StatesCase& c : states_cases()) {
      SCOPED_TRACE(c.numel);
      const FlatUpdate host = host_states(c, grad, main, rounds);
      FlatUpdate gpu = on_gpu(host);
      gpu.state_ranges = host.state_ranges;
      gpu.rounding_ranges = host.rounding_ranges;
      gpu.rounding_step = host.rounding_step;
      gpu.exp_avg = moved(host.exp_avg);
      gpu.exp_avg_sq = moved(host.exp_avg_sq);
      gpu.upload_ranges(at::kCUDA);
      for (int i = 0; i < 3; ++i) {
        flat_update(Algorithm::adamw, host);
        flat_update(Algorithm::adamw, gpu);
      }
      expect_equal(gpu, host);
      expect_same(gpu.exp_avg, host.exp_avg);
      expect_same(gpu.exp_avg_sq, host.exp_avg_sq);
    }
  }
}

// Bytes and amax belong to the weights that the same kernel stores.
TEST(CudaFloat8Updates, AreMadeOfTheNewWeights) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  for (const Float8UpdateCase& c : float8_update_cases()) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(c.name);
      const std::int64_t n = c.numel;
      for (const std::vector<UpdateRange>& ranges :
           {std::vector<UpdateRange>(), {{n / 3, 1}, {n, 2}}}) {
        FlatUpdate host = host_update({n, ranges}, at::kBFloat16, compute);
        host.rows = rows_of(kSomeStep);
        FlatUpdate update = on_gpu(host);
        update.planes = c.outputs(at::kCUDA);
        flat_update(Algorithm::adamw, update);
        flat_update(Algorithm::adamw, host);
        expect_equal(update, host);
        PlaneWriter want = c.outputs(at::kCPU);
        write_float8_outputs(want, update.main.cpu());
        c.expect_same(update.planes, want);
      }
    }
  }
}

// A rank that has no row of any weight.
TEST(CudaFloat8Updates, AShardOfPaddingHasNoRuns) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  FlatUpdate host = host_update({64, {}}, at::kFloat, at::kBFloat16);
  host.rows = {kSomeStep.row()};
  FlatUpdate update = on_gpu(host);
  update.planes.amax = at::zeros({2}, at::TensorOptions(at::kCUDA));
  flat_update(Algorithm::adamw, update);
  EXPECT_FALSE(update.planes.amax.any().item<bool>());
}

TEST(CudaMuon, ElementsAreUpdatedAsOnTheHost) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  constexpr std::int64_t kNumel = 4112;
  auto generator = at::detail::createCPUGenerator(11);
  const at::Tensor grad = at::randn({kNumel}, generator);
  const at::Tensor buffer = at::randn({kNumel}, generator);
  const at::Tensor main = at::randn({kNumel}, generator);
  const at::Tensor scale = at::full({}, 0.3F);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto run = [&](at::Device device) {
      const at::Tensor m = buffer.to(device, at::kFloat, false, true);
      const at::Tensor w = main.to(device, at::kFloat, false, true);
      const at::Tensor compute = w.to(at::kBFloat16);
      const at::Tensor direction = at::empty_like(compute);
      muon_direction(
          grad.to(device, dtype),
          scale.to(device),
          m,
          direction,
          0.95,
          true);
      muon_apply(w, compute, direction, 1e-3, 0.02);
      EXPECT_TRUE(compute.equal(w.to(at::kBFloat16)));
      return std::vector<at::Tensor>{m.cpu(), w.cpu()};
    };
    const auto host = run(at::kCPU);
    const auto gpu = run(at::kCUDA);
    EXPECT_TRUE(host[0].equal(gpu[0]));
    EXPECT_TRUE(host[1].equal(gpu[1]));
  }
}

// A matrix is multiplied by blocks, and a batch of one is not.
TEST(CudaMuon, SymmetricMatmulsByBlocksAreTheCompleteOnes) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  using Shape = std::vector<std::int64_t>;
  // Three levels of blocks, one level, and rows that are not a power of two.
  for (const Shape& shape :
       {Shape{4096, 4224}, Shape{2304, 2048}, Shape{1536, 1536}}) {
    SCOPED_TRACE(shape.front());
    auto generator = at::detail::createCPUGenerator(12);
    const at::Tensor matrix =
        at::randn(shape, generator).to(at::kCUDA, at::kBFloat16);
    const at::Tensor blocks = newton_schulz(matrix.clone(), {});
    const at::Tensor complete =
        newton_schulz(matrix.unsqueeze(0).clone(), {}).squeeze(0);
    EXPECT_LT(
        (blocks - complete).to(at::kFloat).norm().item<double>(),
        2e-2 * complete.to(at::kFloat).norm().item<double>());
  }
}

TEST(CudaMuon, AStepIsTheHosts) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  constexpr double kLr = 0.02;
  constexpr int kSteps = 3;
  const auto train = [&](at::Device device) {
    ParamGroup group(
        GroupSpec{
            .name = "block",
            .parameters =
                {{.names = {"wide"},
                  .shape = {64, 128},
                  .init = InitSpec::zeros()},
                 {.names = {"norm"}, .shape = {37}, .init = InitSpec::zeros()},
                 {.names = {"tall"},
                  .shape = {256, 128},
                  .init = InitSpec::zeros()}},
            .mesh = Mesh::single(device),
            .strategy = Strategy::named("zero3", 1)},
        ParamGroupOptions{.precision = {.reduce = at::kFloat}},
        Initializer(5));
    Optimizer optimizer(
        {&group},
        ParameterRules{
            .rest = {.algorithm = Algorithm::muon, .momentum = 0.95}});
    const at::Tensor before = group.weights().main().local().cpu().clone();
    for (int step = 0; step < kSteps; ++step) {
      auto generator = at::detail::createCPUGenerator(step);
      const at::Tensor gradient = at::zeros({group.layout().numel()});
      for (int i = 0; i < 3; ++i) {
        gradient
            .narrow(
                0,
                group.layout().tensor_offset(i),
                group.layout().tensor_numel(i))
            .normal_(0, 1, generator);
      }
      group.gradients().reduce(
          gradient.to(device),
          group.plan_reduction(true, true));
      optimizer.step(kLr);
      optimizer.zero_grad();
    }
    const at::Tensor main = group.weights().main().local();
    EXPECT_TRUE(group.weights().compute_shard().equal(main.to(at::kBFloat16)));
    return main.cpu() - before;
  };
  const at::Tensor host = train(at::kCPU);
  const at::Tensor gpu = train(at::Device(at::kCUDA, 0));
  // Newton-Schulz rounds to bfloat16, and sums in another order.
  EXPECT_LT(
      (host - gpu).norm().item<double>(),
      2e-2 * host.norm().item<double>());
}

}  // namespace
}  // namespace flatshard
