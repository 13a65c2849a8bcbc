#include "flatshard/optim/lr_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;

std::string message_of(const LrSchedule& schedule) {
  try {
    schedule.validate();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config);
    return error.message();
  }
  return "no error";
}

// The factors are exact up to the rounding of one division and one product.
constexpr double kTolerance = 1e-15;

TEST(LrSchedule, ConstantWithWarmup) {
  const LrSchedule s{.base_lr = 2, .total_steps = 10, .warmup_steps = 4};
  s.validate();
  EXPECT_NEAR(s.lr(0), 2 * 0.25, kTolerance);
  EXPECT_EQ(s.lr(3), 2);
  EXPECT_EQ(s.lr(4), 2);
  EXPECT_EQ(s.lr(9), 2);
  EXPECT_EQ(s.lr(1000), 2);
}

TEST(LrSchedule, LinearGoesFromFullToMinimum) {
  const LrSchedule s{
      .kind = LrSchedule::Kind::linear,
      .base_lr = 1,
      .total_steps = 10,
      .warmup_steps = 2,
      .min_lr_factor = 0.2};
  EXPECT_EQ(s.decay_steps(), 8);
  EXPECT_EQ(s.lr(1), 1);
  EXPECT_NEAR(s.lr(2), 0.9, kTolerance);
  EXPECT_NEAR(s.lr(5), 0.6, kTolerance);
  EXPECT_NEAR(s.lr(9), 0.2, kTolerance);
  EXPECT_NEAR(s.lr(99), 0.2, kTolerance);
}

TEST(LrSchedule, CosineIsHalfwayInTheMiddle) {
  const LrSchedule s{
      .kind = LrSchedule::Kind::cosine,
      .base_lr = 1,
      .total_steps = 100,
      .min_lr_factor = 0.1};
  EXPECT_NEAR(s.lr(49), 0.55, kTolerance);
  EXPECT_NEAR(s.lr(24), 0.1 + 0.9 * (1 + std::sqrt(0.5)) / 2, kTolerance);
  EXPECT_NEAR(s.lr(99), 0.1, kTolerance);
}

TEST(LrSchedule, WsdIsStableThenDecays) {
  LrSchedule s{
      .kind = LrSchedule::Kind::wsd,
      .base_lr = 1,
      .total_steps = 100,
      .warmup_steps = 10};
  EXPECT_EQ(s.decay_steps(), 20);
  EXPECT_EQ(s.lr(9), 1);
  EXPECT_EQ(s.lr(79), 1);
  EXPECT_NEAR(s.lr(89), 0.5, kTolerance);
  s.decay_ratio = 0.5;
  EXPECT_EQ(s.lr(49), 1);
  EXPECT_NEAR(s.lr(74), 0.5, kTolerance);
}

TEST(LrSchedule, WsdDecaysInTheShapeOfDecayType) {
  using Decay = LrSchedule::Decay;
  LrSchedule s{
      .kind = LrSchedule::Kind::wsd,
      .base_lr = 1,
      .total_steps = 100,
      .decay_ratio = 0.5,
      .min_lr_factor = 0.2};
  const auto lr_of = [&](Decay decay, std::int64_t step) {
    s.decay = decay;
    s.validate();
    return s.lr(step);
  };
  for (const Decay decay :
       {Decay::linear, Decay::sqrt, Decay::cosine, Decay::exponential}) {
    EXPECT_EQ(lr_of(decay, 49), 1);
    EXPECT_NEAR(lr_of(decay, 99), 0.2, kTolerance);
    double before = 1;
    for (std::int64_t step = 50; step < 100; ++step) {
      EXPECT_LT(lr_of(decay, step), before);
      before = s.lr(step);
    }
  }
  // At half of the decay, and at 18 of 50 steps of it: sqrt(0.36) = 0.6.
  EXPECT_NEAR(lr_of(Decay::linear, 74), 0.6, kTolerance);
  EXPECT_NEAR(lr_of(Decay::cosine, 74), 0.6, kTolerance);
  EXPECT_NEAR(lr_of(Decay::sqrt, 67), 0.2 + 0.8 * 0.4, kTolerance);
  EXPECT_NEAR(
      lr_of(Decay::exponential, 74),
      0.2 + 0.8 * (std::sqrt(2.0) - 1),
      kTolerance);
}

