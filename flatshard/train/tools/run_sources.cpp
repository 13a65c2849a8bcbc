#include "flatshard/train/tools/run_sources.h"

#include <unistd.h>

#include <functional>
#include <string>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/core/log.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/data/corpus.h"
#include "flatshard/data/hf_tokenizer.h"
#include "flatshard/train/tools/run_files.h"
#include "flatshard/train/tools/stored_model.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSourceCorpus = "corpus";
constexpr const char* kSourceInitFrom = "init_from";

void copy_text(const fs::path& from, const fs::path& to) {
  const MappedFile file(from);
  write_file_atomic(to, file.text());
}

void save_corpus(const fs::path& from, const fs::path& to) {
  data::CorpusMeta meta = data::CorpusMeta::load(from);
  meta.splits.clear();
  if (meta.tokenizer != "bytes") {
    data::copy_tokenizer_files(from, to);
  }
  write_file_atomic(to / "meta.json", meta.to_json());
}

void save_init_from(const fs::path& from, const fs::path& to) {
  data::copy_tokenizer_files(from, to);
  std::error_code error;
  for (const char* name : {kHfConfig, kGenerationConfig}) {
    if (fs::is_regular_file(from / name, error)) {
      copy_text(from / name, to / name);
    }
  }
}

/// Writes `to` again with `save`; on a read error it stays unchanged.
void replace(
    const fs::path& to,
    const std::function<void(const fs::path&)>& save) {
  fs::path partial = to;
  partial += fmt::format(".tmp-{}", ::getpid());
  std::error_code error;
  fs::remove_all(partial, error);
  make_folder(partial);
  try {
    save(partial);
  } catch (const Error& failed) {
    fs::remove_all(partial, error);
    if (!fs::exists(to, error)) {
      log_warning(
          "run.output_dir keeps no copy of what the run was made of: {}",
          failed.message());
    }
    return;
  }
  fs::remove_all(to, error);
  fs::rename(partial, to, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot make {}: {}",
      to.string(),
      error.message());
}

/// Returns the nearest folder from `inside` upwards that has sources of a run;
/// empty when there is none.
fs::path find_upwards(fs::path folder) {
  constexpr int kMostLevels = 4;  // <run>/a/checkpoints/step-1
  std::error_code error;
  for (int i = 0; i < kMostLevels && !folder.empty(); ++i) {
    if (fs::is_directory(folder / kSources, error) &&
        fs::exists(folder / kRunConfig, error)) {
      return folder / kSources;
    }
    folder = folder.parent_path();
  }
  return {};
}

/// Looks for the path as it was given, or as links resolve it.
fs::path find_sources(const fs::path& inside) {
  std::error_code error;
  const fs::path given = fs::absolute(inside / "", error).lexically_normal();
  const fs::path found = find_upwards(given.parent_path());
  return found.empty() ? find_upwards(fs::weakly_canonical(inside, error))
                       : found;
}

}  // namespace

void save_run_sources(const fs::path& output_dir, const RunSources& sources) {
  const fs::path folder = output_dir / kSources;
  const auto& [corpus, init_from, hf_config] = sources;
  if (corpus.empty() && init_from.empty() && hf_config.empty()) {
    return;
  }
  make_folder(folder);
  if (!corpus.empty()) {
    replace(folder / kSourceCorpus, [&](const fs::path& to) {
      save_corpus(sources.corpus, to);
    });
  }
  if (!init_from.empty()) {
    replace(folder / kSourceInitFrom, [&](const fs::path& to) {
      save_init_from(sources.init_from, to);
    });
  }
  std::error_code error;
  if (!hf_config.empty() && fs::exists(hf_config, error)) {
    copy_text(hf_config, folder / kHfConfig);
  }
}

Config with_own_sources(Config config, const fs::path& inside) {
  std::error_code error;
  fs::path folder = find_sources(inside);
  if (folder.empty()) {
    // This covers a checkpoint.folder that is elsewhere.
    folder = find_sources(config.run.output_dir);
  }
  if (folder.empty()) {
    return config;
  }
  if (!tokenizer_corpus(config.data.train).empty() &&
      fs::exists(folder / kSourceCorpus / "meta.json", error)) {
    config.data.train = {{.path = (folder / kSourceCorpus).string()}};
  }
  if (!config.model.init_from.empty() &&
      fs::exists(folder / kSourceInitFrom, error)) {
    config.model.init_from = (folder / kSourceInitFrom).string();
  }
  if (!config.model.hf_config.empty() &&
      fs::exists(folder / kHfConfig, error)) {
    config.model.hf_config = (folder / kHfConfig).string();
  }
  return config;
}

}  // namespace flatshard
