#include "flatshard/train/data/batches.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/nn/loss.h"
#include "flatshard/train/config/option_errors.h"

namespace flatshard {
namespace {

constexpr std::string_view kTrainOption = "data.train";

static_assert(nn::LossOptions::kIgnoreIndex == data::kIgnoredTarget);

double count_targets(std::span<const std::int64_t> targets) {
  const auto ignored = std::ranges::count(targets, data::kIgnoredTarget);
  return static_cast<double>(std::ssize(targets) - ignored);
}

}  // namespace

data::Loader open_train_loader(const DataOptions& options) {
  FLATSHARD_CHECK(
      !options.train.empty(),
      config,
      "data.train: expected a dataset directory (see `flatshard data "
      "prepare`) or \"random");
  return for_option(kTrainOption, [&] {
    return data::Loader(
        data::open_token_sources(
            options.train,
            "train",
            options.seed,
            options.vocab_size,
            options.packing),
        data::LoaderOptions{
            .seed = options.seed,
            .seq_len = options.packing.seq_len,
            .global_batch_size = options.global_batch_size,
            .vocab_size = options.vocab_size,
            .documents_per_sample = options.packing.max_documents});
  });
}

Batches::Batches(
    const Options& options,
    const std::shared_ptr<Mesh>& mesh,
    data::Loader& loader)
    : mesh_(mesh->data_mesh()),
      part_(token_part(*mesh)),
      loader_(loader),
      local_batch_(options.local_batch_size),
      num_microbatches_(loader.num_microbatches(mesh_->size(), local_batch_)),
      buffers_(
          mesh_,
          {.num_microbatches = num_microbatches_,
           .rows = local_batch_,
           .seq_len = options.packing.seq_len,
           .part = part_}) {
  if (options.packing.packing == data::Packing::documents) {
    documents_.emplace(
        mesh_,
        DocumentBuffers::Options{
            .num_microbatches = num_microbatches_,
            .rows = local_batch_,
            .seq_len = options.packing.seq_len,
            .max_documents = options.packing.max_documents,
            .fixed_shapes = options.fixed_shapes});
  }
  if (options.numbers_samples) {
    offsets_ = at::arange(
                   num_microbatches_ * local_batch_,
                   at::TensorOptions().dtype(at::kLong).device(mesh_->device()))
                   .view({num_microbatches_, local_batch_});
    samples_ = at::empty_like(offsets_);
  }
  if (loader.ignores_targets()) {
    const auto doubles = at::TensorOptions().dtype(at::kDouble);
    num_targets_ = at::empty(
        {num_microbatches_},
        doubles.pinned_memory(mesh_->device().is_cuda()));
    loss_weights_ = at::empty(
        {num_microbatches_},
        doubles.dtype(at::kFloat).device(mesh_->device()));
    if (part_.num_parts() > 1) {
      shares_ = at::empty_like(loss_weights_);
      shares_host_ = at::empty(
          {num_microbatches_},
          doubles.dtype(at::kFloat).pinned_memory(mesh_->device().is_cuda()));
    }
  }
}

void Batches::load_next() {
  buffers_.load([&](auto tokens, auto targets) {
    read(tokens, targets);
    if (documents_) {
      documents_->queue_copies();
    }
    if (num_targets_.defined()) {
      queue_loss_weights();
      has_targets_ =
          num_targets_.sum().item<double>() > 0 ||
          for_option(kTrainOption, [&] { return loader_.step_has_targets(); });
    }
  });
  if (samples_.defined()) {
    at::add_out(
        samples_,
        offsets_,
        at::scalar_tensor(
            loader_.first_sample(
                {.rank = mesh_->rank(),
                 .world = mesh_->size(),
                 .local_batch = local_batch_}),
            at::kLong));
  }
  loader_.advance();
}

void Batches::read(
    std::span<std::int64_t> tokens,
    std::span<std::int64_t> targets) {
  const std::size_t each =
      tokens.size() / static_cast<std::size_t>(num_microbatches_);
  for (std::int64_t m = 0; m < num_microbatches_; ++m) {
    const std::size_t begin = static_cast<std::size_t>(m) * each;
    const auto part = targets.subspan(begin, each);
    data::DocumentLengths documents;
    for_option(kTrainOption, [&] {
      loader_.read(
          {.rank = mesh_->rank(),
           .world = mesh_->size(),
           .local_batch = local_batch_,
           .microbatch = m},
          tokens.subspan(begin, each),
          part,
          documents_ ? &documents : nullptr);
    });
    if (documents_) {
      documents_->write(m, documents);
    }
    if (num_targets_.defined()) {
      const std::span<const std::int64_t> of_all(part);
      const double all = count_targets(of_all);
      num_targets_.mutable_data_ptr<double>()[m] = all;
      if (shares_.defined()) {
        double own = 0;
        for (const auto& range : part_.of(of_all)) {
          own += count_targets(range);
        }
        shares_host_.mutable_data_ptr<float>()[m] = static_cast<float>(
            own * static_cast<double>(part_.num_parts()) / std::max(all, 1.0));
      }
    }
  }
}

// All of it runs on the device: the host waits for no other rank.
void Batches::queue_loss_weights() {
  const at::NoGradGuard no_grad;
  const at::Tensor mine =
      num_targets_.to(mesh_->device(), /*non_blocking=*/true);
  at::Tensor all = mine.sum().reshape({1});
  if (mesh_->size() > 1) {
    const CollectiveScope scope("targets");
    mesh_->world(Purpose::reduce).all_reduce(all, ReduceOp::sum);
  }
  const auto num_parts = static_cast<double>(num_microbatches_ * mesh_->size());
  loss_weights_.copy_(mine * num_parts / all.clamp_min(1.0));
  if (shares_.defined()) {
    shares_.copy_(shares_host_, /*non_blocking=*/true);
  }
}

at::Tensor Batches::tokens(std::int64_t microbatch) const {
  return buffers_.tokens(microbatch);
}

at::Tensor Batches::targets(std::int64_t microbatch) const {
  return buffers_.targets(microbatch);
}

nn::Documents Batches::documents(std::int64_t microbatch) const {
  return documents_ ? documents_->documents(microbatch) : nn::Documents();
}

at::Tensor Batches::samples(std::int64_t microbatch) const {
  return samples_.defined() ? samples_[microbatch] : at::Tensor();
}

at::Tensor Batches::loss_weight(std::int64_t microbatch) const {
  return loss_weights_.defined() ? loss_weights_[microbatch] : at::Tensor();
}

at::Tensor Batches::target_share(std::int64_t microbatch) const {
  return shares_.defined() ? shares_[microbatch] : at::Tensor();
}

}  // namespace flatshard
