// LD_PRELOAD=this: positioned writes into a checkpoint's folder do not return
// before the file SLOW_DISK_UNTIL exists, as on a disk that hangs.
#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

namespace {

bool in_checkpoint(int fd) {
  std::array<char, 4096> path{};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t n = ::readlink(link.c_str(), path.data(), path.size());
  return n > 0 && std::string_view(path.data(), static_cast<std::size_t>(n))
                          .find("/step-") != std::string_view::npos;
}

ssize_t slow_write(
    const char* name,
    int fd,
    const void* data,
    std::size_t nbytes,
    off_t offset) {
  const char* until = std::getenv("SLOW_DISK_UNTIL");
  if (until != nullptr && in_checkpoint(fd)) {
    while (::access(until, F_OK) != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  using Write = ssize_t (*)(int, const void*, std::size_t, off_t);
  return reinterpret_cast<Write>(
      ::dlsym(RTLD_NEXT, name))(fd, data, nbytes, offset);
}

}  // namespace

extern "C" ssize_t
pwrite(int fd, const void* data, std::size_t nbytes, off_t offset) {
  return slow_write("pwrite", fd, data, nbytes, offset);
}

// The name with 64-bit file offsets.
extern "C" ssize_t
pwrite64(int fd, const void* data, std::size_t nbytes, off_t offset) {
  return slow_write("pwrite64", fd, data, nbytes, offset);
}
