#include "flatshard/float8/float8_matmul.h"

#include "flatshard/core/error.h"
#include "products.h"

#include <functional>

// The CPU's matmuls against float64 matmuls of the decoded operands.
namespace flatshard::float8 {
namespace {

// float32 sums of 256 terms in any order.
constexpr double kFloatSums = 256 * 0x1p-24;

TEST(Matmul, EveryPairOfRecipes) {
  for (const auto& [ra, rb] : kPairs) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const std::int64_t m : {1, 77, 128}) {
        SCOPED_TRACE(
            std::string(to_string(ra)) + " " + std::string(to_string(rb)));
        const Operand a = operand(m, 256, ra, at::kCPU, 1);
        const Operand b = operand(128, 256, rb, at::kCPU, 2);
        const Exact want = exact(a, b);
        at::Tensor out = at::full({m, 128}, NAN, dtype);
        matmul(out, a, b);
        expect_product(out, want.product, want.magnitudes, kFloatSums);
        const at::Tensor first = out.to(at::kDouble);
        matmul(out, a, b, {.accumulate = true});
        expect_product(
            out,
            first + want.product,
            want.magnitudes + first.abs(),
            kFloatSums);
        const at::Tensor addend = at::randn({m, 128}, seeded(3)).to(dtype);
        matmul(out, a, b, {.addend = addend});
        expect_product(
            out,
            addend.to(at::kDouble) + want.product,
            want.magnitudes + addend.abs(),
            kFloatSums);
      }
    }
  }
}

// y, dx and dw of a linear layer whose numbers of tokens fill no block.
TEST(Matmul, TheThreeProductsOfALayer) {
  for (const Recipe recipe :
       {Recipe::tensorwise,
        Recipe::rowwise,
        Recipe::blockwise,
        Recipe::mxfp8}) {
    SCOPED_TRACE(to_string(recipe));
    const bool blocks = recipe == Recipe::blockwise;
    const Recipe rows = blocks ? Recipe::blockwise_1x128 : recipe;
    const std::int64_t multiple = blocks ? 128 : 32;
    const at::Tensor x = at::randn({77, 256}, seeded(4));
    const at::Tensor dy = at::randn({77, 128}, seeded(5));
    const at::Tensor w = at::randn({128, 256}, seeded(6));
    const auto [x_rows, x_columns] = quantize_both(x, {rows}, multiple);
    const auto [dy_rows, dy_columns] = quantize_both(dy, {rows}, multiple);
    const auto [w_rows, w_columns] = quantize_both(w, {recipe});
    const auto near = [](const at::Tensor& got, const at::Tensor& want) {
      // Both operands have errors of up to 2^-4 in each term.
      EXPECT_LE(((got - want).norm() / want.norm()).item<double>(), 0.05);
    };
    at::Tensor y = at::empty({77, 128});
    matmul(y, {x_rows, rows}, {w_rows, recipe});
    near(y, x.mm(w.t()));
    at::Tensor dx = at::empty({77, 256});
    matmul(dx, {dy_rows, rows}, {w_columns, recipe});
    near(dx, dy.mm(w));
    at::Tensor dw = at::empty({128, 256});
    matmul(dw, {dy_columns, rows}, {x_columns, rows});
    near(dw, dy.t().mm(x));
  }
}

TEST(Matmul, OneOperandOfE5m2AndRowsApart) {
  const Operand a =
      operand(16, 64, Recipe::tensorwise, at::kCPU, 1, Format::e5m2);
  const Operand b = operand(32, 64, Recipe::tensorwise, at::kCPU, 2);
  const Exact want = exact(a, b);
  at::Tensor slot = at::zeros({16, 64});
  at::Tensor out = slot.narrow(1, 16, 32);
  matmul(out, a, b);
  expect_product(out, want.product, want.magnitudes, kFloatSums);
  EXPECT_EQ(slot.narrow(1, 0, 16).count_nonzero().item<int>(), 0);
}

TEST(Matmul, SumsOfNothing) {
  const auto empty = [](std::int64_t outer) {
    return Operand{quantize(at::empty({outer, 0}), {})};
  };
  at::Tensor out = at::ones({3, 4});
  matmul(out, empty(3), empty(4), {.accumulate = true});
  EXPECT_TRUE(at::equal(out, at::ones({3, 4})));
  matmul(out, empty(3), empty(4));
  EXPECT_TRUE(at::equal(out, at::zeros({3, 4})));
}

TEST(Matmul, BadInputIsNamed) {
  const auto problem =
      [](at::Tensor out, Operand a, Operand b, MatmulOptions options = {}) {
        try {
          matmul(out, a, b, options);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::config);
          return error.message();
        }
        return std::string("no error");
      };
  const auto expect = [](const std::string& got, const char* want) {
    EXPECT_NE(got.find(want), std::string::npos) << got;
  };
  const auto of = [](Recipe recipe, Format format = Format::e4m3) {
    return operand(128, 128, recipe, at::kCPU, 1, format);
  };
  const at::Tensor out = at::empty({128, 128});
  expect(
      problem(out, of(Recipe::rowwise), of(Recipe::mxfp8)),
      "recipes rowwise and mxfp8 do not multiply");
  expect(
      problem(out, of(Recipe::blockwise), of(Recipe::blockwise)),
      "recipes blockwise and blockwise do not multiply");
  const Operand wide = of(Recipe::tensorwise, Format::e5m2);
  expect(problem(out, wide, wide), "got e5m2 for both");
  const Operand plain = of(Recipe::tensorwise);
  expect(
      problem(at::empty({128, 64}), plain, plain),
      "out: expected [128, 128] float32 or bfloat16");
  expect(problem(out.to(at::kHalf), plain, plain), "out: expected");
  expect(problem(out.t(), plain, plain), "with contiguous rows");
  expect(
      problem(out, plain, operand(128, 64, Recipe::tensorwise, at::kCPU, 1)),
      "expected a [m, k] and b [n, k]");
  expect(
      problem(out, plain, plain, {.accumulate = true, .addend = out}),
      "addend: expected");
  expect(
      problem(out, {{out, plain.plane.scales}}, plain),
      "a: expected contiguous data");
  EXPECT_FALSE(multiplies(Recipe::rowwise, at::kCPU));
}

}  // namespace
}  // namespace flatshard::float8
