#include "flatshard/checkpoint/load.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <set>

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/checkpoint/state_conversion.h"
#include "flatshard/checkpoint/state_keys.h"
#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/upload.h"
#include "flatshard/flight/recorder.h"
#include "flatshard/format/read_plan.h"
#include "flatshard/group/weight_write.h"
#include "flatshard/mesh/on_all_ranks.h"
#include "flatshard/optim/moments.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

// An exclusion would leave out the weights, too.
constexpr const char* kOtherOptimizer =
    "another optimizer wrote it, or another algorithm for this parameter. Load "
    "with the optimizer and the parameter groups that wrote it, or without an "
    "optimizer (checkpoint.exclude = \"optimizer\")";

class Loader {
 public:
  Loader(
      const fs::path& folder,
      const std::vector<ParamGroup*>& groups,
      Optimizer* optimizer,
      const LoadOptions& options,
      const Mesh& mesh)
      : folder_(folder),
        groups_(groups),
        optimizer_(optimizer),
        options_(options),
        mesh_(mesh) {}

  /// Reads everything that can fail; changes nothing.
  void read() {
    const auto begin = std::chrono::steady_clock::now();
    manifest_ = read_manifest(folder_);
    convert_states();
    match();
    check_names();
    find_updates();
    const auto chunks = plan_reads(manifest_, wanted_);
    std::set<std::int64_t> files;
    for (const ReadChunk& chunk : chunks) {
      files.insert(chunk.file);
    }
    const std::vector<std::int64_t> list(files.begin(), files.end());
    if (!list.empty()) {
      check_files(folder_, manifest_, list);
    }
    // Not pinned: the readers' threads touch the pages first, side by side.
    staging_ = host_buffer(static_cast<std::int64_t>(nbytes_), at::kCPU);
    read_chunks(
        folder_,
        manifest_,
        chunks,
        {static_cast<std::byte*>(staging_.data_ptr()),
         static_cast<std::size_t>(nbytes_)},
        num_threads());
    result_ = {
        .step = manifest_.step,
        .state = manifest_.state,
        .read_nbytes = read_nbytes(chunks),
        .read_seconds = std::chrono::duration<double>(
                            std::chrono::steady_clock::now() - begin)
                            .count()};
  }

  LoadedCheckpoint apply() {
    const at::NoGradGuard no_grad;
    const at::Device device = mesh_.device();
    if (optimizer_ != nullptr) {
      optimizer_->wait_for_states();
    }
    WeightWrite write(groups_, *current_stream(device));
    std::vector<BytesCopy> to_device;
    std::vector<BytesCopy> to_host;  // replicated tensors may be there
    for (const Target& target : targets_) {
      const bool on_host = target.values.is_cpu();
      (on_host ? to_host : to_device)
          .push_back(
              {.to = target.values.data_ptr(),
               .from = static_cast<const std::byte*>(staging_.data_ptr()) +
                       target.begin,
               .nbytes = static_cast<std::int64_t>(target.values.nbytes())});
    }
    upload(to_device, device, num_threads());
    upload(to_host, at::kCPU, num_threads());
    for (const StateConversion& conversion : conversions_) {
      conversion.apply(
          {static_cast<const std::byte*>(staging_.data_ptr()),
           static_cast<std::size_t>(nbytes_)});
    }
    for (ParamGroup* group : groups_) {
      write.end(*group, WeightWrite::Cast::here);
    }
    if (optimizer_ != nullptr) {
      for (const Updates& updates : updates_) {
        optimizer_->set_num_updates(
            updates.group,
            updates.parameter,
            updates.count);
      }
      optimizer_->set_num_steps(num_steps_);
    }
    return result_;
  }

 private:
  struct Updates {
    std::size_t group = 0;
    std::size_t parameter = 0;
    std::int64_t count = 0;
  };
  struct Target {
    at::Tensor values;
    std::int64_t begin = 0;  ///< in the staging memory
  };

  int num_threads() const {
    return options_.num_threads > 0 ? options_.num_threads
                                    : num_upload_threads(mesh_.size());
  }

  bool excluded(const std::string& name) const {
    return std::any_of(
        options_.exclude.begin(),
        options_.exclude.end(),
        [&](const std::string& pattern) {
          return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
        });
  }

