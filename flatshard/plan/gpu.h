#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::plan {

/// One of the three matmuls of a linear layer. Their operands have different
/// layouts, so their rates differ.
enum class Product { forward, dgrad, wgrad };
inline constexpr std::size_t kNumProducts = 3;
std::string_view to_string(Product product);

/// Measured values over ascending sizes. Between two sizes they are
/// interpolated in the logarithm of the size. Below the first size the time of
/// that size counts, and above the last one its rate.
struct Curve {
  std::vector<double> sizes;
  std::vector<double> rates;

  bool empty() const { return sizes.empty(); }
  /// Returns the rate of work of this size, in the unit of `rates`.
  double at(double size) const;

  bool operator==(const Curve&) const = default;
};

/// TFLOP/s of matmuls [m, k] x [k, n] over a grid of shapes.
struct ProductRates {
  std::vector<double> m, n, k;  ///< ascending
  std::vector<double> tflops;   ///< [m][n][k]

  bool empty() const { return tflops.empty(); }
  /// Interpolates as Curve does, along each of the three sizes.
  double at(double rows, double columns, double inner) const;

  bool operator==(const ProductRates&) const = default;
};

/// TFLOP/s of causal attention by sequence length, where only the work below
/// the diagonal counts.
struct AttentionRates {
  Curve forward;
  Curve backward;

  bool operator==(const AttentionRates&) const = default;
};

/// GB/s of a collective by its bytes: the bytes of the full buffer. Each rank
/// receives or sends all but its own part of it.
struct LinkRates {
  Curve all_gather;
  Curve reduce_scatter;
  Curve all_reduce;
  Curve all_to_all;
  Curve copies;  ///< by copy engines, per bytes read from peers
  /// The rate of reduce-scatters by copy engines has the sums in it.
  Curve copied_reductions;

  bool operator==(const LinkRates&) const = default;
};

/// Slowdown of compute and transfers while both run.
struct Contention {
  double collectives = 1;         ///< compute, in parallel with NCCL
  double copies = 1;              ///< compute, with copy engines
  double slowed_collectives = 1;  ///< NCCL, in parallel with compute
  double slowed_copies = 1;       ///< copy engines, with compute

  bool operator==(const Contention&) const = default;
};

/// A GPU as a row of rates, with its links and its host. A leaf value. Rates
/// are calibrate's measurements, or data sheet figures times fractions that
/// were measured elsewhere; `source` describes which.
struct Gpu {
  std::string name;    ///< e.g. "NVIDIA H100 80GB HBM3"
  std::string source;  ///< the source of the measurement, or "not measured:
                       ///< ..."
  double memory_gib = 0;
  double peak_bf16_tflops = 0;  ///< data sheet, dense; denominator of MFU

  using Products = std::array<ProductRates, kNumProducts>;
  Products products;                                 ///< bfloat16
  Products grouped;                                  ///< m: rows of an expert
  std::map<std::string, ProductRates> float8;        ///< by recipe
  std::map<std::int64_t, AttentionRates> attention;  ///< by head_dim
  /// GB/s, read and written, of passes over memory, by the kind of pass: see
  /// kPasses.
  std::map<std::string, double> passes;

  double launch_us = 0;         ///< a kernel of a chain, on the device
  double host_forward_us = 0;   ///< host time per block
  double host_backward_us = 0;  ///< likewise
  double host_graph_us = 0;     ///< for the launch of a graph

  double host_gb_s = 0;  ///< each way between a GPU and the memory of its host
  LinkRates nvlink;      ///< between the GPUs of a host
  double nvlink_hop_us = 0;   ///< one step of a ring inside a host
  double network_gb_s = 0;    ///< per GPU, between hosts
  double network_hop_us = 0;  ///< one step of a ring between hosts
  Contention contention;

  /// Returns the seconds of a matmul. An empty `recipe` is bfloat16.
  double product_seconds(
      Product product,
      double m,
      double n,
      double k,
      std::string_view recipe = {}) const;
  /// Returns the seconds of a grouped matmul: `groups` experts, m rows each.
  double grouped_seconds(
      Product product,
      double groups,
      double m,
      double n,
      double k) const;
  /// Returns the seconds of causal attention of `heads` over `sequences` of
  /// `seq_len`.
  double attention_seconds(
      bool backward,
      double sequences,
      double heads,
      double seq_len,
      std::int64_t head_dim) const;
  /// Returns the seconds of a pass over this many bytes. @throws
  /// Error{internal} for a kind that is none of kPasses.
  double pass_seconds(std::string_view kind, double nbytes) const;

  bool operator==(const Gpu&) const = default;
};

/// Kinds of passes that Gpu::passes has a rate of.
inline constexpr std::array<std::string_view, 10> kPasses{
    "copy",
    "norm",
    "swiglu",
    "rope",
    "cross_entropy",
    "optimizer",
    "sum",
    "permute",
    "quantize",
    "engine_copy"};

/// Returns the FLOPs of causal attention: 2 matmuls in the forward, 5 in the
/// backward.
double attention_flops(
    bool backward,
    double sequences,
    double heads,
    double seq_len,
    double head_dim);

/// Returns the names of the tables that the program has.
std::vector<std::string_view> gpu_names();

/// Returns the name of the table for a GPU with the driver's name
/// `device_name`, such as "NVIDIA H100 80GB HBM3". It is empty for a GPU or a
/// part of one (MIG) without a table.
std::string_view table_of_device(std::string_view device_name);

/// Returns a table by its name, else reads the file of that path.
/// @throws Error{config} for neither, Error{format} for a file that is not a
/// table, naming the key.
Gpu find_gpu(const std::string& name_or_path);

/// Reads what `to_toml` wrote. Keys that the text leaves out come from the
/// table that its key `base` names. Without it every key is needed.
/// @param origin  for messages.
/// @throws Error{format} naming the key.
Gpu parse_gpu(std::string_view text, const std::string& origin);

/// Returns a table as TOML. `parse_gpu` reads it back to an equal table.
std::string to_toml(const Gpu& gpu);

}  // namespace flatshard::plan
