#include "flatshard/train/config/split_list.h"

#include <utility>

namespace flatshard {

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> items;
  std::string item;
  const auto flush = [&] {
    if (!item.empty()) {
      items.push_back(std::exchange(item, {}));
    }
  };
  for (const char c : text) {
    if (c == ',' || c == ' ') {
      flush();
    } else {
      item += c;
    }
  }
  flush();
  return items;
}

}  // namespace flatshard
