#include "flatshard/models/decoder.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard::models {
namespace {

at::Tensor on_device(
    const std::vector<std::int64_t>& values,
    at::ScalarType dtype,
    at::Device device) {
  return at::tensor(values, at::kLong).to(dtype).to(device);
}

}  // namespace

Decoder::Decoder(Llama model, const Options& options)
    : model_(std::move(model)),
      device_(model_->parameters().front().device()),
      max_tokens_(options.max_tokens),
      tokens_(static_cast<std::size_t>(options.rows)),
      frequencies_(static_cast<std::size_t>(options.rows)) {
  const ModelConfig& config = model_->config();
  FLATSHARD_CHECK(
      options.rows > 0 && max_tokens_ > 0 && max_tokens_ <= config.max_seq_len,
      usage,
      "Decoder: expected rows > 0 and 0 < max_tokens <= max_seq_len = {}, got "
      "{} and {}",
      config.max_seq_len,
      options.rows,
      max_tokens_);
  const AttentionOptions& attention = config.block.attention;
  const at::TensorOptions like = model_->parameters().front().options();
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    caches_.emplace_back(
        KvCache::Shape{
            .rows = options.rows,
            .slots = attention.has_window(layer)
                         ? std::min(attention.window, max_tokens_)
                         : max_tokens_,
            .kv_heads = config.kv_heads,
            .head_dim = config.head_dim},
        at::TensorOptions().dtype(like.dtype()).device(device_));
  }
}

std::int64_t Decoder::cache_nbytes() const {
  std::int64_t sum = 0;
  for (const KvCache& cache : caches_) {
    sum += cache.nbytes();
  }
  return sum;
}

std::vector<double> Decoder::frequencies(std::int64_t length) const {
  const ModelConfig& config = model_->config();
  const auto& scaling = config.rope_scaling;
  if (!scaling || (scaling->type != nn::RopeType::dynamic &&
                   scaling->type != nn::RopeType::longrope)) {
    return {};  // equal for all lengths
  }
  return nn::rope_frequencies(
      {.head_dim = config.rotary_dim(),
       .theta = config.rope_theta,
       .scaling = scaling},
      length);
}

at::Tensor Decoder::run(const at::Tensor& tokens, const CacheStep& step) {
  const at::NoGradGuard no_grad;
  at::Tensor x = model_->embed(tokens);
  for (std::size_t i = 0; i < caches_.size(); ++i) {
    x = model_->blocks()[i]->extend(x, caches_[i], step);
  }
  return model_->head(x.narrow(1, x.size(1) - 1, 1), /*targets=*/{})
      .select(1, 0);
}

at::Tensor Decoder::refill(std::int64_t row) {
  const auto at = static_cast<std::size_t>(row);
  const auto length = static_cast<std::int64_t>(tokens_[at].size());
  frequencies_[at] = frequencies(length);
  return run(on_device(tokens_[at], at::kLong, device_).unsqueeze(0),
             {.first_row = row, .length = length})
      .select(0, 0);
}

at::Tensor Decoder::begin(
    std::int64_t row,
    std::span<const std::int64_t> tokens) {
  FLATSHARD_CHECK(
      !tokens.empty(),
      usage,
      "expected a prompt of at least one token");
  const auto kept = tokens.last(
      std::min(tokens.size(), static_cast<std::size_t>(max_tokens_)));
  tokens_.at(static_cast<std::size_t>(row)).assign(kept.begin(), kept.end());
  return refill(row);
}

void Decoder::end(std::int64_t row) {
  tokens_.at(static_cast<std::size_t>(row)).clear();
}

at::Tensor Decoder::step(std::int64_t first_row, std::int64_t end_row) {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> positions;
  for (std::int64_t row = first_row; row < end_row; ++row) {
    const auto& sequence = tokens_[static_cast<std::size_t>(row)];
    // A row without a sequence computes on its first slot. It is never read.
    tokens.push_back(sequence.empty() ? 0 : sequence.back());
    positions.push_back(std::max<std::int64_t>(
        0,
        static_cast<std::int64_t>(sequence.size()) - 1));
  }
  return run(
      on_device(tokens, at::kLong, device_).unsqueeze(1),
      {.first_row = first_row,
       .num_rows = end_row - first_row,
       .length = 1 + *std::ranges::max_element(positions),
       .positions = on_device(positions, at::kInt, device_)});
}

at::Tensor Decoder::append(std::span<const std::int64_t> tokens) {
  const auto rows = static_cast<std::int64_t>(tokens_.size());
  FLATSHARD_CHECK(
      tokens.size() == tokens_.size(),
      usage,
      "Decoder: expected a token of each of {} rows, got {}",
      rows,
      tokens.size());
  std::vector<at::Tensor> logits;
  // Rows that step together have the same frequencies and none to refill
  // between them.
  std::int64_t first = 0;
  const auto step_up_to = [&](std::int64_t end) {
    if (end > first) {
      logits.push_back(step(first, end));
    }
    first = end;
  };
  const std::vector<double>* shared = nullptr;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto at = static_cast<std::size_t>(row);
    std::vector<std::int64_t>& sequence = tokens_[at];
    if (sequence.empty()) {
      continue;
    }
    sequence.push_back(tokens[at]);
    auto length = static_cast<std::int64_t>(sequence.size());
    const bool is_full = length > max_tokens_;
    if (is_full) {
      length = std::max<std::int64_t>(1, max_tokens_ / 2);
      sequence.erase(sequence.begin(), sequence.end() - length);
    }
    if (is_full || frequencies(length) != frequencies_[at]) {
      step_up_to(row);
      logits.push_back(refill(row).unsqueeze(0));
      first = row + 1;
      shared = nullptr;
    } else if (shared == nullptr) {
      shared = &frequencies_[at];
    } else if (*shared != frequencies_[at]) {
      step_up_to(row);
      shared = &frequencies_[at];
    }
  }
  step_up_to(rows);
  return logits.size() == 1 ? logits.front() : at::cat(logits);
}

}  // namespace flatshard::models
