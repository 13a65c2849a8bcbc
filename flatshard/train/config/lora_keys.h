#pragma once

#include "flatshard/models/lora_config.h"
#include "flatshard/train/config/key.h"

namespace flatshard::config {

template <>
inline constexpr Word<models::LoraInit> kWords<models::LoraInit>[] = {
    {"kaiming_uniform", models::LoraInit::kaiming_uniform},
    {"gaussian", models::LoraInit::gaussian}};

struct Lora {
  std::int64_t rank = 0;
  double alpha = 16.0;
  double dropout = 0.0;
  std::string targets{models::kAllLinear};
  std::string exclude;
  models::LoraInit init = models::LoraInit::kaiming_uniform;
  bool rslora = false;
  std::string init_from_adapter;

  bool enabled() const { return rank > 0; }
};

/// [lora].
KeyTable lora_keys();

}  // namespace flatshard::config
