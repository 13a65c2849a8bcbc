#include "flatshard/checkpoint/init_weights.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/checkpoint/owned_runs.h"
#include "flatshard/core/error.h"
#include "flatshard/format/hf_folder.h"

namespace flatshard {
namespace {

constexpr std::int64_t kPieceNbytes = 64 << 20;

/// `values` from element `begin` of the stored tensor on.
void read_run(const HfFolder::Found& from, const OwnedRun& run) {
  const at::ScalarType dtype = scalar_type(from.entry->dtype, from.entry->name);
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
  const std::int64_t most = kPieceNbytes / item;
  for (std::int64_t done = 0; done < run.values.numel(); done += most) {
    const std::int64_t n = std::min(most, run.values.numel() - done);
    const at::Tensor host = at::empty({n}, dtype);
    from.read(
        static_cast<std::uint64_t>((run.begin + done) * item),
        {static_cast<std::byte*>(host.data_ptr()), host.nbytes()});
    run.values.narrow(0, done, n).copy_(host);
  }
}

}  // namespace

void init_weights(
    const std::filesystem::path& folder,
    const std::vector<ParamGroup*>& groups,
    const std::function<std::string(const std::string&)>& rename) {
  const at::NoGradGuard no_grad;
  const HfFolder weights(folder);
  const auto runs = owned_runs(groups, nullptr);
  std::vector<HfFolder::Found> sources;
  std::set<std::string> used;
  for (const OwnedRun& run : runs) {
    std::vector<std::string> names;
    for (const std::string& name : run.names) {
      names.push_back(rename(name));
    }
    const auto known =
        std::find_if(names.begin(), names.end(), [&](const auto& name) {
          return weights.contains(name);
        });
    // Without one, the message of the main name.
    const HfFolder::Found found =
        weights.find(known == names.end() ? names.front() : *known);
    FLATSHARD_CHECK(
        found.entry->shape == run.shape,
        format,
        "{}: tensor '{}': expected shape [{}], got [{}]",
        found.file->path().string(),
        found.entry->name,
        fmt::join(run.shape, ", "),
        fmt::join(found.entry->shape, ", "));
    scalar_type(found.entry->dtype, found.entry->name);
    used.insert(names.begin(), names.end());
    sources.push_back(found);
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
  for (ParamGroup* group : groups) {
    group->prepare_write();
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    read_run(sources[i], runs[i]);
  }
  for (ParamGroup* group : groups) {
    group->cast_main_to_compute();
  }
}

}  // namespace flatshard
