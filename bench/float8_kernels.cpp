// Measures the kernels of FP8 on the shapes of an 8B Llama: the bytes that each
// has to move at least, over its time, and as a part of what the card's memory
// gives a copy. bench/float8_kernels.py adds PyTorch's.
// usage: flatshard_float8_kernels [--json] [tokens]
#include <tuple>

#include "bench/gpu_calls.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/nn/float8_fused.h"
#include "flatshard/optim/flat_update.h"

namespace flatshard {
namespace {

using at::Tensor;
using float8::Axis;
using float8::Recipe;
using Make = std::function<Tensor()>;
using Call = std::function<void(const Tensor&)>;

class Table {
 public:
  explicit Table(bool json) : json_(json) {}

  // `call` takes one of the tensors that `make` made.
  void add(
      const std::string& op,
      const std::string& shape,
      std::int64_t nbytes,
      const Make& make,
      const Call& call) {
    const auto sets = sets_of_arguments(nbytes, 16, make);
    const auto num = static_cast<std::int64_t>(sets.size());
    const double us = call_microseconds(num, [&](auto i) { call(sets[i]); });
    const double gb_per_s = static_cast<double>(nbytes) / us * 1e-3;
    copy_ = op == "copy" ? gb_per_s : copy_;
    const double of_copy = gb_per_s / copy_;
    if (json_) {
      JsonLine()
          .text("op", op)
          .text("shape", shape)
          .number("bytes", static_cast<double>(nbytes))
          .number("us", us, 2)
          .number("gb_per_s", gb_per_s)
          .number("of_copy", of_copy, 3);
      return;
    }
    constexpr auto kRow =
        "{:<34} {:<14} {:>9.1f} us {:>6.0f} GB/s {:>5.2f} of a copy\n";
    fmt::print(kRow, op, shape, us, gb_per_s, of_copy);
    std::fflush(stdout);
  }

 private:
  bool json_;
  double copy_ = 1;
};

// Operations on tensors of one kind.
struct Inputs {
  Table& table;
  std::int64_t rows;
  std::int64_t columns;
  Make make;

