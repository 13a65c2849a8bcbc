// Prints how much each granularity pads, as the Markdown table of
// docs/internals/padding.md. With `--check FILE` it fails unless FILE has that
// table.
#include "tests/layout/padding_cases.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

namespace flatshard::padding {
namespace {

// Fewer ranks pad less.
constexpr std::int64_t kFewestShown = 4096;

std::string percent(double ratio) {
  return fmt::format("{:.3f}", 100 * ratio);
}

std::string table() {
  std::ostringstream out;
  out << "| unit | parameters | ranks | element % | row % | row bound % | "
         "FSDP2 % |\n"
         "|---|---:|---:|---:|---:|---:|---:|\n";
  for (const PaddingCase& unit : padding_cases()) {
    for (const std::int64_t ranks : kPaddingRanks) {
      if (ranks < kFewestShown) {
        continue;
      }
      const FlatLayout element = layout_of(unit, Granularity::element(), ranks);
      const FlatLayout row = layout_of(unit, Granularity::row(), ranks);
      const double numel =
          static_cast<double>(row.numel() - row.padding_numel());
      out << fmt::format(
          "| {} | {:.1f} M | {} | {} | {} | {} | {} |\n",
          unit.name,
          numel / 1e6,
          ranks,
          percent(element.padding_ratio()),
          percent(row.padding_ratio()),
          percent(row_bound(unit, ranks)),
          percent(per_parameter_padding(unit, ranks)));
    }
  }
  return out.str();
}

int check(const char* path) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.find(table()) == std::string::npos) {
    fmt::print(
        stderr,
        "{} does not hold the table that this program prints; paste its output "
        "there\n",
        path);
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace flatshard::padding

int main(int argc, char** argv) {
  if (argc == 1) {
    std::fputs(flatshard::padding::table().c_str(), stdout);
    return 0;
  }
  if (argc == 3 && std::strcmp(argv[1], "--check") == 0) {
    return flatshard::padding::check(argv[2]);
  }
  fmt::print(stderr, "usage: {} [--check FILE]\n", argv[0]);
  return 2;
}