  bool excluded(const std::vector<std::string>& names) const {
    return std::any_of(names.begin(), names.end(), [&](const auto& name) {
      return excluded(name);
    });
  }

  /// Returns the stored tensor of a box, under whichever of its names.
  const StoredTensor& stored(const OwnedBox& owned) {
    if (const auto* found = find_stored(owned.role, owned.names)) {
      return *found;
    }
    FLATSHARD_CHECK(
        owned.role == kWeightRole || owned.role == kBufferRole ||
            find_stored(std::string(kWeightRole), owned.names) == nullptr,
        format,
        "{}: the model has {}, the checkpoint does not; {}",
        folder_.string(),
        describe_tensor(owned.role, owned.names.front()),
        kOtherOptimizer);
    std::vector<std::string> names;
    if (const auto role = manifest_.tensors.find(owned.role);
        role != manifest_.tensors.end()) {
      for (const auto& [name, tensor] : role->second) {
        names.push_back(name);
      }
    }
    FLATSHARD_THROW(
        format,
        "{}: the model has {}, the checkpoint does not{}. Exclude it to keep "
        "the model's own",
        folder_.string(),
        describe_tensor(owned.role, owned.names.front()),
        names.empty() ? ""
                      : fmt::format(
                            "; its nearest name is '{}'",
                            nearest_name(owned.names.front(), names)));
  }

  /// Returns the stored tensor of a role, or null, under whichever name.
  const StoredTensor* find_stored(
      const std::string& role,
      const std::vector<std::string>& names) {
    const auto tensors = manifest_.tensors.find(role);
    for (const std::string& name : names) {
      if (tensors == manifest_.tensors.end()) {
        break;
      }
      const auto found = tensors->second.find(name);
      if (found != tensors->second.end()) {
        used_.insert({role, name});
        return &found->second;
      }
    }
    return nullptr;
  }

  /// Plans the conversion of states that the checkpoint has in other formats.
  void convert_states() {
    if (optimizer_ == nullptr || !optimizer_->converts_states()) {
      return;
    }
    for (std::size_t i = 0; i < optimizer_->groups().size(); ++i) {
      const auto states = optimizer_->state_shards(i);
      for (const auto& [role, shards] : states) {
        if (role.ends_with(kScaleSuffix)) {
          continue;
        }
        const std::string scale_role = role + std::string(kScaleSuffix);
        for (const NamedShard& shard : shards) {
          convert_state(role, shard, [&]() -> std::optional<NamedShard> {
            for (const auto& [other, scales] : states) {
              for (const NamedShard& scale : scales) {
                if (other == scale_role && scale.name() == shard.name() &&
                    scale.local_offset == shard.local_offset) {
                  return scale;
                }
              }
            }
            return std::nullopt;
          });
        }
      }
    }
  }

  template <class Scales>
  void convert_state(
      const std::string& role,
      const NamedShard& shard,
      const Scales& scales) {
    const auto tensors = manifest_.tensors.find(role);
    if (shard.dropped || excluded(shard.names) ||
        tensors == manifest_.tensors.end()) {
      return;
    }
    for (const std::string& name : shard.names) {
      const auto found = tensors->second.find(name);
      if (found == tensors->second.end()) {
        continue;
      }
      if (found->second.dtype !=
          safetensors_dtype(shard.tensor.scalar_type())) {
        const std::string scale_role = role + std::string(kScaleSuffix);
        StateConversion conversion(
            shard,
            scales(),
            found->second,
            find_stored(scale_role, shard.names),
            fmt::format(
                "{}: {}",
                folder_.string(),
                describe_tensor(role, name)));
        conversion.want(wanted_, nbytes_);
        conversions_.push_back(std::move(conversion));
        used_.insert({role, name});
        converted_.insert({role, shard.name()});
        converted_.insert({scale_role, shard.name()});
      }
      return;
    }
  }

