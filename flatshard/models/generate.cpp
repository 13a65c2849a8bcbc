#include "flatshard/models/generate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <random>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/models/decoder.h"

namespace flatshard::models {
namespace {

using Prompts = std::vector<std::vector<std::int64_t>>;

/// A prompt that a row of the batch continues.
struct Continued {
  std::size_t prompt = 0;
  std::mt19937_64 random;
  std::vector<std::int64_t> tokens;

  /// Returns a number in [0, 1), the same on every machine.
  double draw() {
    constexpr double kSteps = 4294967296.0;  // 2^32
    return static_cast<double>(random() >> 32U) / kSteps;
  }
};

std::int64_t longest(const Prompts& prompts) {
  std::size_t most = 0;
  for (const auto& prompt : prompts) {
    most = std::max(most, prompt.size());
  }
  return static_cast<std::int64_t>(most);
}

/// All prompts of a call, over the rows of a Decoder.
class Generation {
 public:
  Generation(
      Decoder& decoder,
      const Prompts& prompts,
      const GenerationOptions& options,
      std::size_t rows)
      : decoder_(decoder),
        prompts_(prompts),
        options_(options),
        running_(rows) {}

  void run(const Generated& generated) {
    while (begin_prompts()) {
      const std::vector<std::int64_t> drawn = draw();
      keep(drawn, generated);
      if (std::ranges::any_of(running_, is_running)) {
        logits_ = decoder_.append(drawn);
      }
    }
  }

 private:
  static bool is_running(const std::optional<Continued>& row) {
    return row.has_value();
  }

  /// Gives free rows the next prompts. @return whether a row is not free.
  bool begin_prompts() {
    for (std::size_t row = 0; row < running_.size(); ++row) {
      if (running_[row] || next_ == prompts_.size()) {
        continue;
      }
      const auto at = static_cast<std::int64_t>(row);
      const at::Tensor logits = decoder_.begin(at, prompts_[next_]);
      if (!logits_.defined()) {
        const auto rows = static_cast<std::int64_t>(running_.size());
        logits_ = logits.repeat({rows, 1});
      }
      logits_.select(0, at).copy_(logits);
      running_[row] = Continued{
          .prompt = next_++,
          .random = std::mt19937_64(options_.seed),
          .tokens = {}};
    }
    return std::ranges::any_of(running_, is_running);
  }

  std::vector<std::int64_t> draw() {
    std::vector<double> numbers;
    for (auto& row : running_) {
      numbers.push_back(row ? row->draw() : 0.0);
    }
    return draw_tokens(logits_, numbers, options_.sample);
  }

  void keep(
      const std::vector<std::int64_t>& drawn,
      const Generated& generated) {
    for (std::size_t row = 0; row < running_.size(); ++row) {
      if (!running_[row]) {
        continue;
      }
      Continued& now = *running_[row];
      now.tokens.push_back(drawn[row]);
      if (std::ranges::count(options_.stop_tokens, drawn[row]) > 0 ||
          static_cast<std::int64_t>(now.tokens.size()) ==
              options_.max_new_tokens) {
        generated(now.prompt, now.tokens);
        decoder_.end(static_cast<std::int64_t>(row));
        running_[row].reset();
      }
    }
  }

  Decoder& decoder_;
  const Prompts& prompts_;
  const GenerationOptions& options_;
  std::vector<std::optional<Continued>> running_;  ///< one per row
  std::size_t next_ = 0;                           ///< next prompt to start
  at::Tensor logits_;                              ///< [rows, vocab]
};

}  // namespace

void GenerationOptions::check() const {
  sample.check();
  FLATSHARD_CHECK(
      max_new_tokens > 0 && batch_size > 0,
      config,
      "expected max_new_tokens > 0 and batch_size > 0, got {} and {}",
      max_new_tokens,
      batch_size);
}

void generate(
    const Llama& model,
    const Prompts& prompts,
    const GenerationOptions& options,
    const Generated& generated) {
  options.check();
  if (prompts.empty()) {
    return;
  }
  const std::int64_t context = options.max_context > 0
                                   ? options.max_context
                                   : model->config().max_seq_len;
  const auto rows =
      std::min(static_cast<std::size_t>(options.batch_size), prompts.size());
  Decoder decoder(
      model,
      {.rows = static_cast<std::int64_t>(rows),
       .max_tokens =
           std::min(context, longest(prompts) + options.max_new_tokens)});
  log_info(
      "keys and values of up to {} tokens of {} prompts at a time: {} MiB",
      decoder.max_tokens(),
      rows,
      (decoder.cache_nbytes() + (1 << 20) - 1) >> 20U);
  Generation(decoder, prompts, options, rows).run(generated);
}

}  // namespace flatshard::models
