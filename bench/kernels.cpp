// Measures CUDA kernels on the shapes of models. Prints a line of JSON for each
// with the minimum bytes moved. bench/kernels.py adds PyTorch's kernels.
// `flatshard plan --calibrate` measures matmuls.
// usage: flatshard_kernels [tokens [word]]
// With a word, it measures only the copy and operations with it in their name.
#include <ATen/Functions.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "flatshard/comm/sum_rows.h"
#include "flatshard/device/stream.h"
#include "flatshard/device/timer.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/moe/grouped_matmul.h"
#include "flatshard/moe/permute.h"
#include "flatshard/moe/router.h"
#include "flatshard/ops/cuda_ops.h"
#include "flatshard/ops/float8/float8_fused.h"
#include "flatshard/optim/flat_update.h"

namespace flatshard {
namespace {

const at::TensorOptions kFloat = at::TensorOptions(at::kCUDA).dtype(at::kFloat);
const at::TensorOptions kBf16 = kFloat.dtype(at::kBFloat16);

using at::Tensor;
using float8::Axis;
using float8::Recipe;

struct Shape {
  const char* model;
  std::int64_t dim;
  std::int64_t ffn;
  std::int64_t heads;
  std::int64_t head_dim;
};
constexpr Shape kShapes[] = {
    {"1B", 2048, 8192, 32, 64},
    {"8B", 4096, 14336, 32, 128},
    {"70B", 8192, 28672, 64, 128}};
constexpr std::int64_t kVocab = 128256;
constexpr std::int64_t kLossRows = 2048;
constexpr std::int64_t kRanks = 8;
constexpr std::int64_t kShard = std::int64_t{1} << 26;  // of a rank, elements
constexpr AdamWStep kStep{
    .lr = 1e-4F,
    .weight_decay = 0.1F,
    .beta1 = 0.9F,
    .beta2 = 0.95F,
    .eps = 1e-8F,
    .bias_correction1 = 0.5F,
    .bias_correction2 = 0.5F};

std::string only;  // NOLINT: the word of the command line

using Tensors = std::vector<Tensor>;
using Make = std::function<Tensors()>;
using Call = std::function<void(Tensors&)>;

/// Returns the GPU time of one call in microseconds: the median over seven
/// rounds of 20 calls, after one warm-up round.
/// @param call  gets 0 to num_sets - 1, again and again.
double microseconds(
    std::int64_t num_sets,
    const std::function<void(std::int64_t)>& call) {
  const auto timer = make_stream_timer(at::Device(at::kCUDA, 0));
  constexpr int kCalls = 20;
  std::vector<double> rounds;
  for (int round = 0; round < 8; ++round) {
    timer->start();
    for (int i = 0; i < kCalls; ++i) {
      call(i % num_sets);
    }
    timer->stop();
    const double us = timer->wait_and_take_ms() * 1e3 / kCalls;
    if (round > 0) {
      rounds.push_back(us);
    }
  }
  std::ranges::sort(rounds);
  return rounds[rounds.size() / 2];
}

/// Measures `call` and prints a line of JSON. `make` is called for enough sets
/// of tensors that a set has left the caches when it is used again.
/// @param most  maximum number of sets.
void time(
    const std::string& op,
    const std::string& shape,
    std::int64_t nbytes,
    const Make& make,
    const Call& call,
    std::int64_t most = 64) {
  if (op != "copy" && op.find(only) == std::string::npos) {
    return;
  }
  constexpr std::int64_t kWorkingSet = std::int64_t{1} << 30;
  std::vector<Tensors> sets(
      std::clamp<std::int64_t>(kWorkingSet / nbytes, 1, most));
  std::ranges::generate(sets, make);
  const double us = microseconds(
      static_cast<std::int64_t>(sets.size()),
      [&](std::int64_t i) { call(sets[i]); });
  fmt::print(
      "{{\"op\": \"{}\", \"shape\": \"{}\", \"bytes\": {}, \"us\": {:.2f}}}\n",
      op,
      shape,
      nbytes,
      us);
  std::fflush(stdout);
}

/// Makes `count` tensors of random bfloat16.
Make normal(int count, std::vector<std::int64_t> shape) {
  return [=] {
    Tensors made;
    for (int i = 0; i < count; ++i) {
      made.push_back(at::randn(shape, kBf16));
    }
    return made;
  };
}

/// Operations of one shape.
struct Operations {
  std::string shape;

