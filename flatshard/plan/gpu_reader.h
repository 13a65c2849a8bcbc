#pragma once

#include "flatshard/core/toml.h"
#include "flatshard/plan/gpu.h"

#include <set>
#include <string>
#include <vector>

namespace flatshard::plan {

/// Reads the values of a Gpu's file by their paths. Each function throws
/// Error{format} that names the file and the path.
class GpuReader {
 public:
  /// @param origin    of the file, for messages.
  /// @param has_base  keys may be missing.
  GpuReader(const toml::table& file, std::string origin, bool has_base)
      : file_(file), origin_(std::move(origin)), has_base_(has_base) {}

  void operator()(const std::string& path, std::string& value);
  void operator()(const std::string& path, double& value);
  void operator()(const std::string& path, std::vector<double>& values);
  void operator()(const std::string& path, Curve& curve);
  void operator()(const std::string& path, AttentionRates& rates);
  void operator()(const std::string& path, ProductRates& rates);

  /// Returns the names of the tables below `path`.
  std::vector<std::string> names(const char* path) const;
  /// Returns whether the file excludes the base's tables below `key`.
  bool excludes(const char* key);
  /// Throws for a key that was not read.
  void check_all_read() const;

 private:
  const toml::node* find(const std::string& path);
  double positive(const toml::node& node, const std::string& path) const;
  void check_axis(const std::string& path, const std::vector<double>& axis)
      const;

  const toml::table& file_;
  std::string origin_;
  bool has_base_;
  std::set<std::string> read_;
};

}  // namespace flatshard::plan
