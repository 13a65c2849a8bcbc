#pragma once

#include "flatshard/train/config/key.h"

namespace flatshard::config {

struct Profiling {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/profiling.def"
};

struct Diagnostics {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/diagnostics.def"
};

struct Debug {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/debug.def"
};

/// [profiling], [diagnostics] and [debug].
KeyTable diagnostics_keys();

}  // namespace flatshard::config
