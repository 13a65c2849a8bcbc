#include "flatshard/train/run/nonfinite_guard.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/diagnostics/nan_check.h"

namespace flatshard {
namespace {

/// Returns the first text of all ranks that is not empty, truncated to a length
/// with room for any parameter name.
std::string first_text(Mesh& mesh, const std::string& mine) {
  constexpr std::int64_t kLength = 512;
  const at::Tensor text = at::zeros({kLength}, at::kChar);
  std::memcpy(
      text.data_ptr(),
      mine.data(),
      std::min<std::size_t>(mine.size(), kLength - 1));
  if (mesh.size() == 1) {
    return mine;
  }
  const at::Tensor own = text.to(mesh.device());
  const at::Tensor all = at::empty({mesh.size() * kLength}, own.options());
  const CollectiveScope scope("name of a gradient");
  mesh.world().all_gather(all, own);
  const at::Tensor host = all.cpu();
  mesh.check();
  const auto* bytes = static_cast<const char*>(host.data_ptr());
  for (int rank = 0; rank < mesh.size(); ++rank) {
    if (bytes[rank * kLength] != '\0') {
      return bytes + rank * kLength;
    }
  }
  return "";
}

/// Returns which gradient is not finite, as reported by the first rank with
/// such a gradient; the same text on all ranks, empty if there is none.
/// Collective; blocks.
std::string name_nonfinite_gradient(const Runtime& runtime, Mesh& mesh) {
  std::string mine;
  try {
    NanCheck::check_reduced_gradients(runtime);
  } catch (const Error& error) {
    mine = error.what();
  }
  return first_text(mesh, mine);
}

}  // namespace

NonfiniteGuard::NonfiniteGuard(config::OnNonfinite action, Parts parts)
    : action_(action), parts_(std::move(parts)) {
}

bool NonfiniteGuard::accepts(
    std::int64_t step,
    const at::Tensor& norm,
    bool now) {
  if (!now && action_ == config::OnNonfinite::stop) {
    kept_.emplace_back(step, norm);
    num_given_up_ = 0;
    return true;
  }
  check_kept(step);
  if (!std::isfinite(norm.item<double>())) {
    parts_.mesh->check();  // an aborted collective ends without a result
    return false;
  }
  num_given_up_ = 0;
  return true;
}

void NonfiniteGuard::check_kept(std::int64_t step) {
  if (kept_.empty()) {
    return;
  }
  const auto looked_at = std::exchange(kept_, {});
  std::vector<at::Tensor> norms;
  norms.reserve(looked_at.size());
  for (const auto& [at, norm] : looked_at) {
    norms.push_back(norm);
  }
  const at::Tensor finite = at::isfinite(at::stack(norms)).cpu();
  parts_.mesh->check();
  const bool* good = finite.const_data_ptr<bool>();
  const auto first = static_cast<std::size_t>(
      std::find(good, good + norms.size(), false) - good);
  if (first < norms.size() && parts_.output != nullptr) {
    parts_.output->stopped_by_nonfinite(
        looked_at[first].first,
        fmt::format("the norm of all gradients, as was seen in step {}", step));
  }
  FLATSHARD_CHECK(
      first == norms.size(),
      usage,
      "the gradient of step {} is not finite, as was seen in step {}; lower "
      "optimizer.lr, check the data, or set training.on_nonfinite to skip or "
      "rewind; metrics.log_freq = 1 looks at each step and names the parameter",
      looked_at[first].first,
      step);
}

std::int64_t NonfiniteGuard::give_up(std::int64_t step) {
  // More than this many in a row are not caused by the data.
  constexpr std::int64_t kMostInARow = 10;
  const std::string what =
      name_nonfinite_gradient(*parts_.runtime, *parts_.mesh);
  const bool goes_on =
      action_ != config::OnNonfinite::stop && ++num_given_up_ <= kMostInARow;
  if (!goes_on && parts_.output != nullptr) {
    parts_.output->stopped_by_nonfinite(step, what);
  }
  FLATSHARD_CHECK(
      goes_on,
      usage,
      "the gradient of step {} is not finite{}: {}; lower optimizer.lr, check "
      "the data, or set training.on_nonfinite to skip or rewind",
      step,
      action_ == config::OnNonfinite::stop
          ? ""
          : fmt::format(", for the {}th time", kMostInARow + 1),
      what);
  parts_.optimizer->zero_grad();
  parts_.optimizer->wait();
  parts_.runtime->finish_step();
  std::int64_t last = step;
  if (action_ == config::OnNonfinite::rewind) {
    parts_.checkpoints->finish();
    FLATSHARD_CHECK(
        parts_.checkpoints->last_saved(),
        usage,
        "the gradient of step {} is not finite, and there is no checkpoint to "
        "rewind to yet: {}; lower checkpoint.interval",
        step,
        what);
    last = *parts_.checkpoints->last_saved();
    rewind(last);
  }
  if (parts_.output != nullptr) {
    parts_.output->nonfinite(step, what, last);
  }
  return last;
}

void NonfiniteGuard::rewind(std::int64_t to) {
  const data::LoaderState place = parts_.loader->state();
  parts_.checkpoints->load(to);
  parts_.loader->restore(place);  // past the data that did it
}

}  // namespace flatshard
