#include "flatshard/train/export/evaluate.h"

#include "flatshard/core/error.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/train/device.h"
#include "flatshard/train/evaluation.h"
#include "flatshard/train/export/stored_model.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <memory>
#include <utility>

namespace flatshard {
namespace {

constexpr std::int64_t kLongestByDefault = 4096;

}  // namespace

Evaluated evaluate(const EvaluateOptions& options) {
  const StoredModel stored = open_model(options.model, options.step);
  const std::int64_t longest = stored.shape.max_seq_len;
  Config config;
  config.training.seq_len = options.seq_len > 0
                                ? options.seq_len
                                : std::min(longest, kLongestByDefault);
  FLATSHARD_CHECK(
      config.training.seq_len <= longest,
      config,
      "--seq-len: expected at most the model's max_seq_len, {}, got {}",
      longest,
      config.training.seq_len);
  config.training.local_batch_size = options.batch_size;
  config.validation.sequences = options.sequences;
  config.validation.freq = 1;
  config.data.validation = {{.path = options.data}};
  // What is quick to find wrong comes before the weights.
  std::vector<ValidationSet> sets =
      open_validation_sets(config, stored.shape.vocab_size);
  Evaluated found{
      .model = stored.what,
      .sequences = sets.front().num_sequences,
      .seq_len = config.training.seq_len,
      .metrics = {}};
  const at::Device device = choose_device(options.device, {});
  Evaluation evaluation(
      config,
      std::move(sets),
      Mesh::single(device),
      load_model(stored, device));
  found.metrics = evaluation.run(0);
  return found;
}

std::string to_json(const Evaluated& found) {
  nlohmann::ordered_json json{
      {"weights", found.model},
      {"sequences", found.sequences},
      {"seq_len", found.seq_len},
      {"loss", found.metrics.loss},
      {"perplexity", found.metrics.perplexity()}};
  if (found.metrics.bits_per_byte) {
    json["bits_per_byte"] = *found.metrics.bits_per_byte;
  }
  return json.dump() + "\n";
}

}  // namespace flatshard
