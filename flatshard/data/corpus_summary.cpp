#include "flatshard/data/corpus_summary.h"

#include <fmt/format.h>

namespace flatshard::data {

std::string summary(const CorpusMeta& meta) {
  std::string text = fmt::format(
      "tokenizer        {}\n"
      "vocab_size       {}    (model.vocab_size must be at least this)\n"
      "end of document  token {}\n{}"
      "stored as        {}\n",
      meta.tokenizer,
      meta.vocab_size,
      meta.end_of_document,
      meta.begin_of_document
          ? fmt::format("starts with      token {}\n", *meta.begin_of_document)
          : "",
      to_string(meta.token_type));
  for (const SplitMeta& split : meta.splits) {
    text += fmt::format(
        "{:<16} {} tokens{}, {} documents, {} files\n",
        split.name,
        split.num_tokens,
        split.trained_tokens
            ? fmt::format(" ({} of them trained)", *split.trained_tokens)
            : "",
        split.num_documents,
        split.shard_tokens.size());
  }
  return text;
}

}  // namespace flatshard::data
