#include "flatshard/train/run/evaluation.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "flatshard/comm/collective_scope.h"

namespace flatshard {

Evaluation::Evaluation(
    const Options& options,
    std::vector<ValidationSet> sets,
    const std::shared_ptr<Mesh>& mesh,
    models::Llama model)
    : freq_(options.freq),
      last_step_(options.last_step),
      local_batch_(options.local_batch_size),
      seq_len_(options.packing.seq_len),
      drops_tokens_(options.drops_tokens),
      sets_(std::move(sets)),
      mesh_(mesh->data_mesh()),
      token_mesh_(mesh->token_mesh()),
      part_(token_part(*mesh)),
      model_(std::move(model)),
      buffers_(
          mesh_,
          {.rows = local_batch_, .seq_len = seq_len_, .part = part_}) {
  if (options.packing.packing == data::Packing::documents) {
    documents_.emplace(
        mesh_,
        DocumentBuffers::Options{
            .rows = local_batch_,
            .seq_len = seq_len_,
            .max_documents = options.packing.max_documents});
  }
}

bool Evaluation::due(std::int64_t step) const {
  return step == last_step_ || step % freq_ == 0;
}

Evaluation::Sums Evaluation::sum_of(const ValidationSet& set) {
  at::Tensor nats = at::zeros(
      {},
      at::TensorOptions().dtype(at::kDouble).device(mesh_->device()));
  ValidationSet::Counts counts;
  // All ranks run each batch, also if the last one is short.
  for (std::int64_t begin = 0; begin < set.num_sequences;
       begin += local_batch_ * mesh_->size()) {
    const std::int64_t mine = begin + local_batch_ * mesh_->rank();
    const std::int64_t count =
        std::clamp<std::int64_t>(set.num_sequences - mine, 0, local_batch_);
    ValidationSet::Counts batch;
    data::DocumentLengths documents;
    buffers_.load([&](auto tokens, auto targets) {
      set.read(mine, count, tokens, targets, documents_ ? &documents : nullptr);
      batch = {};
      for (const auto& range :
           part_.of(std::span<const std::int64_t>(targets))) {
        batch += set.count(range);
      }
      if (documents_) {
        documents_->write(0, documents);
        documents_->queue_copies();
      }
    });
    const at::Tensor loss =
        model_(buffers_.tokens(0), buffers_.targets(0), documents_of(count));
    nats += loss.to(at::kDouble) * static_cast<double>(batch.targets);
    counts += batch;
  }
  return {.nats = nats.item<double>(), .counts = counts};
}

nn::Documents Evaluation::documents_of(std::int64_t count) const {
  if (documents_) {
    return documents_->documents(0);
  }
  if (count == local_batch_ || !drops_tokens_) {
    return {};
  }
  // Rows that the loss ignores do not count toward expert capacity.
  return {
      .padding = at::arange(local_batch_, buffers_.tokens(0).options())
                     .ge(count)
                     .repeat_interleave(seq_len_)};
}

ValidationMetrics Evaluation::run(std::int64_t step) {
  const at::NoGradGuard no_grad;
  // The Sums of each set.
  const auto num_sets = static_cast<std::int64_t>(sets_.size());
  const at::Tensor sums = at::zeros({num_sets, 3}, at::kDouble);
  for (std::int64_t s = 0; s < num_sets; ++s) {
    const Sums mine = sum_of(sets_[static_cast<std::size_t>(s)]);
    sums[s][0] = mine.nats;
    sums[s][1] = static_cast<double>(mine.counts.targets);
    sums[s][2] = static_cast<double>(mine.counts.bytes);
  }
  if (token_mesh_->size() > 1) {
    const CollectiveScope scope("validation");
    const at::Tensor shared = sums.to(mesh_->device());
    token_mesh_->world(Purpose::reduce).all_reduce(shared, ReduceOp::sum);
    sums.copy_(shared);
  }
  mesh_->check();  // an aborted collective ends without a result
  return summarize(
      sets_,
      step,
      {sums.data_ptr<double>(), static_cast<std::size_t>(sums.numel())});
}

}  // namespace flatshard
