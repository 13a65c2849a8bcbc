#pragma once

namespace flatshard::models {

/// RMSNorm of queries and keys, before their rotation.
enum class QkNorm {
  none,
  head,  ///< of each head by itself
};

/// What sets attention of one family apart from another's. A leaf value.
struct AttentionOptions {
  QkNorm qk_norm = QkNorm::none;

  friend bool operator==(const AttentionOptions&, const AttentionOptions&) =
      default;
};

/// What sets the blocks of one family apart from another's. A leaf value.
struct BlockOptions {
  AttentionOptions attention;

  friend bool operator==(const BlockOptions&, const BlockOptions&) = default;
};

}  // namespace flatshard::models
