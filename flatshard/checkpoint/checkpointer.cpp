#include "flatshard/checkpoint/checkpointer.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <functional>
#include <map>

#include "flatshard/checkpoint/state_keys.h"
#include "flatshard/comm/agree_on_id.h"
#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/core/log.h"
#include "flatshard/device/memory.h"
#include "flatshard/format/block_writer.h"
#include "flatshard/format/checkpoint_folder.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

// Each rank reports the outcome of its files: one of these words, then a text.
constexpr std::string_view kDone = "done ";
constexpr std::string_view kFailed = "failed ";

/// Returns the strategy of the groups; with several how many groups have which.
std::string strategies_text(const std::vector<ParamGroup*>& groups) {
  std::map<std::string, std::size_t> counts;
  for (const ParamGroup* group : groups) {
    ++counts[group->strategy().name];
  }
  std::vector<std::string> parts;
  for (const auto& [name, count] : counts) {
    parts.push_back(
        counts.size() == 1
            ? name
            : fmt::format("{} ({} of {} groups)", name, count, groups.size()));
  }
  return fmt::to_string(fmt::join(parts, ", "));
}

/// Returns whether the box is in host memory and changes only with the next
/// update.
bool is_kept_on_host(const OwnedBox& box) {
  return box.values.is_cpu() && box.role != kBufferRole;
}

}  // namespace

Checkpointer::Checkpointer(
    std::shared_ptr<Mesh> mesh,
    std::vector<ParamGroup*> groups,
    const Optimizer* optimizer,
    CheckpointOptions options)
    : mesh_(std::move(mesh)),
      groups_(std::move(groups)),
      optimizer_(optimizer),
      options_(std::move(options)),
      image_(
          boxes_to_write(
              groups_,
              optimizer_,
              options_.whole_tensors,
              mesh_->rank()),
          mesh_->rank(),
          mesh_->size(),
          options_.max_file_nbytes) {
  FLATSHARD_CHECK(
      options_.keep_latest >= 0,
      config,
      "expected to keep at least 0 checkpoints, got {}",
      options_.keep_latest);
  make_folder(options_.folder);
  if (mesh_->rank() == 0) {
    // Before any rank gets past the broadcast and writes.
    remove_leftovers(options_.folder);
  }
  id_ = agree_on_id(mesh_->world());
  mesh_->check();
  messages_ = std::make_unique<RankMessages>(mesh_, id_);
  stream_ = make_stream(mesh_->device(), "checkpoint");
  host_stream_ = mesh_->device().is_cpu()
                     ? stream_
                     : make_stream(at::kCPU, "checkpoint host");
  for (at::Tensor& buffer : buffers_) {
    buffer = host_buffer(image_.nbytes(), mesh_->device());
    image_.write_heads(buffer);
  }
  writer_ = std::thread([this] { run(); });
}

Checkpointer::~Checkpointer() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  writer_.join();
  for (const SaveResult& result : results_) {
    if (result.error) {
      log_error(
          "checkpoint of step {} failed: {}",
          result.step,
          result.error->what());
    }
  }
}

std::map<std::string, std::int64_t> Checkpointer::updates() const {
  std::map<std::string, std::int64_t> updates;
  if (optimizer_ == nullptr) {
    return updates;
  }
  const auto& groups = optimizer_->groups();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::vector<GroupParameter>& parameters = groups[i]->parameters();
    for (std::size_t j = 0; j < parameters.size(); ++j) {
      if (!parameters[j].dropped) {
        updates[parameters[j].names.front()] = optimizer_->num_updates(i, j);
      }
    }
  }
  return updates;
}

void Checkpointer::save(
    std::int64_t step,
    std::map<std::string, std::string> state) {
  Job job{
      .step = step,
      .sequence = num_saves_,
      .buffer = static_cast<std::size_t>(num_saves_ % 2),
      .state = std::move(state),
      .updates = updates(),
      .begin = Clock::now()};
  if (optimizer_ != nullptr) {
    job.state[std::string(kOptimizerSteps)] =
        fmt::format("{}", optimizer_->num_steps());
  }
  {
    std::unique_lock lock(mutex_);
    const auto has_room = [&] { return queue_.size() < buffers_.size(); };
    if (!has_room() && mesh_->rank() == 0) {
      log_warning(
          "the checkpoint of step {} waits until the checkpoint of step {} is "
          "written, because the disk is slower than the steps between "
          "checkpoints; save less often (checkpoint.interval)",
          job.step,
          queue_.front().step);
    }
    changed_.wait(lock, has_room);
  }
  Event computed;
  computed.record(*current_stream(mesh_->device()));
  computed.wait(*stream_);
  const at::Tensor& buffer = buffers_[job.buffer];
  stream_->submit([this, buffer] {
    image_.copy_boxes(buffer, std::not_fn(is_kept_on_host));
  });
  job.copied.record(*stream_);
  copied_ = job.copied;
  host_stream_->submit([this, buffer] {
    if (optimizer_ != nullptr) {
      set_current_device(mesh_->device());
      optimizer_->wait_for_states();
    }
    image_.copy_boxes(buffer, is_kept_on_host);
  });
  job.copied_on_host.record(*host_stream_);
  copied_on_host_ = job.copied_on_host;
  ++num_saves_;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(job));
  }
  changed_.notify_all();
}

