#include "flatshard/train/metrics/host_operators.h"

#include <fmt/format.h>

#include <algorithm>

namespace flatshard {

std::string to_string(const std::vector<HostOperator>& operators) {
  constexpr std::size_t kMostShown = 12;
  constexpr double kNsPerMs = 1e6;
  std::int64_t sum_ns = 0;
  for (const HostOperator& op : operators) {
    sum_ns += op.own_ns;
  }
  std::string text = fmt::format(
      "CPU time by operator: {:.2f} ms in {} operators\n  {:>9}  {:>5}  {:>9}  "
      "{:>6}  operator\n",
      static_cast<double>(sum_ns) / kNsPerMs,
      operators.size(),
      "own ms",
      "share",
      "all ms",
      "calls");
  for (std::size_t i = 0; i < std::min(operators.size(), kMostShown); ++i) {
    const HostOperator& op = operators[i];
    text += fmt::format(
        "  {:>9.2f}  {:>4.1f}%  {:>9.2f}  {:>6}  {}\n",
        static_cast<double>(op.own_ns) / kNsPerMs,
        sum_ns > 0 ? 100.0 * static_cast<double>(op.own_ns) /
                         static_cast<double>(sum_ns)
                   : 0.0,
        static_cast<double>(op.all_ns) / kNsPerMs,
        op.calls,
        op.name);
  }
  text.pop_back();  // print adds the newline
  return text;
}

}  // namespace flatshard