  // Bytes are those of one element.
  void time(const std::string& op, std::int64_t nbytes, const Call& call)
      const {
    const std::string shape = fmt::format("{}x{}", rows, columns);
    table.add(op, shape, rows * columns * nbytes, make, call);
  }
};

Call rows_of(Recipe recipe) {
  return [=](const Tensor& x) { float8::quantize(x, {recipe}); };
}

Call columns_of(Recipe recipe) {
  return [=](const Tensor& x) {
    float8::quantize(x, {recipe}, {.axis = Axis::column});
  };
}

Call both_of(Recipe recipe) {
  return [=](const Tensor& x) { float8::quantize_both(x, {recipe}); };
}

void measure(Table& table, std::int64_t rows, std::int64_t columns) {
  const auto inputs = [&](const Make& make) {
    return Inputs{table, rows, columns, make};
  };
  const auto values = [=] { return at::randn({rows, columns}, kBf16); };
  const auto codes = [=] {
    return at::randint(256, {rows, columns}, kBf16.dtype(at::kByte));
  };
  const Tensor amax = at::full({}, 4.0, kFloat);
  const Call tensorwise = [=](const Tensor& x) {
    float8::quantize(x, {}, {.amax = amax});
  };
  const Inputs x = inputs(values);
  x.time("amax", 2, [](const Tensor& t) { float8::amax_of(t); });
  x.time("cast tensorwise", 3, tensorwise);
  x.time("cast and transpose tensorwise", 4, [&](const Tensor& t) {
    float8::quantize_both(t, {}, 1, amax);
  });
  x.time("rowwise rows", 3, rows_of(Recipe::rowwise));
  // Its columns' scales need a reading of their own.
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
  const auto scale_bytes = [=] {
    return at::randint(256, {rows, columns / 32}, kBf16.dtype(at::kByte))
        .view(at::kFloat8_e8m0fnu);
  };
  table.add(
      "swizzle of scales",
      fmt::format("{}x{}", rows, columns),
      rows * columns / 16,
      scale_bytes,
      [](const Tensor& t) { float8::swizzle_mx_scales(t); });
}

// Measures kernels that quantize what they compute. A tensor holds the inputs
// side by side, and bytes are those of all passes that a recipe needs.
void measure_fused(Table& table, std::int64_t tokens) {
  constexpr std::int64_t kDim = 4096;
  constexpr std::int64_t kFfn = 14336;
  const auto hidden = [&](std::int64_t count) {
    return Inputs{table, tokens, kDim, [=] {
                    return at::randn({count, tokens, kDim}, kBf16);
                  }};
  };
  const Inputs halves{table, tokens, kFfn, [=] {
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
    const Call backward = [=](const Tensor& x) {
      // Tensorwise takes contiguous halves.
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

void measure_adamw(Table& table) {
  const Tensor grad = at::randn({kShard}, kBf16);
  const Tensor states = at::zeros({2, kShard}, kFloat);
  constexpr std::int64_t kColumns = 4096;
  Float8Outputs amax{
      .runs = {{.end = kShard, .columns = kColumns}},
      .amax = at::zeros({kShard / kColumns}, kFloat)};
  Float8Outputs rows = amax;
  rows.runs.front().block_rows = rows.runs.front().amax_stride = 1;
  rows.runs.front().block_columns = kColumns;
  Float8Outputs blocks = amax;
  blocks.runs.front().block_rows = blocks.runs.front().block_columns =
      float8::kBlock;
  blocks.runs.front().amax_stride = kColumns / float8::kBlock;
  Float8Outputs mx{
      .runs = {{.end = kShard, .columns = kColumns}},
      .data = at::empty({kShard}, kFloat.dtype(at::kByte)),
      .scales = at::empty({kShard / 32}, kFloat.dtype(at::kByte))};
  for (Float8Outputs* outputs : {&amax, &rows, &blocks, &mx}) {
    outputs->upload(at::kCUDA);
  }
  const AdamWStep step{
      .lr = 1e-4F,
      .beta1 = 0.9F,
      .beta2 = 0.95F,
      .eps = 1e-8F,
      .bias_correction1 = 0.5F,
      .bias_correction2 = 0.5F};
  const Make main_weights = [] { return at::randn({kShard}, kFloat); };
  for (const auto& [name, outputs, nbytes] :
       {std::tuple{"AdamW", Float8Outputs{}, 26},
        {"AdamW and amax", amax, 26},
        {"AdamW and amax of rows", rows, 26},
        {"AdamW and amax of blocks", blocks, 26},
        {"AdamW and mxfp8", mx, 27}}) {
    const auto update = [&, &outputs = outputs](const Tensor& main) {
      adamw_update(
          {.main = main,
           .grad = grad,
           .state0 = states[0],
           .state1 = states[1],
           .decay = {{kShard, 0.1F}},
           .float8 = outputs},
          step);
    };
    table.add(name, "shard", kShard * nbytes, main_weights, update);
  }
}

void run(bool json, std::int64_t tokens) {
  Table table(json);
  const std::int64_t n = std::int64_t{1} << 28;
  const auto zeros = [] { return at::zeros({n}, kBf16.dtype(at::kByte)); };
  const Tensor to = zeros();
  table.add("copy", "256MiB", 2 * n, zeros, [=](const Tensor& from) {
    to.copy_(from);
  });
  for (const std::int64_t columns : {4096, 14336}) {
    measure(table, tokens, columns);
  }
  measure_fused(table, tokens);
  measure_adamw(table);
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  const bool json = argc > 1 && std::string(argv[1]) == "--json";
  return flatshard::run_on_gpu(
      "flatshard_float8_kernels",
      argv[json ? 2 : 1],
      [=](std::int64_t tokens) { flatshard::run(json, tokens); });
}
