#include "flatshard/schedule/slot_plan.h"

#include "flatshard/core/rounding.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace flatshard {
namespace {

std::int64_t align_up(std::int64_t n) {
  return round_up(n, SlotPlan::kAlignment);
}

struct Use {
  SlotKey key;
  std::int64_t nbytes = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
};

bool meet(const Use& a, const Use& b) {
  for (const auto& [a0, a1] : a.spans) {
    for (const auto& [b0, b1] : b.spans) {
      if (a0 < b1 && b0 < a1) {
        return true;
      }
    }
  }
  return false;
}

std::int64_t peak_of(std::span<const SlotLifetime> lifetimes) {
  std::map<std::int64_t, std::int64_t> change;
  for (const SlotLifetime& life : lifetimes) {
    change[life.begin] += align_up(life.nbytes);
    change[life.end] -= align_up(life.nbytes);
  }
  std::int64_t now = 0;
  std::int64_t peak = 0;
  for (const auto& [time, delta] : change) {
    now += delta;
    peak = std::max(peak, now);
  }
  return peak;
}

}  // namespace

SlotPlan SlotPlan::build(std::span<const SlotLifetime> lifetimes) {
  std::map<SlotKey, Use> by_key;
  for (const SlotLifetime& life : lifetimes) {
    Use& use = by_key[life.key];
    use.key = life.key;
    use.nbytes = std::max(use.nbytes, align_up(life.nbytes));
    use.spans.emplace_back(life.begin, life.end);
  }
  std::vector<Use> uses;
  for (auto& [key, use] : by_key) {
    uses.push_back(std::move(use));
  }
  std::stable_sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) {
    return a.nbytes > b.nbytes;
  });

  SlotPlan plan;
  plan.peak_nbytes_ = peak_of(lifetimes);
  std::vector<const Use*> placed;
  for (const Use& use : uses) {
    std::vector<std::pair<std::int64_t, std::int64_t>> taken;
    for (const Use* other : placed) {
      if (meet(use, *other)) {
        const std::int64_t at = plan.offsets_[other->key];
        taken.emplace_back(at, at + other->nbytes);
      }
    }
    std::sort(taken.begin(), taken.end());
    std::int64_t at = 0;
    for (const auto& [begin, end] : taken) {
      if (begin - at >= use.nbytes) {
        break;
      }
      at = std::max(at, end);
    }
    plan.offsets_[use.key] = at;
    plan.arena_nbytes_ = std::max(plan.arena_nbytes_, at + use.nbytes);
    placed.push_back(&use);
  }
  return plan;
}

std::int64_t SlotPlan::offset(SlotKey key) const {
  const auto found = offsets_.find(key);
  return found == offsets_.end() ? -1 : found->second;
}

std::vector<SlotLifetime> slot_lifetimes(
    std::span<const UnitSpec> units,
    std::span<const Action> actions) {
  std::vector<SlotLifetime> lifetimes;
  // The keys are unit, plane and part; gradients have one part.
  using Open = std::map<std::tuple<UnitId, PlaneId, PartId>, std::size_t>;
  Open weights;
  Open grads;
  const auto now_end = static_cast<std::int64_t>(actions.size());
  const auto open =
      [&](Open& where, SlotKey key, std::int64_t nbytes, std::int64_t now) {
        where[{key.unit, key.plane, key.part}] = lifetimes.size();
        lifetimes.push_back({key, now, now_end, nbytes});
      };
  const auto close = [&](Open& where, const Action& action, std::int64_t now) {
    const auto found = where.find({action.unit, action.plane, action.part});
    if (found != where.end()) {
      lifetimes[found->second].end = now;
      where.erase(found);
    }
  };
  for (std::int64_t now = 0; now < now_end; ++now) {
    const Action& action = actions[now];
    const UnitId u = action.unit;
    const SlotKey gradients{.unit = u, .role = SlotRole::gradients};
    switch (action.kind) {
      case ActionKind::gather:
      case ActionKind::derive:
        if (!units[u].resting().contains(action.plane)) {
          const SlotRole role = action.phase == Phase::forward
                                    ? SlotRole::forward_weights
                                    : SlotRole::backward_weights;
          const PlaneId plane = action.plane;
          const PartId part = action.part;
          const std::int64_t nbytes = units[u].nbytes(plane, part);
          open(weights, {u, plane, role, part}, nbytes, now);
        }
        break;
      case ActionKind::release:
        close(weights, action, now);
        break;
      case ActionKind::acquire_grads:
        if (units[u].grads_in_place) {
          open(grads, gradients, units[u].grad_nbytes, now);
        }
        break;
      case ActionKind::reduce:
      case ActionKind::accumulate:
        if (!units[u].grads_in_place) {
          open(grads, gradients, units[u].grad_nbytes, now);
        }
        break;
      case ActionKind::drain:
        close(grads, action, now);
        break;
      default:
        break;
    }
  }
  return lifetimes;
}

}  // namespace flatshard