  void time(
      const std::string& op,
      std::int64_t nbytes,
      const Make& make,
      const Call& call) const {
    flatshard::time(op, shape, nbytes, make, call);
  }
};

void measure_layers(const Shape& s, std::int64_t tokens) {
  const Operations model{s.model};
  const std::int64_t hidden = tokens * s.dim * 2;
  const std::int64_t inner = tokens * s.ffn * 2;
  const std::int64_t heads = tokens * s.heads * s.head_dim * 2;
  const at::Tensor weight = at::ones({s.dim}, kBf16);
  const at::Tensor rstd = at::ones({tokens}, kFloat);
  const at::Tensor cos = at::randn({tokens, s.head_dim / 2}, kFloat);
  const auto rows = [&](int count) { return normal(count, {tokens, s.dim}); };
  model.time("add and rms_norm", 4 * hidden, rows(2), [&](auto& t) {
    nn::cuda::rms_norm_forward(t[0], t[1], weight, 1e-5);
  });
  model.time("rms_norm backward and add", 4 * hidden, rows(3), [&](auto& t) {
    nn::cuda::rms_norm_backward(t[0], t[1], t[2], weight, rstd, nullptr);
  });
  const std::int64_t head_rows = tokens * s.heads;
  const at::Tensor head_weight = at::ones({s.head_dim}, kBf16);
  const at::Tensor head_rstd = at::ones({head_rows}, kFloat);
  const auto head = [&](int count) {
    return normal(count, {head_rows, s.head_dim});
  };
  model.time("rms_norm of heads", 2 * heads, head(1), [&](auto& t) {
    nn::cuda::rms_norm_forward(t[0], {}, head_weight, 1e-6);
  });
  model.time("rms_norm of heads, backward", 3 * heads, head(2), [&](auto& t) {
    nn::cuda::rms_norm_backward(
        t[0],
        {},
        t[1],
        head_weight,
        head_rstd,
        nullptr);
  });
  const auto turned = normal(1, {1, tokens, s.heads, s.head_dim});
  model.time("rope", 2 * heads, turned, [&](auto& t) {
    nn::cuda::rope(t[0], t[0], cos, cos, false);
  });
  const auto wide = [&](int count) { return normal(count, {tokens, s.ffn}); };
  model.time("swiglu", 3 * inner, wide(2), [](auto& t) {
    nn::cuda::swiglu_forward(t[0], t[1]);
  });
  model.time("swiglu backward", 5 * inner, wide(3), [](auto& t) {
    nn::cuda::swiglu_backward(t[0], t[1], t[2], nullptr);
  });
}

void measure_loss() {
  const at::Tensor targets =
      at::randint(kVocab, {kLossRows}, kFloat.dtype(at::kLong));
  const at::Tensor scale = at::full({1}, 1.0 / kLossRows, kFloat);
  at::Tensor loss = at::empty({kLossRows}, kFloat);
  at::Tensor lse = at::empty({kLossRows}, kFloat);
  const nn::cuda::CrossEntropyArgs options{.write_gradient = true};
  Operations{"all"}.time(
      "cross-entropy and its gradient",
      2 * kLossRows * kVocab * 2,
      normal(1, {kLossRows, kVocab}),
      [&](auto& t) {
        nn::cuda::cross_entropy(t[0], targets, scale, loss, lse, options);
      });
}

void measure_shards() {
  const Operations shard{"shard"};
  const at::Tensor scale = at::ones({}, kFloat);
  const auto states = [] {
    return Tensors{
        at::randn({kShard}, kFloat),
        at::empty({kShard}, kBf16),
        at::randn({kShard}, kBf16),
        at::zeros({kShard}, kFloat),
        at::zeros({kShard}, kFloat)};
  };
  const auto timed = [&](const std::string& op, const FlatUpdate& groups) {
    const auto update = [&](auto& t) {
      FlatUpdate update = groups;
      update.main = t[0];
      update.compute = t[1];
      update.grad = t[2];
      update.state0 = t[3];
      update.state1 = t[4];
      update.grad_scale = scale;
      flat_update(Algorithm::adamw, update);
    };
    shard.time(op, kShard * (8 + 2 + 16 + 2), states, update);
  };
  timed("AdamW and cast", {.rows = {kStep.row()}});
  // As a layer with decayed matrices and undecayed norms has them.
  FlatUpdate groups{.rows = {kStep.row(), kStep.row()}};
  groups.rows[1].weight_decay = 0;
  constexpr std::int64_t kRuns = 9;
  for (std::int32_t i = 1; i <= kRuns; ++i) {
    groups.ranges.push_back({kShard * i / kRuns, i % 2});
  }
  groups.upload_ranges(at::kCUDA);
  groups.device_rows = upload_rows(groups.rows, at::kCUDA);
  timed("AdamW of groups", groups);
  constexpr std::int64_t kPiece = kShard / kRanks;
  constexpr std::int64_t kNbytes = (kRanks + 1) * kPiece * 2;
  const auto pieces = [] {
    return Tensors{
        at::randn({kRanks, kPiece}, kBf16),
        at::empty({kPiece}, kBf16)};
  };
  shard.time("sum of copied gradients", kNbytes, pieces, [](auto& t) {
    sum_rows(t[1], t[0], ReduceOp::avg);
  });
}

/// States of one shard in int8.
struct Int8States {
  FlatUpdate update{
      .rows = {kStep.row()},
      .state_ranges = {{.end = kShard, .format = StateFormat::int8}}};

