#include "flatshard/checkpoint/init_weights.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/checkpoint/owned_runs.h"
#include "flatshard/core/error.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/group/weight_write.h"

namespace flatshard {
namespace {

constexpr std::int64_t kPieceNbytes = 64 << 20;

/// Elements [begin, begin + values.numel()) of a stored tensor.
void read_range(
    const HfFolder::Found& from,
    std::int64_t begin,
    const at::Tensor& values) {
  const at::ScalarType dtype = scalar_type(from.entry->dtype, from.entry->name);
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
  const std::int64_t most = kPieceNbytes / item;
  for (std::int64_t done = 0; done < values.numel(); done += most) {
    const std::int64_t n = std::min(most, values.numel() - done);
    const at::Tensor host = at::empty({n}, dtype);
    from.read(
        static_cast<std::uint64_t>((begin + done) * item),
        {static_cast<std::byte*>(host.data_ptr()), host.nbytes()});
    values.narrow(0, done, n).copy_(host);
  }
}

/// What holds a parameter: entries one after another.
using Sources = std::vector<HfFolder::Found>;

std::int64_t numel_of(const SafetensorsEntry& entry) {
  std::int64_t n = 1;
  for (const std::int64_t size : entry.shape) {
    n *= size;
  }
  return n;
}

void read_run(const Sources& sources, const OwnedRun& run) {
  std::int64_t at = 0;  // of the entry, in the parameter
  for (const HfFolder::Found& from : sources) {
    const std::int64_t end = at + numel_of(*from.entry);
    const std::int64_t first = std::max(at, run.begin);
    const std::int64_t last = std::min(end, run.end());
    if (first < last) {
      read_range(
          from,
          first - at,
          run.values.narrow(0, first - run.begin, last - first));
    }
    at = end;
  }
}

/// Finds the entries of a run's parameter and adds all names that it may have
/// to `used`.
Sources find_sources(
    const HfFolder& weights,
    const OwnedRun& run,
    const StoredEntriesOf& entries_of,
    std::set<std::string>& used) {
  std::vector<std::vector<StoredEntry>> choices;  // one of each name
  for (const std::string& name : run.names) {
    choices.push_back(entries_of(name, run.shape));
    for (const StoredEntry& entry : choices.back()) {
      used.insert(entry.name);
    }
  }
  const auto known =
      std::find_if(choices.begin(), choices.end(), [&](const auto& entries) {
        return weights.contains(entries.front().name);
      });
  // Without one, the message of the main name.
  Sources sources;
  for (const StoredEntry& entry :
       known == choices.end() ? choices.front() : *known) {
    const HfFolder::Found found = weights.find(entry.name);
    FLATSHARD_CHECK(
        found.entry->shape == entry.shape,
        format,
        "{}: tensor '{}': expected shape [{}], got [{}]",
        found.file->path().string(),
        found.entry->name,
        fmt::join(entry.shape, ", "),
        fmt::join(found.entry->shape, ", "));
    scalar_type(found.entry->dtype, found.entry->name);
    sources.push_back(found);
  }
  return sources;
}

}  // namespace

void init_weights(
    const std::filesystem::path& folder,
    const std::vector<ParamGroup*>& groups,
    const StoredEntriesOf& entries_of) {
  const at::NoGradGuard no_grad;
  const HfFolder weights(folder);
  const auto runs = owned_runs(groups, nullptr);
  std::vector<Sources> sources;
  std::set<std::string> used;
  for (const OwnedRun& run : runs) {
    sources.push_back(find_sources(weights, run, entries_of, used));
  }
  for (const std::string& name : weights.names()) {
    FLATSHARD_CHECK(
        used.count(name) == 1,
        format,
        "{}: tensor '{}' belongs to no parameter of the model; is the config "
        "that of these weights?",
        folder.string(),
        name);
  }
  if (groups.empty()) {
    return;
  }
  WeightWrite write(
      groups,
      *current_stream(groups.front()->model_mesh()->device()));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    read_run(sources[i], runs[i]);
  }
  for (ParamGroup* group : groups) {
    write.end(*group, WeightWrite::Cast::here);
  }
}

}  // namespace flatshard
