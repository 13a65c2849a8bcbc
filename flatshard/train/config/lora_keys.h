#pragma once

#include "flatshard/models/lora_config.h"
#include "flatshard/train/config/key.h"

namespace flatshard::config {

template <>
inline constexpr Word<models::LoraInit> kWords<models::LoraInit>[] = {
    {"kaiming_uniform", models::LoraInit::kaiming_uniform},
    {"gaussian", models::LoraInit::gaussian}};

struct Lora {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/lora.def"

  bool enabled() const {
    return rank > 0;
  }
};

/// [lora].
KeyTable lora_keys();

}  // namespace flatshard::config
