#include "flatshard/train/data/batches.h"

#include <ATen/ATen.h>

#include "flatshard/core/error.h"
#include "flatshard/train/option_errors.h"

namespace flatshard {
namespace {

constexpr std::string_view kTrainOption = "data.train";

}  // namespace

data::PackingOptions packing_options(const Config& config) {
  return {
      .packing = config.data.packing,
      .seq_len = config.training.seq_len,
      .max_documents = config.data.packing == data::Packing::documents
                           ? config.data.documents_per_sample
                           : 0};
}

data::Loader open_train_loader(
    const Config& config,
    const models::ModelConfig& model) {
  FLATSHARD_CHECK(
      !config.data.train.empty(),
      config,
      "data.train: expected a corpus folder (see `flatshard data prepare`) or "
      "\"random\"");
  const auto seed = static_cast<std::uint64_t>(config.run.seed);
  const data::PackingOptions packing = packing_options(config);
  return for_option(kTrainOption, [&] {
    return data::Loader(
        data::open_token_sources(
            config.data.train,
            "train",
            seed,
            model.vocab_size,
            packing),
        data::LoaderOptions{
            .seed = seed,
            .seq_len = config.training.seq_len,
            .global_batch_size = config.training.global_batch_size,
            .vocab_size = model.vocab_size,
            .documents_per_sample = packing.max_documents});
  });
}

Batches::Batches(
    const Config& config,
    std::shared_ptr<Mesh> mesh,
    data::Loader& loader)
    : mesh_(std::move(mesh)),
      loader_(loader),
      local_batch_(config.training.local_batch_size),
      num_microbatches_(loader.num_microbatches(mesh_->size(), local_batch_)),
      buffers_(
          mesh_,
          {num_microbatches_, local_batch_, config.training.seq_len}) {
}

void Batches::load_next() {
  buffers_.load([&](auto tokens, auto targets) {
    const std::size_t each =
        tokens.size() / static_cast<std::size_t>(num_microbatches_);
    for (std::int64_t m = 0; m < num_microbatches_; ++m) {
      const std::size_t begin = static_cast<std::size_t>(m) * each;
      for_option(kTrainOption, [&] {
        loader_.read(
            {.rank = mesh_->rank(),
             .world = mesh_->size(),
             .local_batch = local_batch_,
             .microbatch = m},
            tokens.subspan(begin, each),
            targets.subspan(begin, each));
      });
    }
  });
  loader_.advance();
}

at::Tensor Batches::tokens(std::int64_t microbatch) const {
  return buffers_.tokens()[microbatch];
}

at::Tensor Batches::targets(std::int64_t microbatch) const {
  return buffers_.targets()[microbatch];
}

}  // namespace flatshard
