#include "flatshard/train/config/lora_keys.h"

#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kHasAdapters{
    "lora.rank",
    WHEN(c.lora.enabled()),
    "runs with adapters; set lora.rank"};

const ConfigKey kLoraKeys[] = {
#define KEY(...) KEY_ROW(lora, __VA_ARGS__)
#include "flatshard/train/config/sections/lora.def"
};

}  // namespace

KeyTable lora_keys() {
  return {kLoraKeys};
}

}  // namespace flatshard::config
