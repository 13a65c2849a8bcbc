#include "flatshard/train/tools/evaluate.h"

#include "flatshard/core/error.h"
#include "flatshard/data/corpus.h"
#include "flatshard/data/text_codec.h"
#include "flatshard/models/token_losses.h"
#include "flatshard/nn/documents.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/data/validation_set.h"
#include "flatshard/train/setup/run_device.h"
#include "flatshard/train/tools/stored_model.h"

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <memory>
#include <numbers>
#include <span>
#include <utility>

namespace flatshard {
namespace {

constexpr std::int64_t kLongestByDefault = 4096;

DataOptions data_options(
    const EvaluateOptions& options,
    const StoredModel& stored) {
  const std::int64_t longest = stored.shape.max_seq_len;
  const std::int64_t usual = stored.seq_len > 0
                                 ? stored.seq_len
                                 : std::min(longest, kLongestByDefault);
  const std::int64_t seq_len = options.seq_len > 0 ? options.seq_len : usual;
  FLATSHARD_CHECK(
      seq_len <= longest,
      config,
      "--seq-len: expected at most the model's max_seq_len, {}, got {}",
      longest,
      seq_len);
  const data::Packing packing = options.packing.value_or(stored.packing);
  return {
      .validation = {{.path = options.data}},
      .packing =
          {.packing = packing,
           .seq_len = seq_len,
           .max_documents = packing == data::Packing::documents
                                ? data::default_max_documents(seq_len)
                                : 0},
      .vocab_size = stored.shape.vocab_size,
      .validation_sequences = options.sequences};
}

/// Sequences of one forward, and their losses.
struct MeasuredBatch {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> targets;
  data::DocumentLengths documents;
  ValidationSet::Counts counts;
  at::Tensor losses;  ///< float32 [rows, seq_len], on the host
};

/// Runs a stored model over the sequences of a set.
class Measurement {
 public:
  /// @param set  must outlive this object.
  Measurement(
      const data::PackingOptions& packing,
      const ValidationSet& set,
      models::Llama model)
      : seq_len_(packing.seq_len),
        is_packed_(packing.packing == data::Packing::documents),
        set_(set),
        model_(std::move(model)) {}

  MeasuredBatch measure(std::int64_t first, std::int64_t count) {
    MeasuredBatch batch;
    batch.tokens.resize(static_cast<std::size_t>(count * seq_len_));
    batch.targets.resize(batch.tokens.size());
    set_.read(
        first,
        count,
        batch.tokens,
        batch.targets,
        is_packed_ ? &batch.documents : nullptr);
    batch.counts = set_.count(batch.targets);
    const at::Device device = model_->parameters().front().device();
    const auto rows = [&](const std::vector<std::int64_t>& values) {
      return at::tensor(values, at::kLong).view({count, seq_len_}).to(device);
    };
    batch.losses = models::token_losses(
                       model_,
                       rows(batch.tokens),
                       rows(batch.targets),
                       is_packed_ ? nn::Documents::of(
                                        batch.documents.lengths,
                                        seq_len_,
                                        device,
                                        batch.documents.padding)
                                  : nn::Documents())
                       .cpu()
                       .contiguous();
    return batch;
  }

  /// Adds a batch's sequences to the documents that they consist of.
  void add_to(
      DocumentLosses& documents,
      const MeasuredBatch& batch,
      std::int64_t first) const {
    const auto seq_len = static_cast<std::size_t>(seq_len_);
    const std::span<const float> losses(
        batch.losses.const_data_ptr<float>(),
        batch.targets.size());
    const auto& source = *set_.loader.sources().front().source;
    for (std::size_t at = 0; at < batch.targets.size(); at += seq_len) {
      documents.add(
          source.pieces(first++, seq_len_),
          losses.subspan(at, seq_len),
          std::span(batch.targets).subspan(at, seq_len));
    }
  }

 private:
  const std::int64_t seq_len_;
  const bool is_packed_;
  const ValidationSet& set_;
  models::Llama model_;
};

/// Bits for each byte of text, of tokens of any tokenizer.
std::optional<double> bits_per_byte(
    const std::vector<DocumentLoss>& documents) {
  double nats = 0;
  std::int64_t bytes = 0;
  for (const DocumentLoss& document : documents) {
    if (!document.bytes) {
      return std::nullopt;
    }
    nats += document.nats;
    bytes += *document.bytes;
  }
  return bytes > 0
             ? std::optional(
                   nats / (std::numbers::ln2 * static_cast<double>(bytes)))
             : std::nullopt;
}

}  // namespace

Evaluated evaluate(const EvaluateOptions& options) {
  StoredModel stored = open_model(options.model, options.step);
  stored.use_dtype(options.dtype);
  const DataOptions reads = data_options(options, stored);
  // Quick checks come before the weights.
  const std::vector<ValidationSet> sets = open_validation_sets(reads);
  std::unique_ptr<DocumentLosses> documents;
  std::unique_ptr<data::TextCodec> codec;
  if (options.per_document) {
    const auto corpus = data::Corpus::open(options.data, "validation");
    if (corpus->meta().tokenizer != data::kNoTokenizer) {
      codec = data::TextCodec::open(options.data, {.python = options.python});
    }
    documents = std::make_unique<DocumentLosses>(corpus);
  }
  Measurement measurement(
      reads.packing,
      sets.front(),
      load_model(stored, choose_device(options.device, {})));
  const std::int64_t count = sets.front().num_sequences;
  std::array<double, 3> sums{};  // input of summarize
  for (std::int64_t first = 0; first < count; first += options.batch_size) {
    const MeasuredBatch batch =
        measurement.measure(first, std::min(options.batch_size, count - first));
    sums[0] += batch.losses.sum(at::kDouble).item<double>();
    sums[1] += static_cast<double>(batch.counts.targets);
    sums[2] += static_cast<double>(batch.counts.bytes);
    if (documents) {
      measurement.add_to(*documents, batch, first);
    }
  }
  Evaluated found{
      .model = stored.what,
      .sequences = count,
      .seq_len = reads.packing.seq_len,
      .packing = reads.packing.packing,
      .dtype = std::string(config::word_of(stored.compute)),
      .metrics = summarize(sets, /*step=*/0, sums),
      .documents = {}};
  if (documents) {
    if (codec) {
      documents->count_bytes(*codec);
    }
    found.documents = documents->documents();
    found.metrics.bits_per_byte = bits_per_byte(found.documents);
  }
  return found;
}

std::string to_json(const Evaluated& found) {
  nlohmann::ordered_json json{
      {"weights", found.model},
      {"sequences", found.sequences},
      {"seq_len", found.seq_len},
      {"packing", config::word_of(found.packing)},
      {"dtype", found.dtype},
      {"loss", found.metrics.loss},
      {"perplexity", found.metrics.perplexity()}};
  if (found.metrics.bits_per_byte) {
    json["bits_per_byte"] = *found.metrics.bits_per_byte;
  }
  return json.dump() + "\n";
}

}  // namespace flatshard
