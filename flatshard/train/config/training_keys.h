#pragma once

#include "flatshard/train/config/key.h"

namespace flatshard::config {

struct Run {
  std::string output_dir = "outputs/run";
  std::int64_t seed = 0;
  bool save_weights = true;
};

template <>
inline constexpr Word<data::Packing> kWords<data::Packing>[] = {
    {"stream", data::Packing::stream},
    {"documents", data::Packing::documents}};

struct Data {
  std::vector<data::SourceChoice> train;
  std::vector<data::SourceChoice> validation;
  data::Packing packing = data::Packing::stream;
  std::int64_t documents_per_sample = -1;
};

enum class OnNonfinite { stop, skip, rewind };
template <>
inline constexpr Word<OnNonfinite> kWords<OnNonfinite>[] = {
    {"stop", OnNonfinite::stop},
    {"skip", OnNonfinite::skip},
    {"rewind", OnNonfinite::rewind}};

struct Training {
  std::int64_t steps = 1000;
  std::int64_t seq_len = 2048;
  std::int64_t local_batch_size = 1;
  std::int64_t global_batch_size = -1;
  double max_norm = 1.0;
  OnNonfinite on_nonfinite = OnNonfinite::stop;
};

struct Validation {
  std::int64_t freq = 0;
  std::int64_t sequences = 256;
};

struct Checkpoint {
  std::int64_t interval = 0;
  std::int64_t keep_latest_k = 0;
  bool async = true;
  std::string folder = "checkpoints";
  std::int64_t load_step = -1;
  std::string exclude;
  bool export_hf_at_end = false;
};

struct Metrics {
  std::int64_t log_freq = 10;
  bool tensorboard = false;
};

/// [run], [data], [training], [validation], [checkpoint] and [metrics].
KeyTable training_keys();

}  // namespace flatshard::config