  void match() {
    for (const OwnedBox& owned :
         owned_boxes(groups_, optimizer_, options_.whole_tensors)) {
      if (excluded(owned.names) ||
          converted_.count({owned.role, owned.names.front()}) == 1) {
        continue;
      }
      const StoredTensor& tensor = stored(owned);
      const std::string what = describe_tensor(owned.role, owned.names.front());
      FLATSHARD_CHECK(
          tensor.shape == owned.shape,
          format,
          "{}: {}: expected shape [{}], got [{}]",
          folder_.string(),
          what,
          fmt::join(owned.shape, ", "),
          fmt::join(tensor.shape, ", "));
      const std::string dtype = safetensors_dtype(owned.values.scalar_type());
      FLATSHARD_CHECK(
          tensor.dtype == dtype,
          format,
          "{}: {}: expected dtype {}, got {}",
          folder_.string(),
          what,
          dtype,
          tensor.dtype);
      if (owned.values.numel() > 0) {
        // Aligned for any dtype.
        constexpr std::uint64_t kAlign = 16;
        nbytes_ = round_up(nbytes_, kAlign);
        targets_.push_back({owned.values, static_cast<std::int64_t>(nbytes_)});
        wanted_.push_back({&tensor, owned.box, nbytes_});
        nbytes_ += owned.values.nbytes();
      }
    }
  }

  /// Throws when the checkpoint has tensors that the model lacks.
  void check_names() const {
    for (const auto& [role, tensors] : manifest_.tensors) {
      if (optimizer_ == nullptr && role != kWeightRole && role != kBufferRole) {
        continue;
      }
      for (const auto& [name, tensor] : tensors) {
        const bool is_state =
            used_.count({std::string(kWeightRole), name}) == 1;
        FLATSHARD_CHECK(
            used_.count({role, name}) == 1 || excluded(name),
            format,
            "{}: the checkpoint has {}, the model does not; {}",
            folder_.string(),
            describe_tensor(role, name),
            is_state ? kOtherOptimizer : "exclude it to do without");
      }
    }
  }

  void find_updates() {
    if (optimizer_ == nullptr) {
      return;
    }
    const auto steps = manifest_.state.find(std::string(kOptimizerSteps));
    FLATSHARD_CHECK(
        steps != manifest_.state.end(),
        format,
        "{}: the checkpoint has no '{}'; it was written without an "
        "optimizer. Load without one (checkpoint.exclude = \"optimizer\")",
        folder_.string(),
        kOptimizerSteps);
    num_steps_ = std::strtoll(steps->second.c_str(), nullptr, 10);
    const std::vector<ParamGroup*>& groups = optimizer_->groups();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      for (std::size_t j = 0; j < groups[i]->parameters().size(); ++j) {
        const GroupParameter& parameter = groups[i]->parameters()[j];
        if (parameter.dropped || excluded(parameter.names)) {
          continue;
        }
        const auto found = std::find_if(
            parameter.names.begin(),
            parameter.names.end(),
            [&](const auto& name) { return manifest_.updates.count(name); });
        FLATSHARD_CHECK(
            found != parameter.names.end(),
            format,
            "{}: the checkpoint has no count of updates of {}",
            folder_.string(),
            parameter.names.front());
        updates_.push_back(
            {.group = i,
             .parameter = j,
             .count = manifest_.updates.at(*found)});
      }
    }
  }

  const fs::path folder_;
  const std::vector<ParamGroup*>& groups_;
  Optimizer* const optimizer_;
  const LoadOptions& options_;
  const Mesh& mesh_;
  Manifest manifest_;
  std::set<std::pair<std::string, std::string>> used_;
  std::set<std::pair<std::string, std::string>> converted_;  ///< role and name
  std::vector<StateConversion> conversions_;
  std::vector<Target> targets_;
  std::vector<WantedBox> wanted_;
  std::uint64_t nbytes_ = 0;
  std::vector<Updates> updates_;
  std::int64_t num_steps_ = 0;
  at::Tensor staging_;
  LoadedCheckpoint result_;
};

}  // namespace

LoadedCheckpoint load_checkpoint(
    const fs::path& folder,
    const std::vector<ParamGroup*>& groups,
    Optimizer* optimizer,
    const LoadOptions& options) {
  FLATSHARD_CHECK(!groups.empty(), usage, "expected at least one group");
  const std::shared_ptr<Mesh> mesh =
      options.mesh ? options.mesh : groups.front()->model_mesh();
  Loader loader(folder, groups, optimizer, options, *mesh);
  on_all_ranks(*mesh, "load checkpoint", [&] {
    loader.read();
    return std::int64_t{0};
  });
  return loader.apply();
}

}  // namespace flatshard
