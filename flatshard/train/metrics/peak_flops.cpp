#include "flatshard/train/metrics/peak_flops.h"

#include <algorithm>
#include <sstream>
#include <vector>

namespace flatshard {

std::optional<double> dense_bf16_flops(const std::string& device_name) {
  // Words of the name: "A100-SXM4-80GB" has A100 in it, "H20-3e" has H20.
  std::string spaced = device_name;
  std::replace(spaced.begin(), spaced.end(), '-', ' ');
  std::istringstream in(spaced);
  std::vector<std::string> words;
  for (std::string word; in >> word;) {
    words.push_back(word);
  }
  const auto has = [&](const char* word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  if (has("MIG")) {
    return std::nullopt;
  }
  if (has("A100")) {
    return 312e12;
  }
  if (has("H100")) {
    return has("PCIe") ? 756e12 : has("NVL") ? 835e12 : 989e12;
  }
  if (has("H200")) {
    return has("NVL") ? 835e12 : 989e12;
  }
  if (has("H20")) {
    return 148e12;
  }
  if (has("L40S")) {
    return 362e12;
  }
  if (has("B200")) {
    return 2250e12;
  }
  // The D models are other chips.
  if (has("4090") && has("RTX") && !has("D") && !has("Laptop")) {
    return 165.2e12;
  }
  if (has("5090") && has("RTX") && !has("D") && !has("Laptop")) {
    return 209.5e12;
  }
  return std::nullopt;
}

}  // namespace flatshard
