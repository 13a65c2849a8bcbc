// Measures matmuls: in bfloat16, of experts, and in FP8.
#include "flatshard/float8/float8_matmul.h"
#include "flatshard/moe/grouped_matmul.h"
#include "flatshard/train/plan/calibrate.h"
#include "flatshard/train/plan/call_timer.h"

#include <ATen/ATen.h>

namespace flatshard {
namespace {

using plan::Product;

constexpr double kTeraFlops = 1e12;

/// Contiguous matrices of changing shapes in one place of memory.
class Scratch {
 public:
  Scratch(at::Device device, std::int64_t numel)
      : memory_(normal_bf16(device, {numel})) {}
  at::Tensor matrix(std::int64_t rows, std::int64_t columns) const {
    return memory_.narrow(0, 0, rows * columns).view({rows, columns});
  }

 private:
  at::Tensor memory_;
};

std::vector<double> as_doubles(const std::vector<std::int64_t>& sizes) {
  return {sizes.begin(), sizes.end()};
}

/// Fills a grid with what `seconds(m, n, k)` makes of 2 `groups` m n k FLOPs.
template <class Seconds>
plan::ProductRates measure_grid(
    const std::vector<std::int64_t>& m,
    const std::vector<std::int64_t>& n,
    const std::vector<std::int64_t>& k,
    double groups,
    Seconds&& seconds) {
  plan::ProductRates rates{
      .m = as_doubles(m),
      .n = as_doubles(n),
      .k = as_doubles(k)};
  for (const std::int64_t rows : m) {
    for (const std::int64_t columns : n) {
      for (const std::int64_t inner : k) {
        const double flops = 2 * groups * static_cast<double>(rows) *
                             static_cast<double>(columns) *
                             static_cast<double>(inner);
        rates.tflops.push_back(
            flops / seconds(rows, columns, inner) / kTeraFlops);
      }
    }
  }
  return rates;
}

}  // namespace

void calibrate_products(
    const CallTimer& timer,
    const CalibrateOptions& options,
    plan::Gpu& gpu) {
  const at::Device device = timer.device();
  const std::vector<std::int64_t>& sizes = options.products;
  const std::int64_t most = sizes.back() * sizes.back();
  const Scratch a(device, most);
  const Scratch b(device, most);
  const Scratch c(device, most);
  // Operands have the same layouts as in the matmuls of nn::Linear.
  const auto run =
      [&](Product product, std::int64_t m, std::int64_t n, std::int64_t k) {
        at::Tensor out = c.matrix(m, n);
        const at::Tensor left =
            product == Product::wgrad ? a.matrix(k, m).t() : a.matrix(m, k);
        const at::Tensor right =
            product == Product::forward ? b.matrix(n, k).t() : b.matrix(k, n);
        return timer([&] { at::mm_out(out, left, right); });
      };
  for (std::size_t i = 0; i < plan::kNumProducts; ++i) {
    gpu.products[i] = measure_grid(
        sizes,
        sizes,
        sizes,
        1,
        [&](std::int64_t m, std::int64_t n, std::int64_t k) {
          return run(static_cast<Product>(i), m, n, k);
        });
  }

  constexpr std::int64_t kExperts = 16;
  const std::int64_t widest = options.group_dims.back();
  const std::int64_t rows = kExperts * options.group_rows.back();
  const Scratch x(device, rows * widest);
  const Scratch y(device, rows * widest);
  const Scratch w(device, kExperts * widest * widest);
  const auto run_grouped = [&](Product product,
                               std::int64_t m,
                               std::int64_t n,
                               std::int64_t k) {
    const nn::Groups groups{
        at::arange(1, kExperts + 1, at::TensorOptions(device).dtype(at::kInt)) *
        m};
    const auto weight = [&](std::int64_t out, std::int64_t in) {
      return w.matrix(kExperts * out, in).view({kExperts, out, in});
    };
    return timer([&] {
      if (product == Product::forward) {
        nn::grouped_forward(x.matrix(kExperts * m, k), weight(n, k), groups);
      } else if (product == Product::dgrad) {
        nn::grouped_input_gradient(
            x.matrix(kExperts * m, k),
            weight(k, n),
            groups);
      } else {
        at::Tensor grad = weight(n, k);
        nn::grouped_weight_gradient(
            grad,
            /*accumulate=*/false,
            x.matrix(kExperts * m, n),
            y.matrix(kExperts * m, k),
            groups);
      }
    });
  };
  for (std::size_t i = 0; i < plan::kNumProducts; ++i) {
    gpu.grouped[i] = measure_grid(
        options.group_rows,
        options.group_dims,
        options.group_dims,
        kExperts,
        [&](std::int64_t m, std::int64_t n, std::int64_t k) {
          return run_grouped(static_cast<Product>(i), m, n, k);
        });
  }
}

void calibrate_float8(
    const CallTimer& timer,
    const CalibrateOptions& options,
    plan::Gpu& gpu) {
  const at::Device device = timer.device();
  if (options.float8.empty()) {
    return;
  }
  const std::int64_t most = options.float8.back() * options.float8.back();
  const Scratch a(device, most);
  const Scratch b(device, most);
  const Scratch c(device, most);
  for (const float8::Recipe recipe :
       {float8::Recipe::tensorwise,
        float8::Recipe::rowwise,
        float8::Recipe::blockwise,
        float8::Recipe::mxfp8}) {
    if (!float8::multiplies(recipe, device)) {
      continue;
    }
    const float8::Quantizer weights{.recipe = recipe};
    const float8::Quantizer rows{
        .recipe = float8::traits_of(recipe).activations};
    gpu.float8[std::string(float8::to_string(recipe))] = measure_grid(
        options.float8,
        options.float8,
        options.float8,
        1,
        [&](std::int64_t m, std::int64_t n, std::int64_t k) {
          at::Tensor out = c.matrix(m, n);
          const float8::Operand x{
              float8::quantize(a.matrix(m, k), rows),
              rows.recipe};
          const float8::Operand w{
              float8::quantize(b.matrix(n, k), weights),
              recipe};
          return timer([&] { float8::matmul(out, x, w); });
        });
  }
}

}  // namespace flatshard
