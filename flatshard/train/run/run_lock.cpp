#include "flatshard/train/run/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/core/process.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;
using LockClock = std::chrono::steady_clock;

constexpr const char* kLockName = "run.lock";
constexpr int kTouchesToWaitFor = 4;
constexpr auto kPollEvery = std::chrono::milliseconds(50);

// The lock of this process, for an end without destructors.
std::mutex held_mutex;
fs::path held_path;
int held_fd = -1;

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Returns the start time of the process; empty if there is none.
std::string start_ticks(std::int64_t process) {
  const ProcessStat stat = process_stat(process);
  return stat.state == 0 ? "" : std::to_string(stat.start_ticks);
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

struct Holder {
  std::string host;
  std::int64_t process = 0;
  std::string started;
  std::string boot;
  std::string ticks;

  std::string to_string() const {
    return fmt::format(
        "process {} on {}, started at {}",
        process,
        host,
        started);
  }
};

Holder this_process() {
  return {
      .host = host_name(),
      .process = ::getpid(),
      .started = utc_now(),
      .boot = boot_id(),
      .ticks = start_ticks(::getpid())};
}

std::string to_json(const Holder& holder) {
  return nlohmann::ordered_json{
             {"host", holder.host},
             {"process", holder.process},
             {"started", holder.started},
             {"boot", holder.boot},
             {"start_ticks", holder.ticks}}
             .dump() +
         "\n";
}

std::optional<Holder> read_holder(const fs::path& path) {
  const auto parsed = nlohmann::json::parse(read_text(path), nullptr, false);
  if (!parsed.is_object()) {
    return std::nullopt;  // not yet written, or written by another program
  }
  const auto text = [&](const char* key) {
    return parsed.contains(key) && parsed[key].is_string()
               ? parsed[key].get<std::string>()
               : std::string();
  };
  Holder holder{
      .host = text("host"),
      .started = text("started"),
      .boot = text("boot"),
      .ticks = text("start_ticks")};
  if (parsed.contains("process") && parsed["process"].is_number_integer()) {
    holder.process = parsed["process"].get<std::int64_t>();
  }
  return holder;
}

/// Returns whether the file system belongs to one host, so that the kernel of
/// this host has every process with a lock.
bool is_local(int fd) {
  constexpr std::array<std::uint32_t, 9> kLocal = {
      0xEF53,      // ext2 to ext4
      0x58465342,  // xfs
      0x9123683E,  // btrfs
      0x01021994,  // tmpfs
      0x794C7630,  // overlayfs
      0x2FC12FC1,  // zfs
      0xF2F52010,  // f2fs
      0x858458F6,  // ramfs
      0xCA451A4E,  // bcachefs
  };
  struct statfs info {};
  return ::fstatfs(fd, &info) == 0 &&
         std::find(
             kLocal.begin(),
             kLocal.end(),
             static_cast<std::uint32_t>(info.f_type)) != kLocal.end();
}

/// Reopens the file each time, so that a network file system is queried.
std::pair<std::int64_t, std::int64_t> last_touch(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info {};
  if (fd >= 0) {
    ::fstat(fd, &info);
    ::close(fd);
  }
  return {info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
}

bool is_touched(const fs::path& path, std::chrono::milliseconds every) {
  const auto before = last_touch(path);
  const auto deadline = LockClock::now() + kTouchesToWaitFor * every;
  while (LockClock::now() < deadline) {
    std::this_thread::sleep_for(std::min<std::chrono::milliseconds>(
        every / 4 + std::chrono::milliseconds(1),
        std::chrono::seconds(1)));
    if (last_touch(path) != before) {
      return true;
    }
  }
  return false;
}

bool same_file(int fd, const fs::path& path) {
  struct stat open_one {};
  struct stat named {};
  return ::fstat(fd, &open_one) == 0 && ::stat(path.c_str(), &named) == 0 &&
         open_one.st_dev == named.st_dev && open_one.st_ino == named.st_ino;
}

/// The file may belong to another run if this run's file was deleted by hand.
void remove_own_file(int fd, const fs::path& path) {
  if (same_file(fd, path)) {
    ::unlink(path.c_str());
  }
}

/// Returns whether the process that the file names still runs, if the lock
/// cannot show it.
bool lives(
    const Holder& holder,
    const fs::path& path,
    std::chrono::milliseconds touch_every,
    bool has_lock) {
  const Holder own = this_process();
  if (holder.host == own.host && holder.boot == own.boot) {
    return !has_lock && !holder.ticks.empty() &&
           start_ticks(holder.process) == holder.ticks;
  }
  log_info(
      "{} names {}: waiting up to {:g} s for a sign of it",
      path.string(),
      holder.to_string(),
      std::chrono::duration<double>(kTouchesToWaitFor * touch_every).count());
  return is_touched(path, touch_every);
}

bool write_whole(int fd, const std::string& text) {
  return ::ftruncate(fd, 0) == 0 && ::pwrite(fd, text.data(), text.size(), 0) ==
                                        static_cast<ssize_t>(text.size());
}

}  // namespace

RunLock::RunLock(const fs::path& folder, const Options& options)
    : path_(folder / kLockName) {
  std::error_code error;
  made_folder_ = fs::create_directories(folder, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot make {}: {}",
      folder.string(),
      error.message());
  const auto deadline = LockClock::now() + options.patience;
  std::string holder;
  bool said = false;
  while (!try_take(options, holder)) {
    FLATSHARD_CHECK(
        LockClock::now() < deadline,
        usage,
        "another run writes to {}: {}; wait for its end, end it, or choose "
        "another run.output_dir",
        folder.string(),
        holder);
    if (!std::exchange(said, true)) {
      log_info("waiting for the end of {}", holder);
    }
    std::this_thread::sleep_for(kPollEvery);
  }
  {
    const std::lock_guard lock(held_mutex);
    held_path = path_;
    held_fd = fd_;
  }
  toucher_ = std::thread([this, every = options.touch_every] { touch(every); });
}

RunLock::~RunLock() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  ended_.notify_all();
  toucher_.join();
  {
    const std::lock_guard lock(held_mutex);
    remove_own_file(fd_, path_);
    if (held_fd == fd_) {
      held_fd = -1;
    }
  }
  ::close(fd_);
  if (made_folder_) {
    ::rmdir(path_.parent_path().c_str());  // only when it is empty
  }
}

