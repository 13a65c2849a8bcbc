#pragma once

#include "flatshard/train/metrics/metrics.h"

#include <cstdint>
#include <filesystem>
#include <string>

namespace flatshard {

struct EvaluateOptions {
  /// The output_dir of a run, finished or not, a checkpoint, or a Hugging Face
  /// folder.
  std::filesystem::path model;
  std::int64_t step = -1;  ///< of a checkpoint; -1: see open_model
  std::string data;        ///< a corpus folder, whose validation split is read
  std::int64_t sequences = -1;  ///< of the split's begin; -1: all
  std::int64_t seq_len = 0;     ///< 0: the model's longest, at most 4096
  std::int64_t batch_size = 1;  ///< sequences of one forward
  std::string device = "auto";
};

struct Evaluated {
  std::string model;  ///< where the weights come from
  std::int64_t sequences = 0;
  std::int64_t seq_len = 0;
  ValidationMetrics metrics;
};

/// Measures the loss of stored weights on a corpus. One process; the model is
/// held whole.
/// @throws Error{io, config, format} naming the option.
Evaluated evaluate(const EvaluateOptions& options);

/// One line of JSON.
std::string to_json(const Evaluated& found);

}  // namespace flatshard
