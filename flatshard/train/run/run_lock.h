#pragma once

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>

namespace flatshard {

/// Limits a folder to one run at a time by `<folder>/run.lock`. The file names
/// host, process and start time of the run that owns the lock.
///
/// If possible, the kernel tracks the owner (flock; NFS passes it to its
/// server): a process that died in any way has no lock. On a file system whose
/// locks other hosts may not see, the owner touches the file. A process that
/// finds another host's name in it waits for the next touch. Without one, that
/// process is gone.
class RunLock {
 public:
  struct Options {
    /// Maximum wait for a run that is about to end: a restart may come before
    /// the last process of its predecessor has exited.
    std::chrono::milliseconds patience{0};
    /// Interval at which the owner touches the file. Others wait for four.
    std::chrono::milliseconds touch_every{5000};
    /// False: as on a file system whose locks work on one host only.
    bool trust_locks = true;
  };

  /// Acquires the lock and creates the folder if it does not exist.
  /// @throws Error{usage} naming host, process and start time of the run that
  /// owns the lock; Error{io} if the folder or the file cannot be created.
  RunLock(const std::filesystem::path& folder, const Options& options);
  explicit RunLock(const std::filesystem::path& folder)
      : RunLock(folder, Options()) {}
  /// Gives it back: removes the file, and the folder if it made that and
  /// nothing else is in it.
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// Removes the lock file if this process owns it, for a process that ends
  /// without destructors. From any thread.
  static void remove_file_at_exit() noexcept;

  const std::filesystem::path& path() const { return path_; }

 private:
  bool try_take(const Options& options, std::string& holder);
  void touch(std::chrono::milliseconds every);

  std::filesystem::path path_;
  bool made_folder_ = false;
  int fd_ = -1;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool ending_ = false;
  std::thread toucher_;
};

}  // namespace flatshard
