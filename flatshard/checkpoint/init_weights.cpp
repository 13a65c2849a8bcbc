#include "flatshard/checkpoint/init_weights.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <fnmatch.h>

#include <algorithm>
#include <memory>
#include <set>

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/core/error.h"
#include "flatshard/device/upload.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/group/weight_write.h"

namespace flatshard {
namespace {

constexpr std::int64_t kComparedNbytes = 64 << 20;  // at once

struct Source {
  HfFolder::Found from;
  std::int64_t begin = 0;  ///< first element, from the start of the tensor
  std::int64_t numel = 0;
};
/// The entries that contain a parameter, in their order.
using Sources = std::vector<Source>;

/// Returns the first element of a box, in its own order, that is not before
/// `element` of the flattened tensor.
std::int64_t
first_from(const FlatRuns& runs, std::int64_t numel, std::int64_t element) {
  std::int64_t run = 0;  // the first that ends after `element`
  for (std::int64_t after = runs.size(); run < after;) {
    const std::int64_t middle = run + (after - run) / 2;
    if (runs.begin(middle) + runs.numel() > element) {
      after = middle;
    } else {
      run = middle + 1;
    }
  }
  if (run == runs.size()) {
    return numel;
  }
  return run * runs.numel() +
         std::max<std::int64_t>(element - runs.begin(run), 0);
}

/// Adds the reads of the part of a box that one source has.
/// @param at  the source's first element, in the parameter.
void add_reads(
    std::vector<TensorFill>& fills,
    const Source& source,
    std::int64_t at,
    const std::shared_ptr<const FlatRuns>& runs,
    const at::Tensor& values) {
  const std::int64_t first = first_from(*runs, values.numel(), at);
  const std::int64_t last =
      first_from(*runs, values.numel(), at + source.numel);
  const at::ScalarType dtype =
      scalar_type(source.from.entry->dtype, source.from.entry->name);
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
  const std::int64_t most = kMaxFillNbytes / item;
  for (std::int64_t done = first; done < last; done += most) {
    const std::int64_t n = std::min(most, last - done);
    const auto read = [=](std::span<std::byte> bytes) {
      for_each_run(
          *runs,
          done,
          done + n,
          [&](std::int64_t element, std::int64_t local, std::int64_t count) {
            source.from.read(
                static_cast<std::uint64_t>(
                    (source.begin + element - at) * item),
                bytes.subspan(
                    static_cast<std::size_t>((local - done) * item),
                    static_cast<std::size_t>(count * item)));
          });
    };
    fills.push_back({values.narrow(0, done, n), dtype, read});
  }
}

/// Adds the reads of a box.
void add_reads(
    std::vector<TensorFill>& fills,
    const Sources& sources,
    const OwnedBox& owned) {
  if (owned.values.numel() == 0) {
    return;
  }
  const auto runs = std::make_shared<const FlatRuns>(owned.shape, owned.box);
  std::int64_t at = 0;
  for (const Source& source : sources) {
    add_reads(fills, source, at, runs, owned.values);
    at += source.numel;
  }
}

bool matches(
    const std::vector<std::string>& patterns,
    const std::string& name) {
  return std::any_of(
      patterns.begin(),
      patterns.end(),
      [&](const std::string& pattern) {
        return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
      });
}

bool equal_bytes(const HfFolder::Found& a, const HfFolder::Found& b) {
  if (a.entry->dtype != b.entry->dtype || a.entry->shape != b.entry->shape) {
    return false;
  }
  const std::uint64_t nbytes = a.entry->nbytes();
  std::vector<std::byte> of_a(std::min<std::uint64_t>(nbytes, kComparedNbytes));
  std::vector<std::byte> of_b(of_a.size());
  for (std::uint64_t done = 0; done < nbytes; done += of_a.size()) {
    const auto n = std::min<std::uint64_t>(of_a.size(), nbytes - done);
    a.read(done, std::span(of_a).first(n));
    b.read(done, std::span(of_b).first(n));
    if (!std::equal(of_a.begin(), of_a.begin() + n, of_b.begin())) {
      return false;
    }
  }
  return true;
}

/// Matches parameters to stored tensors, and finds the unused tensors.
class Match {
 public:
  Match(const HfFolder& weights, const InitWeightsOptions& options)
      : weights_(weights), options_(options) {}

