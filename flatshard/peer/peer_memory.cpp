#include "flatshard/peer/peer_memory.h"

#include <ATen/Functions.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>

#include "flatshard/comm/all_gather_values.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/core/process.h"
#include "flatshard/peer/peer_backend.h"

namespace flatshard {
namespace {

// Describes a rank's pages to other ranks. They receive its bytes.
struct PageHandle {
  std::int64_t host = 0;           ///< of the running kernel
  std::int64_t pid_namespace = 0;  ///< in which `pid` counts
  std::int64_t pid = 0;
  std::int64_t fd = -1;  ///< of that process; -1: it has no memory to give
};

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

// Pages without a name. They are freed with the last process that has them;
// peers open them through /proc.
class SharedPages : public PeerMemory {
 public:
  SharedPages(Communicator& group, std::int64_t nbytes)
      : PeerMemory(group), nbytes_(std::max<std::int64_t>(nbytes, 1)) {
    const Descriptor own(::memfd_create("flatshard", MFD_CLOEXEC));
    const bool made = own.fd >= 0 && ::ftruncate(own.fd, nbytes_) == 0;
    const PageHandle mine{
        .host = host_identity(),
        .pid_namespace = pid_namespace(),
        .pid = ::getpid(),
        .fd = made ? own.fd : -1};
    const auto handles = all_gather_values(group, mine);
    for (int rank = 0; rank < size(); ++rank) {
      const PageHandle& theirs = handles[rank];
      check_one_host(
          theirs.host == mine.host &&
              theirs.pid_namespace == mine.pid_namespace,
          rank);
      FLATSHARD_CHECK(
          theirs.fd >= 0,
          memory,
          "rank {} of '{}' cannot get {} bytes of memory to share",
          rank,
          group.name(),
          nbytes_);
    }
    std::string failure;
    for (int rank = 0; rank < size() && failure.empty(); ++rank) {
      failure = map(handles[rank], nbytes, rank);
    }
    agree_on_success(group, failure);
  }

 private:
  // Returns the error, or an empty text.
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

// A group of one rank shares its memory with no other rank.
class OwnMemory : public PeerMemory {
 public:
  OwnMemory(Communicator& group, std::int64_t nbytes) : PeerMemory(group) {
    memory_.push_back(at::zeros(
        {nbytes},
        at::TensorOptions().dtype(at::kByte).device(group.device())));
  }
};

}  // namespace

std::unique_ptr<PeerMemory> detail::make_shared_pages(
    Communicator& group,
    std::int64_t nbytes) {
  return std::make_unique<SharedPages>(group, nbytes);
}

std::int64_t host_identity() {
  return static_cast<std::int64_t>(std::hash<std::string>{}(boot_id()));
}

void PeerMemory::check_one_host(bool same, int rank) const {
  FLATSHARD_CHECK(
      same,
      config,
      "memory that ranks share: expected all ranks on one host, but rank {} "
      "of the group is not where rank {} is; use collectives instead "
      "(copy engines: none)",
      rank,
      rank_);
}

void PeerMemory::agree_on_success(
    Communicator& group,
    const std::string& failure) {
  const at::Tensor num_failed = at::full(
      {1},
      failure.empty() ? 0 : 1,
      at::TensorOptions().device(group.device()));
  group.all_reduce(num_failed, ReduceOp::sum);
  FLATSHARD_CHECK(
      failure.empty(),
      config,
      "{}; use collectives instead (copy engines: none)",
      failure);
  FLATSHARD_CHECK(
      num_failed.item<int>() == 0,
      config,
      "another rank of '{}' cannot map the memory that its peers share; use "
      "collectives instead (copy engines: none)",
      group.name());
}

bool PeerMemory::has_fast_links(Communicator& group) {
  if (!group.device().is_cuda() || group.size() == 1 ||
      !detail::cuda_peers_are_linked(group)) {
    return false;
  }
  try {
    create(group, 1);
  } catch (const Error& error) {
    log_warning(
        "NVLink joins the GPUs, but they cannot share memory: {}",
        error.what());
    return false;
  }
  return true;
}

std::unique_ptr<PeerMemory> PeerMemory::create(
    Communicator& group,
    std::int64_t nbytes) {
  if (group.size() == 1) {
    return std::make_unique<OwnMemory>(group, nbytes);
  }
  if (group.device().is_cuda()) {
    return detail::make_cuda_peer_memory(group, nbytes);
  }
  return detail::make_shared_pages(group, nbytes);
}

}  // namespace flatshard
