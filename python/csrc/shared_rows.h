#pragma once

#include "flatshard/ops/matmul_rows.h"

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace flatshard::python {

/// The inputs that linear layers with FP8 weights read last, in forwards and in
/// backwards: layers that are called with the same tensor one after the other
/// (q, k and v; gate and up) quantize it once.
///
/// The same is the same tensor with the same memory on the same stream, not
/// written since according to its version. Its derived tensors are kept until
/// the next input comes, or `forget`.
class SharedRows {
 public:
  using Rows = std::shared_ptr<const nn::MatmulRows>;

  /// @param x  [..., n]
  Rows of(const at::Tensor& x, bool in_backward);
  /// Forgets the inputs of forwards, or all.
  void forget(bool backwards_too);
  /// Returns the number of inputs, and the number of calls that found their
  /// input quantized.
  std::pair<std::int64_t, std::int64_t> counts() const;

 private:
  struct Slot {
    /// No other tensor has its address as long as this exists.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> input{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    const void* data = nullptr;
    std::int64_t version = 0;
    std::optional<c10::Stream> stream;
    Rows rows;
  };

  mutable std::mutex mutex_;
  Slot slots_[2];
  std::int64_t num_made_ = 0;
  std::int64_t num_found_ = 0;
};

}  // namespace flatshard::python