// The warm-up reaches the full rate and the last step the lowest one, also in
// runs of a few steps.
TEST(LrSchedule, EndsAtTheMinimumHoweverShort) {
  for (const LrSchedule::Kind kind :
       {LrSchedule::Kind::linear,
        LrSchedule::Kind::cosine,
        LrSchedule::Kind::wsd}) {
    for (const std::int64_t steps : {2, 3, 6, 100}) {
      for (const std::int64_t warmup : {std::int64_t{0}, steps / 2}) {
        const LrSchedule s{
            .kind = kind,
            .base_lr = 1,
            .total_steps = steps,
            .warmup_steps = warmup,
            .min_lr_factor = 0.1};
        s.validate();
        EXPECT_NEAR(s.lr(steps - 1), 0.1, kTolerance)
            << static_cast<int>(kind) << " " << steps;
        if (warmup > 0) {
          EXPECT_EQ(s.lr(warmup - 1), 1)
              << static_cast<int>(kind) << " " << steps;
        }
      }
    }
  }
}

TEST(LrSchedule, DecayRatioGivesCosineAStablePhase) {
  const LrSchedule s{
      .kind = LrSchedule::Kind::cosine,
      .base_lr = 1,
      .total_steps = 100,
      .decay_ratio = 0.2};
  EXPECT_EQ(s.lr(79), 1);
  EXPECT_NEAR(s.lr(89), 0.5, kTolerance);
}

TEST(LrSchedule, NeverRisesAfterWarmup) {
  for (const LrSchedule::Kind kind :
       {LrSchedule::Kind::constant,
        LrSchedule::Kind::linear,
        LrSchedule::Kind::cosine,
        LrSchedule::Kind::wsd}) {
    const LrSchedule s{
        .kind = kind,
        .base_lr = 1,
        .total_steps = 57,
        .warmup_steps = 7};
    s.validate();
    for (int step = 1; step < 60; ++step) {
      if (step < 7) {
        EXPECT_GT(s.lr(step), s.lr(step - 1)) << step;
      } else {
        EXPECT_LE(s.lr(step), s.lr(step - 1)) << step;
      }
    }
  }
}

TEST(LrSchedule, ZeroDecayRatioIsNoDecay) {
  const LrSchedule s{
      .kind = LrSchedule::Kind::wsd,
      .base_lr = 1,
      .total_steps = 5,
      .decay_ratio = 0.0};
  EXPECT_EQ(s.lr(4), 1);
}

TEST(LrSchedule, ErrorsNameTheKey) {
  EXPECT_THAT(
      message_of({.total_steps = 0}),
      HasSubstr("training.steps: expected"));
  EXPECT_THAT(message_of({.base_lr = -1}), HasSubstr("optimizer.lr: expected"));
  EXPECT_THAT(
      message_of({.kind = LrSchedule::Kind::linear, .min_lr_factor = 2}),
      HasSubstr("lr_scheduler.min_lr_factor: expected"));
  EXPECT_THAT(
      message_of({.kind = LrSchedule::Kind::wsd, .decay_ratio = 1.5}),
      HasSubstr("lr_scheduler.decay_ratio: expected"));
  EXPECT_THAT(
      message_of({.total_steps = 10, .warmup_steps = 11}),
      HasSubstr("warmup_steps: expected a number in [0, training.steps = 10]"));
  EXPECT_THAT(
      message_of({.total_steps = 10, .decay_ratio = 0.5}),
      HasSubstr("\"constant\" has no decay, but decay_ratio is set"));
  EXPECT_THAT(
      message_of(
          {.kind = LrSchedule::Kind::wsd,
           .total_steps = 10,
           .warmup_steps = 6,
           .decay_ratio = 0.5}),
      HasSubstr("longer than training.steps = 10"));
}

}  // namespace
}  // namespace flatshard
