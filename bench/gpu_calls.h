#pragma once
// Times of calls on a GPU, and lines of JSON, for the benchmarks of kernels.
#include <ATen/Functions.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "flatshard/device/stream.h"
#include "flatshard/device/timer.h"

namespace flatshard {

inline const at::TensorOptions kFloat =
    at::TensorOptions(at::kCUDA).dtype(at::kFloat);
inline const at::TensorOptions kBf16 = kFloat.dtype(at::kBFloat16);

// Of a rank, in elements.
constexpr std::int64_t kShard = std::int64_t{1} << 26;

/// Returns what one of many calls takes the first GPU, in microseconds: the
/// median over seven rounds of 20 calls, which are long enough to heat it.
/// @param call  gets 0 to num_sets - 1, again and again.
/// @param num_skipped  first rounds, which warm up and choose algorithms.
template <class Call>
double
call_microseconds(std::int64_t num_sets, Call&& call, int num_skipped = 1) {
  const auto timer = make_stream_timer(at::Device(at::kCUDA, 0));
  constexpr int kCalls = 20;
  std::vector<double> rounds;
  for (int round = 0; round < num_skipped + 7; ++round) {
    timer->start();
    for (int i = 0; i < kCalls; ++i) {
      call(i % num_sets);
    }
    timer->stop();
    const double us = timer->wait_and_take_ms() * 1e3 / kCalls;
    if (round >= num_skipped) {
      rounds.push_back(us);
    }
  }
  std::ranges::sort(rounds);
  return rounds[rounds.size() / 2];
}

/// Returns as many sets of arguments as keep each of them out of the caches
/// until its turn comes, each made by `make`.
template <class Make>
auto sets_of_arguments(std::int64_t nbytes, std::int64_t most, Make&& make) {
  constexpr std::int64_t kWorkingSet = std::int64_t{1} << 30;
  std::vector<decltype(make())> sets;
  const std::int64_t num = std::max<std::int64_t>(1, kWorkingSet / nbytes);
  for (std::int64_t i = 0; i < std::min(num, most); ++i) {
    sets.push_back(make());
  }
  return sets;
}

/// Prints a line of JSON when it is destroyed.
class JsonLine {
 public:
  ~JsonLine() {
    fmt::print("{{{}}}\n", line_);
    std::fflush(stdout);
  }

  JsonLine& text(const char* name, const std::string& value) {
    return add(name, '"' + value + '"');
  }

  JsonLine& number(const char* name, double value, int digits = 0) {
    return add(name, fmt::format("{:.{}f}", value, digits));
  }

 private:
  JsonLine& add(const char* name, const std::string& value) {
    line_ +=
        fmt::format("{}\"{}\": {}", line_.empty() ? "" : ", ", name, value);
    return *this;
  }

  std::string line_;
};

/// Calls run(tokens) with the number of the command line, or 8192. Returns 77
/// without a GPU.
template <class Run>
int run_on_gpu(const char* program, const char* tokens, Run&& run) {
  if (!cuda_available()) {
    fmt::print(stderr, "{}: expected a GPU, and found none\n", program);
    return 77;
  }
  run(tokens == nullptr ? std::int64_t{8192} : std::atoll(tokens));
  return 0;
}

}  // namespace flatshard
