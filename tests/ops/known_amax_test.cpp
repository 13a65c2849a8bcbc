#include "flatshard/ops/float8/known_amax.h"

#include "flatshard/float8/quantize.h"
#include "flatshard/ops/matmul_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace flatshard::nn {
namespace {

at::Tensor scalar(float value) {
  return at::full({}, value, at::kFloat);
}

TEST(KnownAmax, IsThatOfTheSameMemoryOnce) {
  const at::Tensor x = at::ones({4, 16});
  note_amax(x, scalar(1));
  EXPECT_FALSE(take_known_amax(at::ones({4, 16})).defined());
  EXPECT_FALSE(take_known_amax(x.narrow(0, 0, 2)).defined());
  // Autograd hands it on in another shape.
  EXPECT_EQ(take_known_amax(x.view({2, 32})).item<float>(), 1);
  EXPECT_FALSE(take_known_amax(x).defined());
}

TEST(KnownAmax, F10_CountsForNothingOnceTheTensorIsWritten) {
  const at::Tensor x = at::ones({4, 16});
  note_amax(x, scalar(1));
  x.mul_(3);
  EXPECT_FALSE(take_known_amax(x).defined());
  // Another tensor may be allocated at the address of a former one.
  for (int i = 0; i < 100; ++i) {
    at::Tensor gone = at::ones({4, 16});
    note_amax(gone, scalar(7));
    gone.reset();
    EXPECT_FALSE(take_known_amax(at::ones({4, 16})).defined());
  }
}

TEST(KnownAmax, KeepsNoMemoryOfGradients) {
  at::Tensor x = at::ones({4, 16});
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      x.storage().getWeakStorageImpl());
  note_amax(x, scalar(1));
  x.reset();
  EXPECT_TRUE(storage.expired());
}

TEST(KnownAmax, ScalesTheGradientsThatAreQuantizedNext) {
  const at::Tensor x = at::rand({32, 64}).to(at::kBFloat16);
  const auto scale = [&] {
    return MatmulRows(x, MatmulRows::Kind::gradient, /*both=*/true)
        .row(float8::Recipe::tensorwise)
        .plane.scales.item<float>();
  };
  const float own = scale();
  note_amax(x, float8::amax_of(x) * 2);
  EXPECT_NE(scale(), own);
  EXPECT_EQ(scale(), own);
  // Activations have none.
  note_amax(x, float8::amax_of(x) * 2);
  const MatmulRows rows(x);
  EXPECT_EQ(
      rows.row(float8::Recipe::tensorwise).plane.scales.item<float>(),
      float8::quantize(x, {}).scales.item<float>());
  EXPECT_EQ(
      rows.amax().item<float>(),
      x.to(at::kFloat).abs().max().item<float>());
}

TEST(MatmulRows, AGradientIsGivenUpOnceBothPlanesAreThere) {
  at::Tensor x = at::rand({32, 64}).to(at::kBFloat16);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      x.storage().getWeakStorageImpl());
  const MatmulRows both(x, MatmulRows::Kind::gradient, /*both=*/true);
  const MatmulRows one(x.clone(), MatmulRows::Kind::gradient);
  x.reset();
  both.row(float8::Recipe::tensorwise);
  one.row(float8::Recipe::tensorwise);
  EXPECT_TRUE(storage.expired());
  EXPECT_EQ(both.column(float8::Recipe::tensorwise).plane.data.size(0), 64);
  EXPECT_EQ(both.num_rows(), 32);
  EXPECT_TRUE(one.tensor().defined());
}

// The state that a layer keeps for its backward in addition to its inputs.
TEST(KnownAmax, ColumnsOfTheBackwardAreThoseOfTheForwardsScale) {
  const at::Tensor x = at::randn({40, 64}).to(at::kBFloat16);
  const MatmulRows forward(x);
  forward.row(float8::Recipe::tensorwise);
  const MatmulRows backward(
      x,
      MatmulRows::Kind::activation,
      /*both=*/false,
      forward.amax());
  const float8::Plane want =
      float8::quantize(x, {}, {.axis = float8::Axis::column, .multiple = 16});
  const float8::Plane& got = backward.column(float8::Recipe::tensorwise).plane;
  EXPECT_TRUE(got.data.view(at::kByte).equal(want.data.view(at::kByte)));
  EXPECT_TRUE(got.scales.equal(want.scales));
}

}  // namespace
}  // namespace flatshard::nn
