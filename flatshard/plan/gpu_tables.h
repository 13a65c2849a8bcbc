#pragma once

#include <array>
#include <string_view>

namespace flatshard::plan {

/// A table of flatshard/plan/gpus/. CMake embeds it in the program.
struct GpuTable {
  std::string_view name;
  std::string_view text;
};
extern const std::array<GpuTable, 4> kGpuTables;

}  // namespace flatshard::plan
