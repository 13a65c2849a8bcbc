#include "flatshard/train/run/run_start.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <functional>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/format/manifest.h"
#include "flatshard/format/read_plan.h"
#include "flatshard/mesh/on_all_ranks.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/metrics/metrics_file.h"
#include "flatshard/train/run/earlier_run.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

/// Returns the result of `find` on rank 0, on all ranks. Collective.
std::int64_t of_rank_0(Mesh& mesh, const std::function<std::int64_t()>& find) {
  return on_all_ranks(mesh, "find checkpoint", [&] {
    return mesh.rank() == 0 ? find() : 0;
  });
}

/// Returns the latest checkpoint with all files in their full size: a copy may
/// have been truncated. Logs a warning for each later one.
std::optional<std::int64_t> latest_whole_checkpoint(const fs::path& folder) {
  const auto latest = latest_checkpoint(folder);
  auto steps = list_checkpoints(folder);
  std::erase_if(steps, [&](std::int64_t step) { return step > latest; });
  for (; !steps.empty(); steps.pop_back()) {
    const fs::path path = step_folder(folder, steps.back());
    try {
      check_files(path, read_manifest(path));
      return steps.back();
    } catch (const Error& error) {
      if (steps.size() == 1) {
        throw;  // nothing to go back to
      }
      log_warning(
          "{} is incomplete, so the run resumes from the checkpoint before it: "
          "{}",
          path.string(),
          error.message());
    }
  }
  return std::nullopt;
}

/// Returns the step of the checkpoint that a run continues from. Collective.
std::optional<std::int64_t>
start_checkpoint(const StartOptions& options, bool resume, Mesh& mesh) {
  constexpr std::int64_t kScratch = -1;
  const fs::path& folder = options.files.checkpoints;
  const std::int64_t wanted = options.load_step;
  std::int64_t step = wanted;
  if (wanted < 0 && resume) {
    step = of_rank_0(mesh, [&] {
      return latest_whole_checkpoint(folder).value_or(kScratch);
    });
  }
  if (step < 0) {
    return std::nullopt;
  }
  FLATSHARD_CHECK(
      fs::exists(step_folder(folder, step)),
      io,
      "checkpoint.load_step: {} does not exist; checkpoints of {}: {}",
      step_folder(folder, step).string(),
      folder.string(),
      fmt::to_string(fmt::join(list_checkpoints(folder), ", ")));
  return step;
}

/// Returns whether nothing is left to do for a run that continues from the
/// checkpoint of `step`. Collective.
bool run_has_ended(const StartOptions& options, std::int64_t step, Mesh& mesh) {
  if (step != options.last_step) {
    return step > options.last_step;
  }
  return of_rank_0(mesh, [&] {
           return static_cast<std::int64_t>(
               metrics_say_ended(options.files.output_dir / kRunMetrics, step));
         }) != 0;
}

/// Returns the sequences per step of the run that wrote the checkpoint of
/// `step`, 0 when the checkpoint lacks them. Collective.
std::int64_t checkpoint_global_batch(
    const fs::path& checkpoints,
    std::int64_t step,
    Mesh& mesh) {
  return of_rank_0(mesh, [&]() -> std::int64_t {
    const fs::path folder = step_folder(checkpoints, step);
    const Manifest manifest = read_manifest(folder);
    const auto text = manifest.state.find(std::string(kConfigState));
    if (text == manifest.state.end()) {
      return 0;
    }
    try {
      return parse_config(text->second, folder.string())
          .training.global_batch_size;
    } catch (const Error& error) {
      log_warning(
          "the global batch of {} is not known: {}",
          folder.string(),
          error.what());
      return 0;
    }
  });
}

}  // namespace

RunStart find_start(const StartOptions& options, bool resume, Mesh& mesh) {
  RunStart start;
  start.checkpoint = start_checkpoint(options, resume, mesh);
  start.goes_on = resume || start.checkpoint;
  if (mesh.rank() == 0 && !start.checkpoint) {
    refuse_foreign_files(options.files);
    if (!start.goes_on) {
      refuse_inputs_that_move(options.files, options.init_from);
    }
  }
  if (!start.checkpoint) {
    return start;
  }
  start.nothing_left = run_has_ended(options, *start.checkpoint, mesh);
  if (start.nothing_left && mesh.rank() == 0) {
    log_info(
        "nothing is left to do: the run has a checkpoint of step {}, and "
        "training.steps = {}; raise it to continue",
        *start.checkpoint,
        options.last_step);
  }
  return start;
}

std::int64_t global_batch_from(
    std::int64_t step,
    const fs::path& checkpoints,
    const BatchSizes& sizes,
    Mesh& mesh) {
  const std::int64_t before = checkpoint_global_batch(checkpoints, step, mesh);
  if (before <= 0 || before == sizes.global) {
    return sizes.global;
  }
  if (!sizes.derived) {
    if (mesh.rank() == 0) {
      log_info(
          "training.global_batch_size = {}, as in the config; the checkpoint "
          "of step {} was trained with {}",
          sizes.global,
          step,
          before);
    }
    return sizes.global;
  }
  const int data_ranks = mesh.data_mesh()->size();
  const std::int64_t ranks_batch = sizes.local * data_ranks;
  FLATSHARD_CHECK(
      before % ranks_batch == 0,
      config,
      "training.global_batch_size: the checkpoint of step {} was trained with "
      "{} sequences per step, and this is not a multiple of local_batch_size "
      "* ranks = {} * {} = {}; set training.global_batch_size to a number, or "
      "change training.local_batch_size or the number of ranks",
      step,
      before,
      sizes.local,
      data_ranks,
      ranks_batch);
  if (mesh.rank() == 0) {
    log_info(
        "training.global_batch_size = {}, as in the checkpoint of step {}; the "
        "default for these ranks would be {}",
        before,
        step,
        sizes.global);
  }
  return before;
}

}  // namespace flatshard
