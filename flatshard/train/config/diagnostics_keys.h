#pragma once

#include "flatshard/train/config/key.h"

namespace flatshard::config {

struct Profiling {
  bool enabled = false;
  std::int64_t step = 5;
  std::string folder = "profile";
};

struct Diagnostics {
  std::int64_t norms_freq = 0;
  bool nan_check = false;
  bool overlap_check = false;
  bool poison = false;
  bool strict = false;
};

struct Debug {
  std::int64_t comm_delay_us = 0;
  std::int64_t comm_delay_seed = 0;
  bool deterministic = false;
  std::int64_t spoil_gradient_step = 0;
  bool emulate_graphs = false;
  bool force_balance = false;
};

/// [profiling], [diagnostics] and [debug].
KeyTable diagnostics_keys();

}  // namespace flatshard::config
