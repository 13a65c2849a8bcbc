#include "flatshard/plan/gpu_reader.h"

#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace flatshard::plan {
namespace {

void collect(
    const toml::table& table,
    const std::string& prefix,
    std::vector<std::string>& leaves) {
  for (const auto& [key, value] : table) {
    const std::string path = prefix + std::string(key.str());
    if (const toml::table* inner = value.as_table()) {
      collect(*inner, path + ".", leaves);
    } else {
      leaves.push_back(path);
    }
  }
}

}  // namespace

void GpuReader::operator()(const std::string& path, std::string& value) {
  if (const toml::node* node = find(path)) {
    const auto text = node->value<std::string>();
    FLATSHARD_CHECK(
        text.has_value(),
        format,
        "{}: {} expected text in quotes",
        origin_,
        path);
    value = *text;
  }
}

void GpuReader::operator()(const std::string& path, double& value) {
  if (const toml::node* node = find(path)) {
    value = positive(*node, path);
  }
}

void GpuReader::operator()(
    const std::string& path,
    std::vector<double>& values) {
  const toml::node* node = find(path);
  if (node == nullptr) {
    return;
  }
  const toml::array* array = node->as_array();
  FLATSHARD_CHECK(
      array != nullptr && !array->empty(),
      format,
      "{}: {} expected a list of numbers",
      origin_,
      path);
  values.clear();
  for (const toml::node& entry : *array) {
    values.push_back(positive(entry, path));
  }
}

void GpuReader::operator()(const std::string& path, Curve& curve) {
  (*this)(path + ".sizes", curve.sizes);
  (*this)(path + ".rates", curve.rates);
  check_axis(path + ".sizes", curve.sizes);
  FLATSHARD_CHECK(
      curve.sizes.size() == curve.rates.size(),
      format,
      "{}: {} expected as many rates as sizes, got {} and {}",
      origin_,
      path,
      curve.rates.size(),
      curve.sizes.size());
}

void GpuReader::operator()(const std::string& path, AttentionRates& rates) {
  (*this)(path + ".forward", rates.forward);
  (*this)(path + ".backward", rates.backward);
}

void GpuReader::operator()(const std::string& path, ProductRates& rates) {
  (*this)(path + ".m", rates.m);
  (*this)(path + ".n", rates.n);
  (*this)(path + ".k", rates.k);
  (*this)(path + ".tflops", rates.tflops);
  check_axis(path + ".m", rates.m);
  check_axis(path + ".n", rates.n);
  check_axis(path + ".k", rates.k);
  FLATSHARD_CHECK(
      rates.tflops.size() == rates.m.size() * rates.n.size() * rates.k.size(),
      format,
      "{}: {}.tflops expected {} * {} * {} rates, one for each m, n and k, "
      "got {}",
      origin_,
      path,
      rates.m.size(),
      rates.n.size(),
      rates.k.size(),
      rates.tflops.size());
}

std::vector<std::string> GpuReader::names(const char* path) const {
  std::vector<std::string> found;
  if (const toml::table* table = file_[path].as_table()) {
    for (const auto& [key, value] : *table) {
      found.emplace_back(key.str());
    }
  }
  return found;
}

bool GpuReader::excludes(const char* key) {
  const toml::node* node = file_.get(key);
  if (node == nullptr || node->is_table()) {
    return false;
  }
  FLATSHARD_CHECK(
      node->value<std::string>() == "none",
      format,
      "{}: {} expected tables, or \"none\"",
      origin_,
      key);
  read_.insert(key);
  return true;
}

void GpuReader::check_all_read() const {
  std::vector<std::string> leaves;
  collect(file_, "", leaves);
  for (const std::string& leaf : leaves) {
    if (read_.contains(leaf)) {
      continue;
    }
    const std::string near = near_name(leaf, read_);
    FLATSHARD_THROW(
        format,
        "{}: unknown key {} in a GPU file{}",
        origin_,
        leaf,
        near.empty() ? "" : fmt::format("; did you mean {}?", near));
  }
}

const toml::node* GpuReader::find(const std::string& path) {
  read_.insert(path);
  const toml::node* node = file_.at_path(path).node();
  FLATSHARD_CHECK(
      node != nullptr || has_base_,
      format,
      "{}: expected the key {}; add it, or inherit it from another file with "
      "base = \"h100",
      origin_,
      path);
  return node;
}

double GpuReader::positive(const toml::node& node, const std::string& path)
    const {
  const auto number = node.value<double>();
  FLATSHARD_CHECK(
      number && std::isfinite(*number) && *number > 0,
      format,
      "{}: {} expected positive numbers",
      origin_,
      path);
  return *number;
}

void GpuReader::check_axis(
    const std::string& path,
    const std::vector<double>& axis) const {
  FLATSHARD_CHECK(
      !axis.empty() && std::ranges::is_sorted(axis, std::less_equal<>()),
      format,
      "{}: {} expected ascending sizes",
      origin_,
      path);
}

}  // namespace flatshard::plan
