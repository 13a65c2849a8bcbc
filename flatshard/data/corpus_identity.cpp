#include "flatshard/data/corpus_identity.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"

// Header-only: nothing to link, and the compiler sees the loops.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace flatshard::data {
namespace {

constexpr std::int64_t kBlockTokens = std::int64_t{1} << 18;
constexpr std::int64_t kNumBlocks = 16;

}  // namespace

bool CorpusIdentity::agrees_with(const CorpusIdentity& other) const {
  const auto agree = [](const std::string& a, const std::string& b) {
    return a.empty() || b.empty() || a == b;
  };
  return agree(sample, other.sample) && agree(all, other.all);
}

CorpusIdentity identify(const Corpus& corpus) {
  const std::int64_t num_tokens = corpus.num_tokens();
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, &num_tokens, sizeof(num_tokens));
  std::vector<std::int64_t> buffer(
      static_cast<std::size_t>(std::min(num_tokens, kBlockTokens)));
  // Evenly from the first tokens to the last; of a small split all of them.
  const std::int64_t num_blocks =
      std::min(kNumBlocks, ceil_div(num_tokens, kBlockTokens));
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const std::int64_t size = std::min(kBlockTokens, num_tokens);
    const std::int64_t last = num_tokens - size;
    const std::int64_t begin =
        num_tokens <= kNumBlocks * kBlockTokens
            ? std::min(i * kBlockTokens, last)
            : last / (kNumBlocks - 1) * i +
                  (last % (kNumBlocks - 1)) * i / (kNumBlocks - 1);
    const auto block = std::span(buffer).first(static_cast<std::size_t>(size));
    corpus.read(begin, block);
    XXH3_64bits_update(&state, block.data(), block.size_bytes());
  }
  return {
      .sample = fmt::format("{:016x}", XXH3_64bits_digest(&state)),
      .all = corpus.has_mask() ? corpus.content_hash() + corpus.mask_hash()
                               : corpus.content_hash()};
}

}  // namespace flatshard::data
