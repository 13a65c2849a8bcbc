// How fast the kernels of FP8 run on the shapes of an 8B Llama: for each the
// bytes that it has to move at least, over its time, beside what the card's
// memory gives a copy. bench/float8_kernels.py sets PyTorch's beside them.
// usage: flatshard_float8_kernels [--json] [tokens]
#include <ATen/Functions.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "bench/call_time.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/nn/float8_fused.h"
#include "flatshard/optim/flat_update.h"

namespace flatshard {
namespace {

using float8::Axis;
using float8::Plane;
using float8::Quantizer;
using float8::Recipe;

// Of arguments, so that none is still in a cache when its turn comes.
constexpr std::int64_t kWorkingSet = std::int64_t{1} << 30;

const at::TensorOptions kBf16 =
    at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);

struct Options {
  bool json = false;
  std::int64_t tokens = 8192;
};

struct Result {
  std::string op;
  std::string shape;
  std::int64_t nbytes;
  double us;
  double gb_per_s() const { return static_cast<double>(nbytes) / us * 1e-3; }
};

class Table {
 public:
  explicit Table(Options options) : options_(options) {}

  // `call` takes one of the tensors that `make` made.
  void add(
      const std::string& op,
      const std::string& shape,
      std::int64_t nbytes,
      const std::function<at::Tensor()>& make,
      const std::function<void(const at::Tensor&)>& call) {
    const std::int64_t num = std::max<std::int64_t>(
        1,
        kWorkingSet / std::max(nbytes, std::int64_t{1}));
    std::vector<at::Tensor> sets;
    for (std::int64_t i = 0; i < std::min<std::int64_t>(num, 16); ++i) {
      sets.push_back(make());
    }
    const auto size = static_cast<std::int64_t>(sets.size());
    const double us =
        call_microseconds(size, [&](std::int64_t i) { call(sets[i]); });
    report({op, shape, nbytes, us});
  }

 private:
  void report(const Result& r) {
    if (r.op == "copy") {
      copy_ = r.gb_per_s();
    }
    if (options_.json) {
      fmt::print(
          "{{\"op\": \"{}\", \"shape\": \"{}\", \"bytes\": {}, \"us\": {:.2f}, "
          "\"gb_per_s\": {:.0f}, \"of_copy\": {:.3f}}}\n",
          r.op,
          r.shape,
          r.nbytes,
          r.us,
          r.gb_per_s(),
          r.gb_per_s() / copy_);
    } else {
      fmt::print(
          "{:<34} {:<14} {:>9.1f} us {:>6.0f} GB/s {:>5.2f} of a copy\n",
          r.op,
          r.shape,
          r.us,
          r.gb_per_s(),
          r.gb_per_s() / copy_);
    }
    std::fflush(stdout);
  }

