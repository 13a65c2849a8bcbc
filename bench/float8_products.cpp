// Measures FP8 products on the shapes of an 8B Llama, and bfloat16's: a line of
// JSON for each, with TFLOP/s. Random data, since zeros take less power and run
// faster than a model does.
// usage: flatshard_float8_products [tokens]
#include "bench/gpu_calls.h"
#include "flatshard/float8/matmul.h"

namespace flatshard {
namespace {

using float8::Operand;
using float8::Recipe;

struct Shape {
  const char* name;
  std::int64_t m, n, k;
};

void report(
    const Shape& s,
    const std::string& recipe,
    const std::string& out,
    double us) {
  const auto m = static_cast<double>(s.m);
  const auto n = static_cast<double>(s.n);
  const auto k = static_cast<double>(s.k);
  JsonLine()
      .text("product", s.name)
      .number("m", m)
      .number("n", n)
      .number("k", k)
      .text("recipe", recipe)
      .text("out", out)
      .number("us", us, 1)
      .number("tflops", 2e-6 * m * n * k / us);
}

void measure(const Shape& s) {
  const at::Tensor a = at::randn({s.m, s.k}, kBf16);
  const at::Tensor b = at::randn({s.n, s.k}, kBf16);
  at::Tensor plain = at::empty({s.m, s.n}, kBf16);
  report(s, "bfloat16", "bfloat16", call_microseconds(1, [&](std::int64_t) {
           at::mm_out(plain, a, b.t());
         }));
  const bool gradient = std::string(s.name).starts_with("dw");
  const Recipe of_blocks =
      gradient ? Recipe::blockwise_1x128 : Recipe::blockwise;
  const auto dtypes = gradient ? std::vector{at::kBFloat16, at::kFloat}
                               : std::vector{at::kBFloat16};
  for (const auto& [ra, rb] :
       {std::pair{Recipe::tensorwise, Recipe::tensorwise},
        {Recipe::rowwise, Recipe::rowwise},
        {Recipe::blockwise_1x128, of_blocks}}) {
    const Operand x{float8::quantize(a, {ra}), ra};
    const Operand y{float8::quantize(b, {rb}), rb};
    for (const bool fast : {false, true}) {
      if (fast && (gradient || ra == Recipe::blockwise_1x128)) {
        continue;
      }
      const float8::MatmulOptions options{
          .accumulate = gradient,
          .fast_accumulation = fast};
      for (const at::ScalarType dtype : dtypes) {
        at::Tensor out = at::zeros({s.m, s.n}, kBf16.dtype(dtype));
        const double us = call_microseconds(1, [&](std::int64_t) {
          float8::matmul(out, x, y, options);
        });
        report(
            s,
            std::string(to_string(ra)) + (fast ? " fast" : ""),
            std::string(c10::toString(dtype)) + (gradient ? " +=" : ""),
            us);
      }
    }
  }
}

void run(std::int64_t tokens) {
  for (const Shape& shape :
       {Shape{"y qkv", tokens, 6144, 4096},
        {"y o", tokens, 4096, 4096},
        {"y gate+up", tokens, 28672, 4096},
        {"y down", tokens, 4096, 14336},
        {"dx gate+up", tokens, 4096, 28672},
        {"dw gate+up", 28672, 4096, tokens},
        {"dw down", 4096, 14336, tokens}}) {
    measure(shape);
  }
}

}  // namespace
}  // namespace flatshard

int main(int, char** argv) {
  return flatshard::run_on_gpu(
      "flatshard_float8_products",
      argv[1],
      flatshard::run);
}
