#include "flatshard/train/plan/ends_work.h"

#include "flatshard/train/plan/stages.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <span>

namespace flatshard {

using plan::Kernel;
using plan::LayerWork;
using plan::NodeWork;
using plan::Transfer;

LayerWork EndsWork::work() const {
  LayerWork layer;
  const std::int64_t rows = model_.vocab_size / sharing_;
  const double wide = d(tokens_) * d(model_.dim) * size_;
  const double vocab = d(tokens_) * d(rows) * size_;
  Stage embed{.reads = Stage::Reads::columns};
  embed.work.forward.push_back(Kernel::memory("copy", 2 * wide));
  const double table =
      d(rows) * d(model_.dim) *
      d(static_cast<std::int64_t>(c10::elementSize(options_.reduce)));
  embed.work.backward.push_back(Kernel::memory("copy", table + 3 * wide));
  if (sharing_ > 1) {
    // Rows of other ranks' tokens become 0, and the table is copied once.
    embed.work.forward.push_back(Kernel::memory("copy", 2 * wide));
    embed.work.backward.push_back(Kernel::memory("copy", 2 * table));
  }
  put_together({embed}, layer.nodes[PlanNode::embed]);
  if (frozen_) {
    layer.nodes[PlanNode::embed].backward.clear();
  }
  Stages head(2);
  norm(head[0].work, /*with_delta=*/false);
  NodeWork& loss = head[1].work;
  if (sharing_ > 1) {
    // The loss waits for a separate all-gather, and a reduction after it.
    loss.forward.push_back(Kernel::exchange(Transfer::all_gather, wide));
  }
  product(loss, {}, tokens_, rows, model_.dim);
  const std::int64_t chunk = options_.loss_chunk_tokens;
  const std::int64_t weight_nbytes =
      rows * model_.dim * static_cast<std::int64_t>(sizeof(float));
  if (sharing_ > 1) {
    // The gradient does not find the row in the cache again. Between both
    // come two numbers of each token from each rank.
    loss.forward.push_back(Kernel::memory("cross_entropy", vocab));
    loss.forward.push_back(Kernel::exchange(
        Transfer::all_gather,
        d(sharing_) * 2 * d(rows_of_floats(1))));
  }
  loss.forward.push_back(Kernel::memory("cross_entropy", 2 * vocab));
  if (chunk > 0) {
    // Forward computes the gradients, and backward scales them.
    loss.forward.insert(
        loss.forward.end(),
        loss.backward.begin(),
        loss.backward.end());
    loss.forward.insert(
        loss.forward.end(),
        loss.wgrad.begin(),
        loss.wgrad.end());
    // An all-gather before the loss has all tokens.
    for (Kernel& kernel :
         std::span(loss.forward).subspan(sharing_ > 1 ? 1 : 0)) {
      kernel = kernel.in_runs(num_chunks(tokens_, chunk));
    }
    loss.backward = {Kernel::memory("copy", 2 * wide)};
    loss.wgrad.clear();
    if (!frozen_) {
      loss.wgrad.push_back(Kernel::memory("copy", d(2 * weight_nbytes)));
    }
  }
  if (sharing_ > 1) {
    loss.wgrad.push_back(Kernel::exchange(Transfer::reduce_scatter, wide));
  }
  put_together(head, layer.nodes[PlanNode::head]);
  layer.saved_nbytes = own_bytes(model_.dim) + bytes(model_.dim) +
                       own_rows_of_floats(1) + rows_of_floats(2);
  layer.transient_nbytes = bytes(model_.dim) + own_bytes(2 * model_.dim);
  if (chunk == 0) {
    layer.saved_nbytes += bytes(rows);
  } else {
    layer.saved_nbytes += bytes(model_.dim) + (frozen_ ? 0 : weight_nbytes);
    layer.transient_nbytes += bytes(rows) / tokens_ * std::min(chunk, tokens_);
  }
  return layer;
}

}  // namespace flatshard
