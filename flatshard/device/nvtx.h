#pragma once

#include <string>

namespace flatshard {

/// Names a stretch of host time in an NVTX-aware profiler (nsys, Chrome traces
/// of nsys). Nothing in a build without CUDA.
class NvtxRange {
 public:
  explicit NvtxRange(const char* name);
  explicit NvtxRange(const std::string& name) : NvtxRange(name.c_str()) {}
  ~NvtxRange();
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace flatshard
