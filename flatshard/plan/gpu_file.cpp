// Reads and writes a Gpu as a TOML file, and has the program's own tables.
#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/plan/gpu_reader.h"
#include "flatshard/plan/gpu_tables.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace flatshard::plan {
namespace {

constexpr const char* kBase = "base";
constexpr const char* kFloat8 = "float8";
constexpr const char* kAttention = "attention";
/// Names of the groups of rates that [scale] multiplies.
constexpr const char* kScale = "scale";

/// Calls visit(path, member) for each key of a table but the groups whose names
/// the file chooses (float8 recipes, head_dims of attention).
template <class G, class Visit>
void visit_keys(G& gpu, Visit&& visit) {
  visit("name", gpu.name);
  visit("source", gpu.source);
  visit("memory_gib", gpu.memory_gib);
  visit("peak_bf16_tflops", gpu.peak_bf16_tflops);
  visit("launch_us", gpu.launch_us);
  visit("host.forward_us", gpu.host_forward_us);
  visit("host.backward_us", gpu.host_backward_us);
  visit("host.graph_us", gpu.host_graph_us);
  visit("host.gb_s", gpu.host_gb_s);
  visit("network.gb_s", gpu.network_gb_s);
  visit("network.hop_us", gpu.network_hop_us);
  visit("nvlink.hop_us", gpu.nvlink_hop_us);
  visit("contention.collectives", gpu.contention.collectives);
  visit("contention.copies", gpu.contention.copies);
  visit("contention.slowed_collectives", gpu.contention.slowed_collectives);
  visit("contention.slowed_copies", gpu.contention.slowed_copies);
  for (const std::string_view kind : kPasses) {
    visit(fmt::format("passes.{}", kind), gpu.passes[std::string(kind)]);
  }
  visit("nvlink.all_gather", gpu.nvlink.all_gather);
  visit("nvlink.reduce_scatter", gpu.nvlink.reduce_scatter);
  visit("nvlink.all_reduce", gpu.nvlink.all_reduce);
  visit("nvlink.all_to_all", gpu.nvlink.all_to_all);
  visit("nvlink.copies", gpu.nvlink.copies);
  visit("nvlink.copied_reductions", gpu.nvlink.copied_reductions);
  for (std::size_t i = 0; i < kNumProducts; ++i) {
    const std::string_view name = to_string(static_cast<Product>(i));
    visit(fmt::format("products.{}", name), gpu.products[i]);
    visit(fmt::format("grouped.{}", name), gpu.grouped[i]);
  }
}

// -- scaling a base -----------------------------------------------------------

void scale(std::vector<double>& rates, double factor) {
  for (double& rate : rates) {
    rate *= factor;
  }
}

/// The rates of a GPU in proportion to the base, by its data sheet.
struct Scale {
  double products = 1;
  double float8 = 1;
  double attention = 1;
  double passes = 1;
  double nvlink = 1;
};

void apply(const Scale& factors, Gpu& gpu) {
  for (std::size_t i = 0; i < kNumProducts; ++i) {
    scale(gpu.products[i].tflops, factors.products);
    scale(gpu.grouped[i].tflops, factors.products);
  }
  for (auto& [recipe, rates] : gpu.float8) {
    scale(rates.tflops, factors.float8);
  }
  for (auto& [width, rates] : gpu.attention) {
    scale(rates.forward.rates, factors.attention);
    scale(rates.backward.rates, factors.attention);
  }
  for (auto& [kind, rate] : gpu.passes) {
    rate *= factors.passes;
  }
  for (Curve* curve :
       {&gpu.nvlink.all_gather,
        &gpu.nvlink.reduce_scatter,
        &gpu.nvlink.all_reduce,
        &gpu.nvlink.all_to_all,
        &gpu.nvlink.copies,
        &gpu.nvlink.copied_reductions}) {
    scale(curve->rates, factors.nvlink);
  }
}

Gpu built_in(std::string_view name) {
  for (const GpuTable& table : kGpuTables) {
    if (table.name == name) {
      return parse_gpu(table.text, fmt::format("the table {}", name));
    }
  }
  FLATSHARD_THROW(
      config,
      "expected a GPU, one of {}, got '{}'",
      fmt::join(gpu_names(), ", "),
      name);
}

// -- writing ------------------------------------------------------------------

std::string text_of(const std::vector<double>& values) {
  return fmt::format("[{:.5g}]", fmt::join(values, ", "));
}

class Writer {
 public:
  void operator()(const std::string& path, const std::string& value) {
    std::ostringstream out;
    out << toml::value<std::string>(value);
    line(path, out.str());
  }
  // Rates that were not measured are left out: a reader falls back to the base
  // table.
  void operator()(const std::string& path, double value) {
    if (value > 0) {
      line(path, fmt::format("{:.5g}", value));
    }
  }
  void operator()(const std::string& path, const Curve& curve) {
    if (curve.empty()) {
      return;
    }
    line(path + ".sizes", text_of(curve.sizes));
    line(path + ".rates", text_of(curve.rates));
  }
  void operator()(const std::string& path, const AttentionRates& rates) {
    (*this)(path + ".forward", rates.forward);
    (*this)(path + ".backward", rates.backward);
  }
  void operator()(const std::string& path, const ProductRates& rates) {
    line(path + ".m", text_of(rates.m));
    line(path + ".n", text_of(rates.n));
    line(path + ".k", text_of(rates.k));
    line(path + ".tflops", text_of(rates.tflops));
  }

