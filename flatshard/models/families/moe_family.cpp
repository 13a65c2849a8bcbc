#include "flatshard/models/families/family.h"

// Experts with any router, on blocks of a Llama.
namespace flatshard::models {

const Family& moe_family() {
  static const Family family{
      .name = "moe",
      .defaults = {.family = "moe"},
      .free_keys =
          {"attention_bias",
           "qk_norm",
           "sliding_window",
           "sliding_window_pattern"},
      .has_experts = true};
  return family;
}

}  // namespace flatshard::models
