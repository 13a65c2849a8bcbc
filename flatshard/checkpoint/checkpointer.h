#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "flatshard/checkpoint/rank_messages.h"
#include "flatshard/checkpoint/shard_image.h"
#include "flatshard/device/stream.h"
#include "flatshard/mesh/mesh.h"

namespace flatshard {

struct CheckpointOptions {
  std::filesystem::path folder;  ///< contains step-N, one folder each
  std::int64_t keep_latest = 0;  ///< older ones are removed; 0: keep all
  std::uint64_t max_file_nbytes = std::uint64_t{4} << 30;
  /// Timeout for ranks to wait for one another after all have written.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Tensors of the model in addition to its groups. The tensors must stay.
  std::vector<WholeTensor> whole_tensors;
};

/// The result of one save.
struct SaveResult {
  std::int64_t step = 0;
  std::optional<Error> error;
  double seconds = 0;  ///< from `save` until the checkpoint was complete
  std::vector<std::int64_t> removed;  ///< older steps; on rank 0
};

/// Writes checkpoints of a sharded model during its training.
///
/// `save` queues copies of this rank's weights and optimizer state into one of
/// two host buffers and returns. A thread writes the buffer. When every rank
/// has written, rank 0 writes the manifest and gives the folder its name. The
/// copies run on a separate stream in parallel with the next forward and
/// backward. Only the next update of the weights waits for them. Weights and
/// states in host memory are copied by a thread.
///
/// A save that fails on one rank fails on all, and leaves earlier checkpoints
/// as they are.
class Checkpointer {
 public:
  /// Collective; makes the folder and removes what an earlier process left
  /// half written. The two buffers are made here, `staging_nbytes` in all.
  ///
  /// @param groups     of the runtime, in its order; frozen ones as well.
  /// @param optimizer  null: weights only. Both must outlive this.
  /// @throws Error{usage} for a mesh without a store, Error{io}, Error{memory}.
  Checkpointer(
      std::shared_ptr<Mesh> mesh,
      std::vector<ParamGroup*> groups,
      const Optimizer* optimizer,
      CheckpointOptions options);
  /// Waits for all pending saves. Their errors are logged.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Starts to save what the current stream has computed so far. Blocks only
  /// while both buffers are being written. Collective, and in the same order on
  /// all ranks.
  ///
  /// @param state  stored with the tensors; rank 0's counts.
  void save(std::int64_t step, std::map<std::string, std::string> state);

  /// Makes later work of the current stream wait for the copies. Call it
  /// before weights or optimizer state change. On a GPU it blocks the host only
  /// for those in host memory.
  void wait_for_copies();

  /// Blocks until every pending save has finished.
  void wait();

  /// Returns the results that came since the last call, oldest first.
  std::vector<SaveResult> take_results();

  std::int64_t staging_nbytes() const { return 2 * image_.nbytes(); }

 private:
  using Clock = std::chrono::steady_clock;

  struct Job {
    std::int64_t step = 0;
    std::int64_t sequence = 0;
    std::size_t buffer = 0;
    std::map<std::string, std::string> state;
    std::map<std::string, std::int64_t> updates;
    Event copied;
    Event copied_on_host;
    Clock::time_point begin;
  };

  void run();
  SaveResult carry_out(const Job& job);
  std::string write_files(const Job& job);
  void commit(const Job& job, SaveResult& result);
  /// Waits for the parts of all ranks and publishes the checkpoint. On rank 0.
  void complete(
      const Job& job,
      const std::filesystem::path& folder,
      SaveResult& result);
  std::string key(const Job& job, const std::string& what) const;
  std::map<std::string, std::int64_t> updates() const;

  const std::shared_ptr<Mesh> mesh_;
  const std::vector<ParamGroup*> groups_;
  const Optimizer* const optimizer_;
  const CheckpointOptions options_;
  const ShardImage image_;
  std::unique_ptr<RankMessages> messages_;
  std::string id_;
  std::shared_ptr<Stream> stream_;
  std::shared_ptr<Stream> host_stream_;  ///< without a GPU stream_
  std::array<at::Tensor, 2> buffers_;
  Event copied_;
  Event copied_on_host_;
  std::int64_t num_saves_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;  ///< the first one is being written
  std::vector<SaveResult> results_;
  bool closing_ = false;
  std::thread writer_;
};

}  // namespace flatshard
