#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "flatshard/data/token_source.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/nn/documents.h"

namespace flatshard {

/// The documents of some microbatches, in host memory, pinned where there is a
/// GPU, and on the device. The device's tensors keep their addresses.
class DocumentBuffers {
 public:
  struct Options {
    std::int64_t num_microbatches = 1;
    std::int64_t rows = 1;  ///< per microbatch
    std::int64_t seq_len = 0;
    std::int64_t max_documents = 0;  ///< per row, without its padding
    /// Documents have the same shapes and max_length each time, as graphs need
    /// them. Kernels are launched for more than there is then.
    bool fixed_shapes = false;
  };

  DocumentBuffers(std::shared_ptr<Mesh> mesh, const Options& options);

  /// Writes a microbatch's documents in host memory. Between the copies of the
  /// step before and `queue_copies`: see TokenBuffers::load.
  void write(std::int64_t microbatch, const data::DocumentLengths& documents);
  /// Queues the copies to the device on the current stream.
  void queue_copies();

  nn::Documents documents(std::int64_t microbatch) const;

 private:
  /// The used part of a microbatch's buffers.
  struct Used {
    std::int64_t num_documents = 0;
    std::int64_t max_length = 0;
  };

  Options options_;
  std::vector<Used> used_;
  at::Tensor offsets_host_;    ///< [microbatches, documents + 1] int32
  at::Tensor positions_host_;  ///< [microbatches, rows * seq_len] int32
  at::Tensor padding_host_;    ///< [microbatches, rows * seq_len] bool
  at::Tensor offsets_;
  at::Tensor positions_;
  at::Tensor padding_;
};

}  // namespace flatshard
