#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace flatshard {

/// Adjacent tokens.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
  bool operator==(const TokenRange&) const = default;
};

/// The part that a rank has of the tokens of a group of ranks: the flattened
/// [batch, seq].
///
/// Ranks of one host have equal runs of them, in rank order. Over several hosts
/// the tokens are 2 * hosts equal chunks: host h has chunk h and chunk 2 *
/// hosts - 1 - h (head and tail), so that causal attention is equal work for
/// all. Its ranks have equal runs of these two.
struct TokenPart {
  std::int64_t rank = 0;
  std::int64_t ranks = 1;  ///< of a host
  std::int64_t host = 0;
  std::int64_t hosts = 1;

  std::int64_t num_parts() const { return ranks * hosts; }

  /// Returns the chunks of a host, of `num_tokens`: one, or head and tail.
  std::vector<TokenRange> of_host(std::int64_t num_tokens) const {
    if (hosts == 1) {
      return {{0, num_tokens}};
    }
    const std::int64_t chunk = num_tokens / (2 * hosts);
    const auto nth = [&](std::int64_t i) {
      return TokenRange{i * chunk, (i + 1) * chunk};
    };
    return {nth(host), nth(2 * hosts - 1 - host)};
  }

  /// Returns this rank's tokens of `num_tokens`, in the order that it has them.
  std::vector<TokenRange> of(std::int64_t num_tokens) const {
    const std::int64_t each = num_tokens / num_parts();
    std::vector<TokenRange> own;
    std::int64_t first = 0;  // of the chunk, among the host's tokens
    for (const TokenRange& chunk : of_host(num_tokens)) {
      const std::int64_t begin = std::max(rank * each - first, std::int64_t{0});
      const std::int64_t end =
          std::min((rank + 1) * each - first, chunk.size());
      if (begin < end) {
        own.push_back({chunk.begin + begin, chunk.begin + end});
      }
      first += chunk.size();
    }
    return own;
  }

  /// Returns the same elements of `all`.
  template <class T>
  std::vector<std::span<T>> of(std::span<T> all) const {
    std::vector<std::span<T>> own;
    for (const TokenRange& range : of(std::ssize(all))) {
      own.push_back(all.subspan(
          static_cast<std::size_t>(range.begin),
          static_cast<std::size_t>(range.size())));
    }
    return own;
  }
};

}  // namespace flatshard
