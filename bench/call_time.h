#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/device/timer.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace flatshard {

/// What one of many calls takes the first GPU, in microseconds: the median over
/// rounds of 20 calls, which are long enough to heat it. A first round is not
/// counted: it warms up and chooses algorithms.
/// @param call  gets 0 to num_sets - 1, by turns.
template <class Call>
double call_microseconds(std::int64_t num_sets, Call&& call) {
  const auto timer = make_stream_timer(at::Device(at::kCUDA, 0));
  constexpr int kCalls = 20;
  std::vector<double> rounds;
  for (int round = 0; round < 8; ++round) {
    timer->start();
    for (int i = 0; i < kCalls; ++i) {
      call(i % num_sets);
    }
    timer->stop();
    const double us = timer->wait_and_take_ms() * 1e3 / kCalls;
    if (round > 0) {
      rounds.push_back(us);
    }
  }
  std::ranges::sort(rounds);
  return rounds[rounds.size() / 2];
}

}  // namespace flatshard