void RunLock::remove_file_at_exit() noexcept {
  const std::lock_guard lock(held_mutex);
  if (held_fd >= 0) {
    remove_own_file(std::exchange(held_fd, -1), held_path);
  }
}

bool RunLock::try_take(const Options& options, std::string& holder) {
  const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  FLATSHARD_CHECK(
      fd >= 0,
      io,
      "cannot write {}: {}",
      path_.string(),
      std::strerror(errno));
  fd_ = fd;
  const auto give_up = [&](const std::string& by) {
    ::close(fd);
    fd_ = -1;
    holder = by;
    return false;
  };
  const bool has_lock = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
  const bool refused = !has_lock && errno == EWOULDBLOCK;
  const auto named = read_holder(path_);
  if (refused) {
    return give_up(named ? named->to_string() : "a process that is starting");
  }
  if (has_lock && !same_file(fd, path_)) {
    return give_up("a run that ended just now");  // and removed the file
  }
  const bool trusted = has_lock && options.trust_locks && is_local(fd);
  if (named && !trusted &&
      lives(*named, path_, options.touch_every, has_lock)) {
    return give_up(named->to_string());
  }
  const std::string text = to_json(this_process());
  if (!write_whole(fd, text)) {
    const int error = errno;
    ::close(fd);
    FLATSHARD_THROW(
        io,
        "cannot write {}: {}",
        path_.string(),
        std::strerror(error));
  }
  if (!has_lock) {
    // Two processes may arrive at once: the text of the last one stays.
    std::this_thread::sleep_for(kPollEvery);
    if (read_text(path_) != text) {
      return give_up(read_holder(path_).value_or(Holder{}).to_string());
    }
  }
  return true;
}

void RunLock::touch(std::chrono::milliseconds every) {
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, every, [this] { return ending_; })) {
    ::futimens(fd_, nullptr);
  }
}

}  // namespace flatshard