  Int8States() {
    for (StateTensors* state : {&update.exp_avg, &update.exp_avg_sq}) {
      const bool is_signed = state == &update.exp_avg;
      state->codes =
          at::zeros({kShard}, kFloat.dtype(is_signed ? at::kChar : at::kByte));
      state->scales = at::zeros({kShard / kStateBlock}, kFloat);
    }
  }
};

void measure_states() {
  const Operations shard{"shard"};
  Int8States states;
  FlatUpdate& update = states.update;
  update.upload_ranges(at::kCUDA);
  constexpr std::int64_t kStates = 4;  // codes, read and written
  const auto measure = [&](const std::string& op,
                           std::int64_t nbytes,
                           at::ScalarType main,
                           at::ScalarType grad,
                           bool with_compute) {
    const auto make = [=] {
      return Tensors{
          at::randn({kShard}, kFloat.dtype(main)),
          at::randn({kShard}, kFloat.dtype(grad)),
          with_compute ? at::empty({kShard}, kBf16) : Tensor()};
    };
    shard.time(
        op,
        kShard * (nbytes + kStates) + kShard / kStateBlock * 16,
        make,
        [&](auto& t) {
          update.main = t[0];
          update.grad = t[1];
          update.compute = t[2];
          flat_update(Algorithm::adamw, update);
        });
  };
  measure("AdamW of int8 states and cast", 12, at::kFloat, at::kBFloat16, true);
  measure("AdamW of int8 states", 12, at::kFloat, at::kFloat, false);
  update.rounding_ranges = {{.end = kShard, .key = 7}};
  update.rounding_step = 1;
  update.upload_ranges(at::kCUDA);
  measure(
      "AdamW of int8 states, stochastic rounding",
      6,
      at::kBFloat16,
      at::kBFloat16,
      false);
}

/// Operations on the elements of one tensor.
struct Inputs {
  std::int64_t rows;
  std::int64_t columns;
  std::function<Tensor()> make;

