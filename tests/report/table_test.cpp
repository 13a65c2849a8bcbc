#include "flatshard/report/table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace flatshard::report {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::IsNan;

TEST(Table, ARowReplacesItsStepAndLaterOnes) {
  Table table;
  for (const int step : {1, 2, 3, 4}) {
    table.append(step, {{"loss", step}});
  }
  table.append(3, {{"loss", 30}});
  table.append(5, {{"loss", 50}});
  EXPECT_THAT(table.steps(), ElementsAre(1, 2, 3, 5));
  EXPECT_THAT(table.columns().at("loss"), ElementsAre(1, 2, 30, 50));
}

TEST(Table, WhatARowDoesNotHaveIsNan) {
  Table table;
  table.append(1, {{"a", 1}});
  table.append(2, {{"b", 2}});
  EXPECT_THAT(table.columns().at("a"), ElementsAre(1, IsNan()));
  EXPECT_THAT(table.columns().at("b"), ElementsAre(IsNan(), 2));
}

TEST(Downsample, KeepsTheExtremesOfEachRange) {
  Table table;
  for (int step = 1; step <= 10; ++step) {
    table.append(
        step,
        {{"loss", step == 4 ? 100 : step}, {"time", 10.0 * step}});
  }
  const Downsampled small = downsample(table, 2, {"time"});
  EXPECT_THAT(small.steps, ElementsAre(5, 10));
  EXPECT_THAT(small.mean.at("loss"), ElementsAre(111.0 / 5, 8));
  EXPECT_THAT(small.min.at("loss"), ElementsAre(1, 6));
  EXPECT_THAT(small.max.at("loss"), ElementsAre(100, 10));
  EXPECT_THAT(small.mean.at("time"), ElementsAre(50, 100));
}

TEST(Downsample, LeavesOutWhatIsNan) {
  Table table;
  table.append(1, {{"loss", std::nan("")}, {"a", 1}});
  table.append(2, {{"loss", 3}, {"a", 1}});
  table.append(3, {{"loss", std::nan("")}, {"a", 1}});
  table.append(4, {{"loss", std::nan("")}, {"a", 1}});
  const Downsampled small = downsample(table, 2, {});
  EXPECT_THAT(small.mean.at("loss"), ElementsAre(3, IsNan()));
  EXPECT_THAT(small.min.at("loss"), ElementsAre(3, IsNan()));
}

TEST(Downsample, MoreRowsThanThereAreChangeNothing) {
  Table table;
  table.append(1, {{"a", 1}});
  table.append(2, {{"a", 5}});
  const Downsampled small = downsample(table, 7, {});
  EXPECT_THAT(small.steps, ElementsAre(1, 2));
  EXPECT_THAT(small.max.at("a"), ElementsAre(1, 5));
  EXPECT_THAT(downsample(Table(), 7, {}).steps, IsEmpty());
}

}  // namespace
}  // namespace flatshard::report
