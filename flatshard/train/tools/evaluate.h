#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/data/packing/packing.h"
#include "flatshard/train/metrics/metrics.h"
#include "flatshard/train/tools/document_losses.h"

namespace flatshard {

struct EvaluateOptions {
  /// The output_dir of a run, finished or not, a checkpoint, or a Hugging Face
  /// folder.
  std::filesystem::path model;
  std::int64_t step = -1;  ///< of a checkpoint; -1: see open_model
  std::string data;        ///< a dataset folder; its validation split is read
  std::int64_t sequences = -1;  ///< from the start of the split; -1: all
  /// 0: the run's training.seq_len, and for a Hugging Face folder its longest,
  /// at most 4096.
  std::int64_t seq_len = 0;
  std::int64_t batch_size = 1;  ///< sequences of one forward
  /// Unset: the run's data.packing, and stream for a Hugging Face folder.
  std::optional<data::Packing> packing;
  /// Also measures each document, and counts the bytes of the tokens of any
  /// tokenizer.
  bool per_document = false;
  std::string python;  ///< for a tokenizer.json; see data::find_python
  std::string device = "auto";
  /// The dtype of weights and activations: auto is the run's precision.compute,
  /// and float32 for a Hugging Face folder.
  std::string dtype = "auto";
};

struct Evaluated {
  std::string model;  ///< source of the weights
  std::int64_t sequences = 0;
  std::int64_t seq_len = 0;
  data::Packing packing = data::Packing::stream;
  std::string dtype;  ///< of weights and activations
  ValidationMetrics metrics;
  std::vector<DocumentLoss> documents;  ///< with per_document
};

/// Measures the loss of stored weights on a dataset. One process; the model is
/// not sharded.
/// @throws Error{io, config, format} naming the option.
Evaluated evaluate(const EvaluateOptions& options);

/// Returns one line of JSON.
std::string to_json(const Evaluated& found);

}  // namespace flatshard
