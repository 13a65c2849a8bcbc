// LD_PRELOAD=this: each positioned write into a checkpoint's folder takes
// SLOW_DISK_MS milliseconds longer, as on a disk that others use as well.
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
  const char* ms = std::getenv("SLOW_DISK_MS");
  if (ms != nullptr && in_checkpoint(fd)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(ms)));
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

// What 64-bit file offsets make of the name.
extern "C" ssize_t
pwrite64(int fd, const void* data, std::size_t nbytes, off_t offset) {
  return slow_write("pwrite64", fd, data, nbytes, offset);
}
