// How fast FP8 products run on the shapes of an 8B Llama, beside bfloat16's:
// a line of JSON for each, with TFLOP/s. Random data, since zeros take less
// power and run faster than a model does.
// usage: flatshard_float8_products [tokens]
#include <ATen/Functions.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/call_time.h"
#include "flatshard/float8/matmul.h"

namespace flatshard {
namespace {

using float8::Operand;
using float8::Recipe;

const at::TensorOptions kBf16 =
    at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);

struct Shape {
  const char* name;
  std::int64_t m, n, k;
};

void report(
    const Shape& s,
    const std::string& recipe,
    const std::string& out,
    double us) {
  fmt::print(
      "{{\"product\": \"{}\", \"m\": {}, \"n\": {}, \"k\": {}, \"recipe\": "
      "\"{}\", \"out\": \"{}\", \"us\": {:.1f}, \"tflops\": {:.0f}}}\n",
      s.name,
      s.m,
      s.n,
      s.k,
      recipe,
      out,
      us,
      2e-6 * static_cast<double>(s.m) * static_cast<double>(s.n) *
          static_cast<double>(s.k) / us);
  std::fflush(stdout);
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
      for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
        if (dtype == at::kFloat && !gradient) {
          continue;
        }
        at::Tensor out = at::zeros({s.m, s.n}, kBf16.dtype(dtype));
        const double us = call_microseconds(1, [&](std::int64_t) {
          float8::matmul(
              out,
              x,
              y,
              {.accumulate = gradient, .fast_accumulation = fast});
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

int run(std::int64_t tokens) {
  if (!cuda_available()) {
    fmt::print(
        stderr,
        "flatshard_float8_products: expected a GPU, and found none\n");
    return 77;
  }
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
  return 0;
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  return flatshard::run(argc > 1 ? std::atoll(argv[1]) : 8192);
}
