#include "flatshard/diagnostics/step_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kMs = 1'000'000;

KernelInterval
kernel(const char* name, std::int64_t begin, std::int64_t end, int stream) {
  return {name, begin * kMs, end * kMs, stream};
}

TEST(StepProfile, KernelsAreToldByTheirNames) {
  EXPECT_EQ(kernel_class("nvjet_sm90_tst_256x128_64x4"), "GEMM");
  EXPECT_EQ(
      kernel_class("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)"),
      "all-gather");
  EXPECT_EQ(
      kernel_class("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
      "reduce-scatter");
  EXPECT_EQ(
      kernel_class("ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
      "other communication");
  EXPECT_EQ(
      kernel_class("cudnn_generated_fort_native_sdpa_sm90_flash_fprop"),
      "attention");
  EXPECT_EQ(kernel_class("Memcpy DtoD (Device -> Device)"), "copies and fills");
  EXPECT_EQ(
      kernel_class("void flatshard::nn::kernels::swiglu_backward_kernel<T, 8>"),
      "SwiGLU");
  EXPECT_EQ(
      kernel_class("void flatshard::nn::kernels::sum_token_rows_kernel<T, 8>"),
      "permute");
  EXPECT_EQ(
      kernel_class("flatshard::nn::kernels::sort_count_kernel"),
      "router");
  EXPECT_EQ(kernel_class("something else"), "other");
}

TEST(StepProfile, SaysWhatIsExposedAndWhatIsIdle) {
  // Two kernels overlap, one all-gather overlaps them and ends later, then
  // comes a gap, and one kernel more.
  const StepProfile profile = profile_step(
      {kernel("nvjet", 0, 10, 7),
       kernel("nvjet", 4, 12, 8),
       kernel("ncclDevKernel_AllGather", 5, 15, 30),
       kernel("rms_norm_forward_kernel", 20, 21, 7),
       kernel("ncclDevKernel_ReduceScatter", 20, 21, 34)});
  EXPECT_DOUBLE_EQ(profile.span_ms, 21);
  EXPECT_DOUBLE_EQ(profile.compute_ms, 13);
  EXPECT_DOUBLE_EQ(profile.exposed_ms, 3);
  EXPECT_DOUBLE_EQ(profile.idle_ms, 5);
  ASSERT_EQ(profile.classes.size(), 4U);
  EXPECT_EQ(profile.classes[0].name, "GEMM");
  EXPECT_DOUBLE_EQ(profile.classes[0].ms, 18);
  EXPECT_EQ(profile.classes[0].kernels, 2);
  EXPECT_EQ(profile.streams.at(7), "compute");
  EXPECT_EQ(profile.streams.at(30), "gather");
  EXPECT_EQ(profile.streams.at(34), "reduce");
}

TEST(StepProfile, WhatCopiesToPeersOrSumsWhatCameIsCommunication) {
  const StepProfile profile = profile_step(
      {kernel("nvjet", 0, 10, 7),
       kernel("Memcpy PtoP (Device -> Device)", 5, 15, 30),
       kernel("Memcpy DtoD (Device -> Device)", 15, 16, 30),
       kernel("Memcpy PtoP (Device -> Device)", 16, 20, 38),
       kernel("sum_rows_kernel", 20, 21, 34),
       kernel("add_scaled_kernel", 21, 22, 34),
       kernel("Memcpy DtoD (Device -> Device)", 22, 23, 7),
       // Sums of experts' rows are not communication.
       kernel("sum_token_rows_kernel", 23, 24, 7)});
  EXPECT_DOUBLE_EQ(profile.compute_ms, 12);
  EXPECT_DOUBLE_EQ(profile.exposed_ms, 12);
  EXPECT_DOUBLE_EQ(profile.idle_ms, 0);
  EXPECT_EQ(profile.classes.front().name, "peer copies");
  EXPECT_EQ(profile.streams.at(7), "compute");
  EXPECT_EQ(profile.streams.at(30), "gather");
  EXPECT_EQ(profile.streams.at(34), "reduce");
}

TEST(StepProfile, TheTableGivesSpeedsOfKnownWork) {
  const StepProfile profile = profile_step(
      {kernel("nvjet", 0, 10, 7), kernel("nothing known", 10, 20, 7)});
  const SpeedOfLight light{.peak_flops = 1e15, .flops = {{"GEMM", 5e12}}};
  const std::string text = to_string(profile, light);
  EXPECT_THAT(text, HasSubstr("1 kernels  500 TFLOP/s, 50.0 % of the peak"));
  EXPECT_THAT(text, HasSubstr("100.0 %  250 TFLOP/s, 25.0 % of the peak"));
  EXPECT_THAT(text, HasSubstr("exposed communication      0.00"));
  EXPECT_THAT(to_string(profile, {}), ::testing::Not(HasSubstr("TFLOP")));
}

TEST(StepProfile, NoKernelsAreNoError) {
  EXPECT_EQ(profile_step({}).span_ms, 0);
}

}  // namespace
}  // namespace flatshard
