#pragma once

#include "flatshard/train/config/key.h"

namespace flatshard::config {

struct Run {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/run.def"
};

template <>
inline constexpr Word<data::Packing> kWords<data::Packing>[] = {
    {"stream", data::Packing::stream},
    {"documents", data::Packing::documents}};

struct Data {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/data.def"
};

enum class OnNonfinite { stop, skip, rewind };
template <>
inline constexpr Word<OnNonfinite> kWords<OnNonfinite>[] = {
    {"stop", OnNonfinite::stop},
    {"skip", OnNonfinite::skip},
    {"rewind", OnNonfinite::rewind}};

struct Training {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/training.def"
};

struct Validation {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/validation.def"
};

struct Checkpoint {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/checkpoint.def"
};

struct Weights {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/weights.def"
};

struct Metrics {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/metrics.def"
};

/// [run], [data], [training], [validation], [checkpoint], [weights] and
/// [metrics].
KeyTable training_keys();

}  // namespace flatshard::config
