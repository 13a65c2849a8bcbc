#include "flatshard/core/home_folder.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

namespace flatshard {
namespace {

constexpr std::size_t kEntryBytes = 1 << 16;

/// @param name  empty: this process' user.
std::string home_of(const std::string& name) {
  const char* home = std::getenv("HOME");
  if (name.empty() && home != nullptr && *home != '\0') {
    return home;
  }
  std::vector<char> buffer(kEntryBytes);
  passwd entry{};
  passwd* found = nullptr;
  if (name.empty()) {
    ::getpwuid_r(::getuid(), &entry, buffer.data(), buffer.size(), &found);
  } else {
    ::getpwnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  }
  return found == nullptr ? std::string() : found->pw_dir;
}

}  // namespace

std::string expand_home(std::string_view path) {
  if (!path.starts_with('~')) {
    return std::string(path);
  }
  const std::size_t end = std::min(path.find('/'), path.size());
  const std::string home = home_of(std::string(path.substr(1, end - 1)));
  return home.empty() ? std::string(path)
                      : home + std::string(path.substr(end));
}

}  // namespace flatshard
