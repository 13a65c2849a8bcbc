#include "flatshard/comm/peer_memory.h"

#include <ATen/Functions.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>

#include "flatshard/comm/backend.h"
#include "flatshard/core/error.h"

namespace flatshard {
namespace {

// What a rank says of its pages; sent as it is.
struct PageHandle {
  std::int64_t host = 0;           ///< of the running kernel
  std::int64_t pid_namespace = 0;  ///< in which `pid` counts
  std::int64_t pid = 0;
  std::int64_t fd = -1;  ///< of that process; -1: it has no memory to give
};
constexpr std::int64_t kHandleNumel = sizeof(PageHandle) / sizeof(std::int64_t);

std::int64_t running_kernel() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return static_cast<std::int64_t>(std::hash<std::string>{}(id));
}

std::int64_t pid_namespace() {
  struct stat status {};
  return ::stat("/proc/self/ns/pid", &status) == 0
             ? static_cast<std::int64_t>(status.st_ino)
             : 0;
}

struct Descriptor {
  explicit Descriptor(int number) : fd(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) {
      ::close(fd);
    }
  }
  const int fd;
};

// Pages without a name, which go with the last process that has them; peers
// open them through /proc.
class SharedPages : public PeerMemory {
 public:
  SharedPages(Communicator& group, std::int64_t nbytes)
      : PeerMemory(group), nbytes_(std::max<std::int64_t>(nbytes, 1)) {
    const Descriptor own(::memfd_create("flatshard", MFD_CLOEXEC));
    const bool made = own.fd >= 0 && ::ftruncate(own.fd, nbytes_) == 0;
    const std::vector<PageHandle> handles = exchange(
        group,
        {running_kernel(), pid_namespace(), ::getpid(), made ? own.fd : -1});
    for (int rank = 0; rank < size(); ++rank) {
      check(handles[rank], handles[this->rank()], rank);
    }
    std::string failure;
    for (int rank = 0; rank < size() && failure.empty(); ++rank) {
      failure = map(handles[rank], nbytes, rank);
    }
    // Also: nobody closes before all have opened.
    const at::Tensor num_failed = at::full({1}, failure.empty() ? 0 : 1);
    group.all_reduce(num_failed, ReduceOp::sum);
    FLATSHARD_CHECK(failure.empty(), memory, "{}", failure);
    FLATSHARD_CHECK(
        num_failed.item<int>() == 0,
        memory,
        "another rank of '{}' could not map what its peers share",
        group.name());
  }

 private:
  static std::vector<PageHandle> exchange(
      Communicator& group,
      const PageHandle& mine) {
    const at::Tensor in = at::empty({kHandleNumel}, at::kLong);
    std::memcpy(in.mutable_data_ptr(), &mine, sizeof(mine));
    const at::Tensor all = at::empty({group.size() * kHandleNumel}, at::kLong);
    group.all_gather(all, in);
    std::vector<PageHandle> handles(static_cast<std::size_t>(group.size()));
    std::memcpy(handles.data(), all.const_data_ptr(), all.nbytes());
    return handles;
  }

  // Where two ranks differ, every rank finds one that differs from it.
  void check(const PageHandle& other, const PageHandle& mine, int rank) const {
    FLATSHARD_CHECK(
        other.host == mine.host && other.pid_namespace == mine.pid_namespace,
        config,
        "memory that ranks share: expected all ranks on one host, but rank {} "
        "of the group is not where rank {} is; use collectives instead "
        "(copy_gathers = none, copy_reductions = false)",
        rank,
        this->rank());
    FLATSHARD_CHECK(
        other.fd >= 0,
        memory,
        "rank {} of the group cannot get {} bytes of memory to share",
        rank,
        nbytes_);
  }

  // What went wrong, or nothing.
  std::string map(const PageHandle& handle, std::int64_t nbytes, int rank) {
    const std::string path =
        fmt::format("/proc/{}/fd/{}", handle.pid, handle.fd);
    const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    void* const begin = file.fd < 0 ? MAP_FAILED
                                    : ::mmap(
                                          nullptr,
                                          static_cast<std::size_t>(nbytes_),
                                          PROT_READ | PROT_WRITE,
                                          MAP_SHARED,
                                          file.fd,
                                          0);
    if (begin == MAP_FAILED) {
      return fmt::format(
          "cannot map {} bytes that rank {} shares ({}): {}",
          nbytes_,
          rank,
          path,
          std::strerror(errno));
    }
    memory_.push_back(at::from_blob(
        begin,
        {nbytes},
        [size = static_cast<std::size_t>(nbytes_)](void* memory) {
          ::munmap(memory, size);
        },
        at::TensorOptions().dtype(at::kByte)));
    return {};
  }

  std::int64_t nbytes_;
};

// A group of one rank has nobody to share with.
class OwnMemory : public PeerMemory {
 public:
  OwnMemory(Communicator& group, std::int64_t nbytes) : PeerMemory(group) {
    memory_.push_back(at::zeros(
        {nbytes},
        at::TensorOptions().dtype(at::kByte).device(group.device())));
  }
};

}  // namespace

std::unique_ptr<PeerMemory> PeerMemory::create(
    Communicator& group,
    const StoreHandle& store,
    std::int64_t nbytes) {
  if (group.size() == 1) {
    return std::make_unique<OwnMemory>(group, nbytes);
  }
  if (group.device().is_cuda()) {
    return detail::make_cuda_peer_memory(group, store, nbytes);
  }
  return std::make_unique<SharedPages>(group, nbytes);
}

}  // namespace flatshard
