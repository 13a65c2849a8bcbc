#include "flatshard/optim/offloaded_states.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "flatshard/core/rounding.h"
#include "flatshard/device/memory.h"

namespace flatshard {
namespace {

/// As aligned as what the GPU's allocator returns.
constexpr std::int64_t kAlignment = 512;

/// Calls visit(state) for each state of an update that is defined.
template <class Visit>
void visit_states(FlatUpdate& update, Visit&& visit) {
  for (at::Tensor* state :
       {&update.state0,
        &update.state1,
        &update.exp_avg.float32,
        &update.exp_avg.bfloat16,
        &update.exp_avg.codes,
        &update.exp_avg.scales,
        &update.exp_avg_sq.float32,
        &update.exp_avg_sq.bfloat16,
        &update.exp_avg_sq.codes,
        &update.exp_avg_sq.scales}) {
    if (state->defined()) {
      visit(*state);
    }
  }
}

/// Returns a tensor like `state` in `memory`, from byte `begin` on.
at::Tensor in_memory(
    const at::Tensor& memory,
    std::int64_t begin,
    const at::Tensor& state) {
  const auto nbytes = static_cast<std::int64_t>(state.nbytes());
  return memory.narrow(0, begin, nbytes).view(state.scalar_type());
}

}  // namespace

OffloadedStates::OffloadedStates(
    at::Device device,
    const StreamOptions& streams)
    : device_(device),
      upload_(make_stream(device, "upload", streams)),
      download_(make_stream(device, "download", streams)) {
}

OffloadedStates::~OffloadedStates() {
  upload_->reset();
  download_->reset();
}

void OffloadedStates::allocate(
    std::span<const std::vector<at::Tensor*>> states_of_groups) {
  std::int64_t total = 0;
  std::int64_t largest = 0;  // with padding
  for (const std::vector<at::Tensor*>& states : states_of_groups) {
    Region region{.begin = total};
    std::int64_t nbytes = 0;
    for (const at::Tensor* state : states) {
      const auto of_state = static_cast<std::int64_t>(state->nbytes());
      nbytes += of_state;
      region.nbytes += round_up(of_state, kAlignment);
    }
    host_nbytes_ += nbytes;
    device_nbytes_ =
        std::max(device_nbytes_, static_cast<std::int64_t>(kNumSlots) * nbytes);
    total += region.nbytes;
    largest = std::max(largest, region.nbytes);
    regions_.push_back(region);
  }
  host_ = host_buffer(total, device_);
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    std::int64_t begin = regions_[i].begin;
    for (at::Tensor* state : states_of_groups[i]) {
      *state = in_memory(host_, begin, *state);
      begin += round_up(static_cast<std::int64_t>(state->nbytes()), kAlignment);
    }
  }
  const auto options = at::TensorOptions(at::kByte).device(device_);
  for (Slot& slot : slots_) {
    slot.memory = at::empty({largest}, options);
  }
  // Earlier work may still use the memory that the slots have now.
  Event allocated;
  allocated.record(*current_stream(device_));
  allocated.wait(*upload_);
}

void OffloadedStates::prefetch(const std::vector<std::size_t>& groups) {
  std::vector<std::size_t> step;
  std::ranges::copy_if(groups, std::back_inserter(step), [&](auto group) {
    return has_states(group);
  });
  if (prefetched_ && step == step_) {
    return;
  }
  prefetched_ = true;
  step_ = std::move(step);
  place_.clear();
  for (std::size_t place = 0; place < step_.size(); ++place) {
    place_[step_[place]] = place;
  }
  // Groups may have another place and slot than in the last step.
  downloaded_.wait(*upload_);
  for (std::size_t place = 0; place < kNumSlots; ++place) {
    upload(place);
  }
}

void OffloadedStates::begin_step(const std::vector<std::size_t>& groups) {
  prefetch(groups);
  prefetched_ = false;
}

void OffloadedStates::upload(std::size_t place) {
  if (place >= step_.size()) {
    return;
  }
  Slot& slot = slots_[place % kNumSlots];
  slot.downloaded.wait(*upload_);
  const Region region = regions_[step_[place]];
  upload_->submit([this, region, to = slot.memory.data_ptr()] {
    const auto* host = static_cast<const std::byte*>(host_.data_ptr());
    copy_bytes(to, host + region.begin, region.nbytes, device_);
  });
  slot.uploaded.record(*upload_);
}

at::Tensor OffloadedStates::begin_update(std::size_t group, Stream& stream) {
  if (!has_states(group)) {
    return {};
  }
  const Slot& slot = slot_of(group);
  slot.uploaded.wait(stream);
  return slot.memory;
}

void OffloadedStates::end_update(std::size_t group, Stream& stream) {
  if (!has_states(group)) {
    return;
  }
  Slot& slot = slot_of(group);
  Event updated;
  updated.record(stream);
  updated.wait(*download_);
  const Region region = regions_[group];
  download_->submit([this, region, from = slot.memory.data_ptr()] {
    auto* host = static_cast<std::byte*>(host_.data_ptr());
    copy_bytes(host + region.begin, from, region.nbytes, device_);
  });
  slot.downloaded.record(*download_);
  downloaded_ = slot.downloaded;
  upload(place_.at(group) + kNumSlots);
}

void OffloadedStates::use_slot(
    std::size_t group,
    const at::Tensor& slot,
    FlatUpdate& update) const {
  const Region region = regions_.at(group);
  const auto* host =
      static_cast<const std::byte*>(host_.data_ptr()) + region.begin;
  visit_states(update, [&](at::Tensor& state) {
    const std::int64_t begin =
        state.numel() == 0
            ? 0
            : static_cast<const std::byte*>(state.data_ptr()) - host;
    state = in_memory(slot, begin, state);
  });
}

void OffloadedStates::wait() {
  prefetched_ = false;
  downloaded_.synchronize();
}

}  // namespace flatshard
