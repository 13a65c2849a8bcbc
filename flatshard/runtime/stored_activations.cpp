#include "flatshard/runtime/stored_activations.h"

#include "flatshard/core/error.h"
#include "flatshard/runtime/runtime_core.h"

#include <cstddef>
#include <cstdint>

namespace flatshard {
namespace {

// A part of one call. The Runtime has the tensors.
class StoredPart : public nn::StoredActivations {
 public:
  StoredPart(
      std::weak_ptr<RuntimeCore> core,
      std::shared_ptr<AbandonedParts> abandoned,
      AutogradEvents::OpenCall call)
      : core_(std::move(core)), abandoned_(std::move(abandoned)), call_(call) {}

  ~StoredPart() override {
    if (!is_done_) {
      abandoned_->add(call_.unit, call_.call);
    }
  }

  /// Tensor `index` of the part is tensor `number` of the call.
  void add(std::size_t index, std::size_t number) {
    places_.emplace_back(index, number);
  }

  void restore(std::vector<at::Tensor>& tensors) override {
    const auto core = core_.lock();
    FLATSHARD_CHECK(
        core != nullptr,
        usage,
        "activation offload: the sharded model was destroyed before this "
        "backward, and with it what its forward kept");
    const std::lock_guard lock(core->mutex);
    core->feed(
        {.kind = EventKind::kept_read, .unit = call_.unit, .call = call_.call});
    FLATSHARD_CHECK(
        !core->step.failed(),
        usage,
        "unit {} is recomputed although this backward failed: {}",
        core->units[call_.unit]->name(),
        core->step.failure);
    for (const auto& [index, number] : places_) {
      tensors.at(index) = core->executor.kept()->tensor(call_.call, number);
    }
  }

  void done() override {
    is_done_ = true;
    if (const auto core = core_.lock()) {
      const std::lock_guard lock(core->mutex);
      core->kept_done(call_.unit, call_.call);
    }
  }

 private:
  std::weak_ptr<RuntimeCore> core_;
  std::shared_ptr<AbandonedParts> abandoned_;
  AutogradEvents::OpenCall call_;
  std::vector<std::pair<std::size_t, std::size_t>> places_;
  bool is_done_ = false;
};

}  // namespace

std::unique_ptr<nn::StoredActivations> store_activations(
    RuntimeCore& core,
    const std::weak_ptr<RuntimeCore>& weak,
    std::vector<at::Tensor>& tensors) {
  KeptActivations& kept = *core.executor.kept();
  std::int64_t nbytes = 0;
  for (const at::Tensor& tensor : tensors) {
    nbytes += kept.can_leave(tensor) ? KeptActivations::nbytes_of(tensor) : 0;
  }
  const auto call = nbytes > 0 ? core.events.add_kept(nbytes) : std::nullopt;
  if (!call) {
    return nullptr;
  }
  auto part = std::make_unique<StoredPart>(weak, core.abandoned, *call);
  kept.add_reader(call->call);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (kept.can_leave(tensors[i])) {
      part->add(i, kept.add(call->call, std::exchange(tensors[i], {})));
    }
  }
  return part;
}

}  // namespace flatshard