  std::string text;

 private:
  void line(const std::string& path, const std::string& value) {
    text += fmt::format("{} = {}\n", path, value);
  }
};

}  // namespace

std::vector<std::string_view> gpu_names() {
  std::vector<std::string_view> names;
  for (const GpuTable& table : kGpuTables) {
    names.push_back(table.name);
  }
  return names;
}

Gpu parse_gpu(std::string_view text, const std::string& origin) {
  toml::table file;
  try {
    file = toml::parse(text);
  } catch (const toml::parse_error& e) {
    FLATSHARD_THROW(
        format,
        "{}:{}: expected TOML: {}",
        origin,
        e.source().begin.line,
        e.description());
  } catch (const TomlAssertion&) {
    FLATSHARD_THROW(
        format,
        "{}: expected TOML, got a name or value with characters that do not "
        "belong there",
        origin);
  }
  Gpu gpu;
  const toml::node* base = file.get(kBase);
  GpuReader read(file, origin, base != nullptr);
  if (base != nullptr) {
    std::string name;
    read(kBase, name);
    gpu = built_in(name);
  }
  if (file.contains(kScale)) {
    FLATSHARD_CHECK(
        base != nullptr,
        format,
        "{}: [{}] multiplies the rates of a base; add base = \"h100\"",
        origin,
        kScale);
    Scale factors;
    read("scale.products", factors.products);
    read("scale.float8", factors.float8);
    read("scale.attention", factors.attention);
    read("scale.passes", factors.passes);
    read("scale.nvlink", factors.nvlink);
    apply(factors, gpu);
  }
  visit_keys(gpu, read);
  if (read.excludes(kFloat8)) {
    gpu.float8.clear();
  }
  for (const std::string& recipe : read.names(kFloat8)) {
    read(fmt::format("{}.{}", kFloat8, recipe), gpu.float8[recipe]);
  }
  for (const std::string& width : read.names(kAttention)) {
    std::int64_t head_dim = 0;
    std::istringstream(width) >> head_dim;
    FLATSHARD_CHECK(
        head_dim > 0,
        format,
        "{}: [{}] expected a head_dim as the name of a table, got '{}'",
        origin,
        kAttention,
        width);
    read(fmt::format("{}.{}", kAttention, width), gpu.attention[head_dim]);
  }
  FLATSHARD_CHECK(
      !gpu.attention.empty(),
      format,
      "{}: expected a table of attention, such as [attention.128]",
      origin);
  read.check_all_read();
  return gpu;
}

Gpu find_gpu(const std::string& name_or_path) {
  const auto names = gpu_names();
  if (std::ranges::find(names, name_or_path) != names.end()) {
    return built_in(name_or_path);
  }
  std::ifstream in(name_or_path);
  const std::string near = near_name(name_or_path, names);
  FLATSHARD_CHECK(
      in.good(),
      config,
      "--gpu expected one of {}, or a file that `flatshard plan --calibrate` "
      "wrote, got '{}'{}",
      fmt::join(names, ", "),
      name_or_path,
      near.empty() ? "" : fmt::format("; did you mean {}?", near));
  std::ostringstream text;
  text << in.rdbuf();
  return parse_gpu(text.str(), name_or_path);
}

std::string to_toml(const Gpu& gpu) {
  Writer write;
  // Maps are read by their keys.
  Gpu copy = gpu;
  visit_keys(copy, write);
  for (const auto& [recipe, rates] : gpu.float8) {
    write(fmt::format("{}.{}", kFloat8, recipe), rates);
  }
  for (const auto& [width, rates] : gpu.attention) {
    write(fmt::format("{}.{}", kAttention, width), rates);
  }
  return write.text;
}

}  // namespace flatshard::plan