  /// Returns the entries of a box's parameter; none when it is excluded.
  /// @param compares  looks at the values of second names.
  Sources find_sources(const OwnedBox& owned, bool compares) {
    std::vector<std::vector<StoredEntry>> choices;  // one of each name
    bool excluded = false;
    for (const std::string& name : owned.names) {
      choices.push_back(options_.entries_of(name, owned.shape));
      for (const StoredEntry& entry : choices.back()) {
        excluded = excluded || matches(options_.exclude, entry.name);
      }
    }
    if (excluded) {
      return {};
    }
    for (const auto& entries : choices) {
      for (const StoredEntry& entry : entries) {
        used_.insert(entry.name);
      }
    }
    const auto known =
        std::find_if(choices.begin(), choices.end(), [&](const auto& entries) {
          return weights_.contains(entries.front().name);
        });
    // When no name matches, the error names the main one.
    const auto& taken = known == choices.end() ? choices.front() : *known;
    Sources sources;
    for (const StoredEntry& entry : taken) {
      const HfFolder::Found found = weights_.find(entry.name);
      FLATSHARD_CHECK(
          found.entry->shape == entry.tensor_shape(),
          format,
          "{}: tensor '{}': expected shape [{}], got [{}]",
          found.file->path().string(),
          found.entry->name,
          fmt::join(entry.tensor_shape(), ", "),
          fmt::join(found.entry->shape, ", "));
      scalar_type(found.entry->dtype, found.entry->name);
      sources.push_back({found, entry.begin(), entry.numel()});
    }
    for (const auto& entries : choices) {
      const std::string& name = entries.front().name;
      if (compares && name != taken.front().name && weights_.contains(name) &&
          !equal_bytes(weights_.find(name), sources.front().from)) {
        unused_.other_values.push_back(name);
      }
    }
    return sources;
  }

  /// Returns the unused weights, when all sources have been found.
  UnusedWeights unused() {
    unused_.names = weights_.passed_over();
    std::vector<std::string> refused;
    for (const std::string& name : weights_.names()) {
      if (used_.contains(name)) {
        continue;
      }
      const bool ignored =
          matches(options_.exclude, name) ||
          (options_.unneeded &&
           options_.unneeded(name, weights_.find(name).entry->shape.size()));
      (ignored ? unused_.names : refused).push_back(name);
    }
    constexpr std::size_t kShown = 5;
    const std::size_t shown = std::min(refused.size(), kShown);
    FLATSHARD_CHECK(
        refused.empty(),
        format,
        "{}: the model has no parameter for tensor '{}'{}; check that the "
        "config matches these weights. checkpoint.exclude = \"{}\" skips it",
        weights_.folder().string(),
        fmt::join(refused.begin(), refused.begin() + shown, "', '"),
        refused.size() > shown
            ? fmt::format(", and {} more", refused.size() - shown)
            : "",
        refused.front());
    return unused_;
  }

 private:
  const HfFolder& weights_;
  const InitWeightsOptions& options_;
  std::set<std::string> used_;
  UnusedWeights unused_;
};

/// @param sources_of  for each box an index into `sources`.
void read_boxes(
    const std::vector<OwnedBox>& boxes,
    const std::vector<Sources>& sources,
    const std::vector<std::size_t>& sources_of,
    const Mesh& mesh) {
  std::vector<TensorFill> on_device;
  std::vector<TensorFill> on_host;  // offloaded weights
  bool unpacks = false;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const Sources& from = sources[sources_of[i]];
    add_reads(boxes[i].values.is_cpu() ? on_host : on_device, from, boxes[i]);
    for (const Source& source : from) {
      unpacks = unpacks || source.from.unpacks != nullptr;
    }
  }
  // Unpacked experts are read in order, because only the last one is kept.
  const int threads = unpacks ? 1 : num_upload_threads(mesh.size());
  fill_tensors(on_device, mesh.device(), threads);
  fill_tensors(on_host, at::kCPU, threads);
}

}  // namespace

UnusedWeights init_weights(
    const std::filesystem::path& folder,
    const std::vector<ParamGroup*>& groups,
    const InitWeightsOptions& options) {
  const at::NoGradGuard no_grad;
  const HfFolder weights(folder, options.base_prefix, options.file_name);
  const bool compares =
      !groups.empty() && groups.front()->model_mesh()->rank() == 0;
  const auto boxes = owned_boxes(groups, nullptr);
  Match match(weights, options);
  std::vector<Sources> sources;         // one per parameter
  std::vector<std::size_t> sources_of;  // one index per box
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    if (i == 0 || boxes[i].names != boxes[i - 1].names) {
      sources.push_back(match.find_sources(boxes[i], compares));
    }
    sources_of.push_back(sources.size() - 1);
  }
  const UnusedWeights unused = match.unused();
  if (groups.empty()) {
    return unused;
  }
  WeightWrite write(
      groups,
      *current_stream(groups.front()->model_mesh()->device()));
  read_boxes(boxes, sources, sources_of, *groups.front()->model_mesh());
  for (ParamGroup* group : groups) {
    write.end(*group, WeightWrite::Cast::here);
  }
  return unused;
}

}  // namespace flatshard
