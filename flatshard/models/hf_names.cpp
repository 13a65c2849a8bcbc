#include "flatshard/models/hf_names.h"

namespace flatshard::models {
namespace {

constexpr std::string_view kOurs = "lm_head.norm.weight";
constexpr std::string_view kTheirs = "model.norm.weight";

}  // namespace

std::string to_hf_name(std::string_view name) {
  return std::string(name == kOurs ? kTheirs : name);
}

std::string from_hf_name(std::string_view name) {
  return std::string(name == kTheirs ? kOurs : name);
}

}  // namespace flatshard::models