  /// @param nbytes  of one element.
  void time(
      const std::string& op,
      std::int64_t nbytes,
      const std::function<void(const Tensor&)>& call) const {
    flatshard::time(
        op,
        fmt::format("{}x{}", rows, columns),
        rows * columns * nbytes,
        [this] { return Tensors{make()}; },
        [&](Tensors& t) { call(t[0]); },
        16);
  }
};

std::function<void(const Tensor&)> rows_of(Recipe recipe) {
  return [=](const Tensor& x) { float8::quantize(x, {recipe}); };
}

std::function<void(const Tensor&)> columns_of(Recipe recipe) {
  return [=](const Tensor& x) {
    float8::quantize(x, {recipe}, {.axis = Axis::column});
  };
}

std::function<void(const Tensor&)> both_of(Recipe recipe) {
  return [=](const Tensor& x) { float8::quantize_both(x, {recipe}); };
}

void measure_float8(std::int64_t rows, std::int64_t columns) {
  const auto inputs = [&](std::function<Tensor()> make) {
    return Inputs{rows, columns, std::move(make)};
  };
  const auto values = [=] { return at::randn({rows, columns}, kBf16); };
  const auto codes = [=] {
    return at::randint(256, {rows, columns}, kBf16.dtype(at::kByte));
  };
  const Tensor amax = at::full({}, 4.0, kFloat);
  const auto tensorwise = [=](const Tensor& x) {
    float8::quantize(x, {}, {.amax = amax});
  };
  const Inputs x = inputs(values);
  x.time("amax", 2, [](const Tensor& t) { float8::amax_of(t); });
  x.time("cast tensorwise", 3, tensorwise);
  x.time("cast and transpose tensorwise", 4, [&](const Tensor& t) {
    float8::quantize_both(t, {}, 1, amax);
  });
  x.time("rowwise rows", 3, rows_of(Recipe::rowwise));
  // Its columns' scales need a separate reading.
  x.time("rowwise both", 6, both_of(Recipe::rowwise));
  for (const Recipe recipe :
       {Recipe::blockwise, Recipe::blockwise_1x128, Recipe::mxfp8}) {
    const std::string name(to_string(recipe));
    x.time(name + " rows", 3, rows_of(recipe));
    x.time(name + " columns", 3, columns_of(recipe));
    x.time(name + " both", 4, both_of(recipe));
  }
  const Inputs wide = inputs([=] {
    return at::randn({rows, columns}, kFloat);
  });
  wide.time("cast tensorwise from float32", 5, tensorwise);
  wide.time("mxfp8 both from float32", 6, both_of(Recipe::mxfp8));
  inputs(codes).time("byte transpose", 2, [](const Tensor& t) {
    float8::transpose_bytes(t);
  });
  const Tensor scales = float8::quantize(values(), {Recipe::mxfp8}).scales;
  const Inputs masked = inputs(
      [=] { return codes().bitwise_and(0x77).view(at::kFloat8_e4m3fn); });
  masked.time("dequantize mxfp8 to bfloat16", 3, [=](const Tensor& t) {
    const float8::DequantizeOptions options{.dtype = at::kBFloat16};
    float8::dequantize({t, scales}, Recipe::mxfp8, options);
  });
  time(
      "swizzle of scales",
      fmt::format("{}x{}", rows, columns),
      rows * columns / 16,
      [=] {
        return Tensors{
            at::randint(256, {rows, columns / 32}, kBf16.dtype(at::kByte))
                .view(at::kFloat8_e8m0fnu)};
      },
      [](Tensors& t) { float8::swizzle_mx_scales(t[0]); },
      16);
}

// Measures kernels that quantize what they compute. A tensor stores the inputs
// side by side, and bytes count all passes that a recipe needs.
void measure_fused(std::int64_t tokens) {
  constexpr std::int64_t kDim = 4096;
  constexpr std::int64_t kFfn = 14336;
  const auto hidden = [&](std::int64_t count) {
    return Inputs{tokens, kDim, [=] {
                    return at::randn({count, tokens, kDim}, kBf16);
                  }};
  };
  const Inputs halves{tokens, kFfn, [=] {
                        return at::randn({tokens, 2 * kFfn}, kBf16);
                      }};
  const Tensor dy = at::randn({tokens, kFfn}, kBf16);
  const Tensor weight = at::ones({kDim}, kBf16);
  const Tensor rstd = at::ones({tokens}, kFloat);
  for (const Recipe recipe :
       {Recipe::tensorwise, Recipe::blockwise_1x128, Recipe::mxfp8}) {
    const std::string name(to_string(recipe));
    // Tensorwise reads everything twice: for amax, and for the planes.
    const bool twice = recipe == Recipe::tensorwise;
    halves.time("swiglu " + name, twice ? 10 : 6, [=](const Tensor& x) {
      const auto both = x.split(kFfn, 1);
      nn::swiglu_float8(both[0], both[1], {recipe});
    });
    const auto backward = [=](const Tensor& x) {
      // Tensorwise requires contiguous halves.
      const auto both =
          twice ? x.view({2, tokens, kFfn}).unbind() : x.split(kFfn, 1);
      nn::swiglu_backward_float8(dy, both[0], both[1], {recipe});
    };
    halves.time("swiglu backward " + name, twice ? 18 : 10, backward);
    hidden(2).time("add and norm " + name, 10, [=](const Tensor& x) {
      nn::rms_norm_float8(x[0], x[1], weight, 1e-5, {recipe});
    });
  }
  hidden(3).time("norm backward, add and amax", 8, [=](const Tensor& x) {
    nn::rms_norm_backward_amax(x[0], x[1], x[2], weight, rstd);
  });
}

void measure_float8_updates() {
  const Tensor grad = at::randn({kShard}, kBf16);
  const Tensor states = at::zeros({2, kShard}, kFloat);
  constexpr std::int64_t kColumns = 4096;
  PlaneWriter amax{
      .runs = {{.end = kShard, .columns = kColumns}},
      .amax = at::zeros({kShard / kColumns}, kFloat)};
  PlaneWriter rows = amax;
  rows.runs.front().block_rows = rows.runs.front().amax_stride = 1;
  rows.runs.front().block_columns = kColumns;
  PlaneWriter blocks = amax;
  blocks.runs.front().block_rows = blocks.runs.front().block_columns =
      float8::kBlock;
  blocks.runs.front().amax_stride = kColumns / float8::kBlock;
  PlaneWriter mx{
      .runs = {{.end = kShard, .columns = kColumns}},
      .data = at::empty({kShard}, kFloat.dtype(at::kByte)),
      .scales = at::empty({kShard / 32}, kFloat.dtype(at::kByte))};
  for (PlaneWriter* outputs : {&amax, &rows, &blocks, &mx}) {
    outputs->upload(at::kCUDA);
  }
  const Make main_weights = [] { return Tensors{at::randn({kShard}, kFloat)}; };
  for (const auto& [name, outputs, nbytes] :
       {std::tuple{"AdamW and amax", amax, 26},
        {"AdamW and amax of rows", rows, 26},
        {"AdamW and amax of blocks", blocks, 26},
        {"AdamW and mxfp8", mx, 27}}) {
    const auto update = [&, &outputs = outputs](Tensors& t) {
      flat_update(
          Algorithm::adamw,
          {.main = t[0],
           .grad = grad,
           .state0 = states[0],
           .state1 = states[1],
           .rows = {kStep.row()},
           .planes = outputs});
    };
    time(name, "shard", kShard * nbytes, main_weights, update, 16);
  }
}

/// Measures the parts of a layer of experts, at the sizes of Qwen3-30B-A3B.
void measure_experts(std::int64_t tokens) {
  constexpr std::int64_t kExperts = 128;
  constexpr std::int64_t kPerToken = 8;
  constexpr std::int64_t kDim = 2048;
  constexpr std::int64_t kWidth = 768;
  const Operations experts{"experts"};
  const Tensor logits = at::randn({tokens, kExperts}, kFloat);
  const nn::RouterOptions options{.experts_per_token = kPerToken};
  const nn::Routing routing = nn::route(logits, {}, options);
  const nn::Permutation order =
      nn::sort_by_expert(routing.experts, routing.counts);
  const std::int64_t rows = tokens * kPerToken;
  const std::int64_t hidden = tokens * kDim * 2;
  const auto scores = [&] { return Tensors{at::randn_like(logits)}; };
  experts.time("route", tokens * kExperts * 4, scores, [&](auto& t) {
    const nn::Routing routed = nn::route(t[0], {}, options);
    nn::sort_by_expert(routed.experts, routed.counts);
  });
  experts.time(
      "permute rows",
      hidden * (1 + kPerToken),
      normal(1, {tokens, kDim}),
      [&](auto& t) { nn::permute_rows(t[0], order); });
  const auto rows_and_tokens = [=] {
    return Tensors{
        at::randn({rows, kDim}, kBf16),
        at::randn({tokens, kDim}, kBf16)};
  };
  experts.time(
      "sum rows of tokens",
      hidden * (kPerToken + 2),
      rows_and_tokens,
      [&](auto& t) { nn::sum_rows_of_tokens(t[0], order, t[1]); });
  const nn::Groups groups{routing.counts.cumsum(0, at::kInt)};
  const auto products = [=] {
    return Tensors{
        at::randn({rows, kDim}, kBf16),
        at::randn({rows, 2 * kWidth}, kBf16),
        at::randn({rows, kWidth}, kBf16),
        at::randn({kExperts, 2 * kWidth, kDim}, kBf16),
        at::randn({kExperts, kDim, kWidth}, kBf16),
        at::empty({kExperts, 2 * kWidth, kDim}, kBf16),
        at::empty({kExperts, kDim, kWidth}, kBf16)};
  };
  time(
      "products of experts, forward and backward",
      "experts",
      6 * kExperts * kDim * kWidth * 2,
      products,
      [&](auto& t) {
        nn::grouped_forward(t[0], t[3], groups);
        nn::grouped_forward(t[2], t[4], groups);
        nn::grouped_input_gradient(t[0], t[4], groups);
        nn::grouped_weight_gradient(t[6], false, t[0], t[2], groups);
        nn::grouped_input_gradient(t[1], t[3], groups);
        nn::grouped_weight_gradient(t[5], false, t[1], t[0], groups);
      },
      1);
  const auto sums = [=] {
    Tensors made = products();
    made[5] = made[5].to(at::kFloat);
    made[6] = made[6].to(at::kFloat);
    return made;
  };
  time(
      "weight gradients of experts, added to float32",
      "experts",
      3 * kExperts * kDim * kWidth * 8,
      sums,
      [&](auto& t) {
        nn::grouped_weight_gradient(t[6], true, t[0], t[2], groups);
        nn::grouped_weight_gradient(t[5], true, t[1], t[0], groups);
      },
      1);
}

void measure_copy() {
  constexpr std::int64_t kNbytes = std::int64_t{1} << 28;
  const auto zeros = [] {
    return at::zeros({kNbytes}, kBf16.dtype(at::kByte));
  };
  time(
      "copy",
      "256MiB",
      2 * kNbytes,
      [=] {
        return Tensors{zeros(), zeros()};
      },
      [](Tensors& t) { t[1].copy_(t[0]); },
      4);
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  using namespace flatshard;
  if (!cuda_available()) {
    fmt::print(stderr, "flatshard_kernels: expected a GPU, found none\n");
    return 77;
  }
  const std::int64_t tokens = argc > 1 ? std::atoll(argv[1]) : 8192;
  only = argc > 2 ? argv[2] : "";
  const at::NoGradGuard no_grad;
  measure_copy();
  for (const Shape& shape : kShapes) {
    measure_layers(shape, tokens);
  }
  measure_loss();
  measure_shards();
  measure_states();
  for (const std::int64_t columns : {4096, 14336}) {
    measure_float8(tokens, columns);
  }
  measure_fused(tokens);
  measure_float8_updates();
  measure_experts(tokens);
  return 0;
}