  Options options_;
  double copy_ = 1;
};

void measure(Table& table, std::int64_t rows, std::int64_t columns) {
  const std::string shape = fmt::format("{}x{}", rows, columns);
  const std::int64_t n = rows * columns;
  const auto values = [=] { return at::randn({rows, columns}, kBf16); };
  const at::Tensor amax = at::full({}, 4.0, kBf16.dtype(at::kFloat));
  table.add("amax", shape, 2 * n, values, [](const at::Tensor& x) {
    float8::amax_of(x);
  });
  table.add("cast tensorwise", shape, 3 * n, values, [&](const at::Tensor& x) {
    float8::quantize(x, {}, {.amax = amax});
  });
  table.add(
      "cast and transpose tensorwise",
      shape,
      4 * n,
      values,
      [&](const at::Tensor& x) { float8::quantize_both(x, {}, 1, amax); });
  table.add("rowwise rows", shape, 3 * n, values, [](const at::Tensor& x) {
    float8::quantize(x, {Recipe::rowwise});
  });
  // Its columns' scales need a reading of their own.
  table.add("rowwise both", shape, 6 * n, values, [](const at::Tensor& x) {
    float8::quantize_both(x, {Recipe::rowwise});
  });
  for (const Recipe recipe :
       {Recipe::blockwise, Recipe::blockwise_1x128, Recipe::mxfp8}) {
    const std::string name(to_string(recipe));
    table.add(name + " rows", shape, 3 * n, values, [=](const at::Tensor& x) {
      float8::quantize(x, {recipe});
    });
    table
        .add(name + " columns", shape, 3 * n, values, [=](const at::Tensor& x) {
          float8::quantize(x, {recipe}, {.axis = Axis::column});
        });
    table.add(name + " both", shape, 4 * n, values, [=](const at::Tensor& x) {
      float8::quantize_both(x, {recipe});
    });
  }
  table.add(
      "cast tensorwise from float32",
      shape,
      5 * n,
      [=] {
        return at::randn({rows, columns}, kBf16.dtype(at::kFloat));
      },
      [&](const at::Tensor& x) { float8::quantize(x, {}, {.amax = amax}); });
  table.add(
      "mxfp8 both from float32",
      shape,
      6 * n,
      [=] {
        return at::randn({rows, columns}, kBf16.dtype(at::kFloat));
      },
      [](const at::Tensor& x) { float8::quantize_both(x, {Recipe::mxfp8}); });
  const auto bytes = [=] {
    return at::randint(256, {rows, columns}, kBf16.dtype(at::kByte));
  };
  table.add("byte transpose", shape, 2 * n, bytes, [](const at::Tensor& x) {
    float8::transpose_bytes(x);
  });
  const at::Tensor scales = float8::quantize(values(), {Recipe::mxfp8}).scales;
  table.add(
      "dequantize mxfp8 to bfloat16",
      shape,
      3 * n,
      [=] { return bytes().bitwise_and(0x77).view(at::kFloat8_e4m3fn); },
      [=](const at::Tensor& x) {
        float8::dequantize(
            {x, scales},
            Recipe::mxfp8,
            {.dtype = at::kBFloat16});
      });
  table.add(
      "swizzle of scales",
      shape,
      n / 16,
      [=] {
        return at::randint(256, {rows, columns / 32}, kBf16.dtype(at::kByte))
            .view(at::kFloat8_e8m0fnu);
      },
      [](const at::Tensor& x) { float8::swizzle_mx_scales(x); });
}

// What is quantized where it is computed: a tensor holds its inputs side by
// side. Bytes are those of all passes that a recipe needs.
void measure_fused(Table& table, std::int64_t tokens) {
  constexpr std::int64_t kDim = 4096;
  constexpr std::int64_t kFfn = 14336;
  const std::int64_t inner = tokens * kFfn;
  const std::int64_t hidden = tokens * kDim;
  const auto halves = [=] { return at::randn({tokens, 2 * kFfn}, kBf16); };
  const at::Tensor dy = at::randn({tokens, kFfn}, kBf16);
  const at::Tensor weight = at::ones({kDim}, kBf16);
  const at::Tensor rstd = at::ones({tokens}, kBf16.dtype(at::kFloat));
  const std::string wide = fmt::format("{}x{}", tokens, kFfn);
  const std::string narrow = fmt::format("{}x{}", tokens, kDim);
  for (const Recipe recipe :
       {Recipe::tensorwise, Recipe::blockwise_1x128, Recipe::mxfp8}) {
    const std::string name(to_string(recipe));
    // Tensorwise reads everything twice: for amax, and for the planes.
    const bool twice = recipe == Recipe::tensorwise;
    table.add(
        "swiglu " + name,
        wide,
        inner * (twice ? 10 : 6),
        halves,
        [=](const at::Tensor& x) {
          nn::swiglu_float8(
              x.narrow(1, 0, kFfn),
              x.narrow(1, kFfn, kFfn),
              {recipe});
        });
    table.add(
        "swiglu backward " + name,
        wide,
        inner * (twice ? 18 : 10),
        [=] { return halves(); },
        [=](const at::Tensor& x) {
          // Tensorwise takes contiguous halves.
          const at::Tensor gate =
              twice ? x.view({2, tokens, kFfn})[0] : x.narrow(1, 0, kFfn);
          const at::Tensor up =
              twice ? x.view({2, tokens, kFfn})[1] : x.narrow(1, kFfn, kFfn);
          nn::swiglu_backward_float8(dy, gate, up, {recipe});
        });
    table.add(
        "add and norm " + name,
        narrow,
        hidden * 10,
        [=] {
          return at::randn({2, tokens, kDim}, kBf16);
        },
        [=](const at::Tensor& x) {
          nn::rms_norm_float8(x[0], x[1], weight, 1e-5, {recipe});
        });
  }
  table.add(
      "norm backward, add and amax",
      narrow,
      hidden * 8,
      [=] {
        return at::randn({3, tokens, kDim}, kBf16);
      },
      [=](const at::Tensor& x) {
        nn::rms_norm_backward_amax(x[0], x[1], x[2], weight, rstd);
      });
}

void measure_adamw(Table& table) {
  constexpr std::int64_t kShard = std::int64_t{1} << 26;
  const auto f32 = kBf16.dtype(at::kFloat);
  const at::Tensor grad = at::randn({kShard}, kBf16);
  const at::Tensor states = at::zeros({2, kShard}, f32);
  constexpr std::int64_t kColumns = 4096;
  Float8Outputs amax{
      .runs = {{.end = kShard, .columns = kColumns}},
      .amax = at::zeros({kShard / kColumns}, f32)};
  Float8Outputs rows = amax;
  rows.runs.front().block_rows = rows.runs.front().amax_stride = 1;
  rows.runs.front().block_columns = kColumns;
  Float8Outputs blocks = amax;
  blocks.runs.front().block_rows = blocks.runs.front().block_columns =
      float8::kBlock;
  blocks.runs.front().amax_stride = kColumns / float8::kBlock;
  Float8Outputs mx{
      .runs = {{.end = kShard, .columns = kColumns}},
      .data = at::empty({kShard}, f32.dtype(at::kByte)),
      .scales = at::empty({kShard / 32}, f32.dtype(at::kByte))};
  for (Float8Outputs* outputs : {&amax, &rows, &blocks, &mx}) {
    outputs->upload(at::kCUDA);
  }
  for (const auto& [name, outputs, nbytes] :
       {std::tuple{"AdamW", Float8Outputs{}, 26},
        {"AdamW and amax", amax, 26},
        {"AdamW and amax of rows", rows, 26},
        {"AdamW and amax of blocks", blocks, 26},
        {"AdamW and mxfp8", mx, 27}}) {
    table.add(
        name,
        "shard",
        kShard * nbytes,
        [=] { return at::randn({kShard}, f32); },
        [&, outputs = outputs](const at::Tensor& main) {
          adamw_update(
              {.main = main,
               .grad = grad,
               .state0 = states[0],
               .state1 = states[1],
               .decay = {{kShard, 0.1F}},
               .float8 = outputs},
              {.lr = 1e-4F,
               .beta1 = 0.9F,
               .beta2 = 0.95F,
               .eps = 1e-8F,
               .bias_correction1 = 0.5F,
               .bias_correction2 = 0.5F});
        });
  }
}

int run(const Options& options) {
  if (!cuda_available()) {
    fmt::print(
        stderr,
        "flatshard_float8_kernels: expected a GPU, and found none\n");
    return 77;
  }
  Table table(options);
  const std::int64_t n = std::int64_t{1} << 28;
  const at::Tensor to = at::empty({n}, kBf16.dtype(at::kByte));
  table.add(
      "copy",
      "256MiB",
      2 * n,
      [=] { return at::zeros({n}, kBf16.dtype(at::kByte)); },
      [=](const at::Tensor& from) { to.copy_(from); });
  for (const std::int64_t columns : {4096, 14336}) {
    measure(table, options.tokens, columns);
  }
  measure_fused(table, options.tokens);
  measure_adamw(table);
  return 0;
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  flatshard::Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--json") {
      options.json = true;
    } else {
      options.tokens = std::atoll(argv[i]);
    }
  }
  return flatshard::run(options);
}