void Checkpointer::wait_for_copies() {
  copied_.wait(*current_stream(mesh_->device()));
  copied_on_host_.synchronize();
}

void Checkpointer::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty(); });
}

std::vector<SaveResult> Checkpointer::take_results() {
  const std::lock_guard lock(mutex_);
  return std::exchange(results_, {});
}

void Checkpointer::run() {
  if (mesh_->device().is_cuda()) {
    set_current_device(mesh_->device());
  }
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    const Job job = queue_.front();
    lock.unlock();
    SaveResult result = carry_out(job);
    lock.lock();
    results_.push_back(std::move(result));
    queue_.pop_front();
    changed_.notify_all();
  }
}

std::string Checkpointer::key(const Job& job, const std::string& what) const {
  return fmt::format("{}/{}", job.sequence, what);
}

std::string Checkpointer::write_files(const Job& job) {
  job.copied.synchronize();
  job.copied_on_host.synchronize();
  mesh_->check();  // before results of an aborted collective are saved
  const fs::path folder = partial_folder(options_.folder, job.step, id_);
  make_folder(folder);
  Manifest part = image_.part();
  part.updates = job.updates;
  for (std::size_t i = 0; i < part.files.size(); ++i) {
    part.files[i].digests = write_digested(
        folder / part.files[i].name,
        image_.file(buffers_[job.buffer], i));
  }
  sync_folder(folder);
  return to_json(part);
}

SaveResult Checkpointer::carry_out(const Job& job) {
  SaveResult result{.step = job.step};
  std::string report;
  try {
    report = std::string(kDone) + write_files(job);
  } catch (const std::exception& error) {
    report = std::string(kFailed) + error.what();
  }
  try {
    messages_->send(
        key(job, fmt::format("rank-{}", messages_->rank())),
        report);
    commit(job, result);
  } catch (const Error& error) {
    result.error = error;
  } catch (const std::exception& error) {
    result.error = Error(ErrorCode::comm, error.what());
  }
  result.seconds =
      std::chrono::duration<double>(Clock::now() - job.begin).count();
  return result;
}

void Checkpointer::commit(const Job& job, SaveResult& result) {
  const std::string done = key(job, "done");
  if (messages_->rank() != 0) {
    const std::string verdict = messages_->receive(
        done,
        fmt::format("rank 0 to complete the checkpoint of step {}", job.step),
        options_.timeout);
    if (verdict.starts_with(kFailed)) {
      result.error = Error(ErrorCode::io, verdict.substr(kFailed.size()));
    }
    return;
  }
  const fs::path folder = partial_folder(options_.folder, job.step, id_);
  try {
    complete(job, folder, result);
    messages_->send(done, std::string(kDone));
  } catch (const std::exception& error) {
    // The other ranks wait for the verdict, whatever failed here.
    std::error_code ignored;
    fs::remove_all(folder, ignored);
    messages_->send(done, std::string(kFailed) + error.what());
    throw;
  }
}

void Checkpointer::complete(
    const Job& job,
    const fs::path& folder,
    SaveResult& result) {
  std::vector<Manifest> parts;
  std::string failure;
  for (int rank = 0; rank < messages_->world(); ++rank) {
    const std::string mine = key(job, fmt::format("rank-{}", rank));
    const std::string report = messages_->receive(
        mine,
        fmt::format(
            "rank {} to write its part of the checkpoint of step {}",
            rank,
            job.step),
        options_.timeout);
    messages_->forget(mine);
    if (report.starts_with(kDone)) {
      parts.push_back(parse_manifest(
          report.substr(kDone.size()),
          fmt::format("what rank {} wrote", rank),
          /*complete=*/false));
    } else if (failure.empty()) {
      failure =
          messages_->world() == 1
              ? report.substr(kFailed.size())
              : fmt::format("rank {}: {}", rank, report.substr(kFailed.size()));
    }
  }
  FLATSHARD_CHECK(failure.empty(), io, "{}", failure);
  Manifest manifest = merge_manifests(parts);
  manifest.step = job.step;
  manifest.mesh = mesh_->to_string();
  manifest.strategy = strategies_text(groups_);
  manifest.state = job.state;
  write_file_atomic(folder / kManifestName, to_json(manifest));
  publish_checkpoint(options_.folder, job.step, id_);
  if (options_.keep_latest > 0) {
    result.removed = prune_checkpoints(options_.folder, options_.keep_latest);
  }
}

}  // namespace flatshard
