#pragma once

#include "flatshard/train/config/run_config.h"

#include <string>
#include <vector>

namespace flatshard::testing {

/// Keys of a config: "section.key=value".
using Settings = std::vector<std::string>;

/// Returns the config of a small run: its file has these keys and `own`, and
/// `overrides` come from a command line.
inline Config small_config(
    const Settings& own,
    const Settings& overrides = {}) {
  const Config file = parse_config(
      R"(
[run]
seed = 3
[model]
dim = 32
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 48
vocab_size = 61
[data]
train = "random"
[training]
seq_len = 16
[precision]
compute = "float32"
[metrics]
log_freq = 1
)",
      "small.toml",
      own);
  return parse_config(to_toml(file), "test.toml", overrides);
}

}  // namespace flatshard::testing
