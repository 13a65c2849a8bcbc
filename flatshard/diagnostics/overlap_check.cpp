#include "flatshard/diagnostics/overlap_check.h"

#include "flatshard/group/frozen_float8.h"

#include "flatshard/core/error.h"
#include "flatshard/schedule/simulate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

// e.g. "weights for the forward"; planes other than the first are named.
std::string use_name(const SlotKey& key) {
  if (key.role == SlotRole::gradients) {
    return "gradients";
  }
  std::string text = "weights for the ";
  text += key.role == SlotRole::forward_weights ? "forward" : "backward";
  if (key.plane > 0) {
    text += fmt::format(" (plane {})", key.plane);
  }
  return text;
}

UsedRange range_of(std::string name, const void* data, std::int64_t nbytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return {std::move(name), begin, begin + static_cast<std::uintptr_t>(nbytes)};
}

void add_buffer(
    const std::string& name,
    const at::Tensor& tensor,
    std::vector<UsedRange>& ranges) {
  if (tensor.defined() && tensor.numel() > 0) {
    ranges.push_back(range_of(
        name,
        tensor.data_ptr(),
        static_cast<std::int64_t>(tensor.nbytes())));
  }
}

bool inside(const at::Tensor& inner, const at::Tensor& outer) {
  return inner.defined() && outer.defined() &&
         inner.storage().unsafeGetStorageImpl() ==
             outer.storage().unsafeGetStorageImpl();
}

// Checks the buffers that this rank keeps between steps.
void check_buffers(const Runtime& runtime) {
  std::vector<UsedRange> ranges;
  for (const auto& unit : runtime.units()) {
    for (const auto& group : unit->groups()) {
      const std::string of =
          " of " + group->name() + (group->trainable() ? "" : " (frozen)");
      const at::Tensor compute = group->weights().compute().local();
      add_buffer("compute weights" + of, compute, ranges);
      // Views on purpose: main weights of compute's dtype, a shard of it.
      const at::Tensor shard = group->weights().compute_shard();
      if (shard.defined() && !inside(shard, compute)) {
        add_buffer("compute shard" + of, shard, ranges);
      }
      const at::Tensor main = group->weights().main().local();
      if (main.defined() && has_main_weights(*group) &&
          !(compute.defined() && main.is_alias_of(compute)) &&
          !(shard.defined() && main.is_alias_of(shard))) {
        add_buffer("main weights" + of, main, ranges);
      }
      add_buffer(
          "gradients" + of,
          group->gradients().reduced().local(),
          ranges);
    }
  }
  check_disjoint(std::move(ranges), "between steps");
}

// Checks parameters inside the flat space of their group.
void check_layouts(const Runtime& runtime) {
  for (const auto& unit : runtime.units()) {
    for (const auto& group : unit->groups()) {
      std::vector<UsedRange> ranges;
      const FlatLayout& layout = group->layout();
      for (std::size_t i = 0; i < group->parameters().size(); ++i) {
        const GroupParameter& p = group->parameters()[i];
        std::int64_t numel = 1;
        for (const std::int64_t size : p.shape) {
          numel *= size;
        }
        const auto begin = layout.tensor_offset(static_cast<std::int64_t>(i));
        FLATSHARD_CHECK(
            begin >= 0 && begin + numel <= layout.numel(),
            memory,
            "parameter {} is at [{}, {}), outside the {} elements of {}",
            p.names.front(),
            begin,
            begin + numel,
            layout.numel(),
            group->name());
        ranges.push_back(
            {"parameter " + p.names.front(),
             static_cast<std::uintptr_t>(begin),
             static_cast<std::uintptr_t>(begin + numel)});
      }
      check_disjoint(std::move(ranges), "the layout of " + group->name());
    }
  }
}

}  // namespace

void check_disjoint(std::vector<UsedRange> ranges, const std::string& where) {
  std::erase_if(ranges, [](const UsedRange& r) { return r.begin == r.end; });
  std::sort(
      ranges.begin(),
      ranges.end(),
      [](const UsedRange& a, const UsedRange& b) { return a.begin < b.begin; });
  // The range that reaches furthest so far may overlap more than its successor.
  for (std::size_t i = 1, last = 0; i < ranges.size(); ++i) {
    FLATSHARD_CHECK(
        ranges[i].begin >= ranges[last].end,
        memory,
        "{}: {} [{:#x}, {:#x}) and {} [{:#x}, {:#x}) overlap",
        where,
        ranges[last].name,
        ranges[last].begin,
        ranges[last].end,
        ranges[i].name,
        ranges[i].begin,
        ranges[i].end);
    if (ranges[i].end > ranges[last].end) {
      last = i;
    }
  }
}

void check_placement(
    const std::vector<PlacedUse>& uses,
    std::int64_t arena_nbytes) {
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const PlacedUse& a = uses[i];
    FLATSHARD_CHECK(
        a.offset >= 0 && a.offset + a.nbytes <= arena_nbytes,
        memory,
        "the plan puts {} at bytes [{}, {}) of an arena of {}",
        a.name,
        a.offset,
        a.offset + a.nbytes,
        arena_nbytes);
    for (std::size_t k = i + 1; k < uses.size(); ++k) {
      const PlacedUse& b = uses[k];
      const bool same_time = a.begin < b.end && b.begin < a.end;
      const bool same_place =
          a.offset < b.offset + b.nbytes && b.offset < a.offset + a.nbytes;
      FLATSHARD_CHECK(
          !(same_time && same_place),
          memory,
          "the plan lets {} (bytes [{}, {})) and {} (bytes [{}, {})) share a "
          "place at the same time",
          a.name,
          a.offset,
          a.offset + a.nbytes,
          b.name,
          b.offset,
          b.offset + b.nbytes);
    }
  }
}

std::shared_ptr<OverlapCheck> OverlapCheck::install(
    const std::shared_ptr<Runtime>& runtime) {
  FLATSHARD_CHECK(
      runtime->executor().slots().pool().num_held() == 0,
      usage,
      "the overlap check must be installed before any unit is unsharded, but "
      "{} slots are in use; install it right after fully_shard",
      runtime->executor().slots().pool().num_held());
  check_buffers(*runtime);
  check_layouts(*runtime);
  auto check = std::make_shared<OverlapCheck>();
  const Scheduler& scheduler = runtime->scheduler();
  for (const UnitSpec& unit : scheduler.units()) {
    check->unit_names_.push_back(unit.name);
  }
  check->slots_planned(
      runtime->executor().slots().places(),
      slot_lifetimes(
          scheduler.units(),
          simulate_step(scheduler.units(), scheduler.options())));
  runtime->add_observer(check);
  return check;
}

void OverlapCheck::slot_acquired(
    const Unit& unit,
    const SlotKey& key,
    const Slot& slot) {
  const UsedRange taken = range_of(
      fmt::format("the {} of unit {}", use_name(key), unit.name()),
      slot.data,
      slot.nbytes);
  for (const auto& [data, other] : held_) {
    FLATSHARD_CHECK(
        taken.end <= other.begin || other.end <= taken.begin,
        memory,
        "{} got bytes [{:#x}, {:#x}), but {} owns [{:#x}, {:#x})",
        taken.name,
        taken.begin,
        taken.end,
        other.name,
        other.begin,
        other.end);
  }
  held_.insert_or_assign(slot.data, taken);
}

void OverlapCheck::slot_released(const Unit& unit, const Slot& slot) {
  FLATSHARD_CHECK(
      held_.erase(slot.data) == 1,
      memory,
      "unit {} released a slot that it did not own",
      unit.name());
}

void OverlapCheck::slots_planned(
    const SlotPlan& plan,
    const std::vector<SlotLifetime>& lifetimes) {
  std::vector<PlacedUse> uses;
  for (const SlotLifetime& life : lifetimes) {
    if (const auto offset = plan.offset(life.key); offset >= 0) {
      uses.push_back(
          {fmt::format(
               "the {} of unit {}",
               use_name(life.key),
               unit_names_[life.key.unit]),
           life.begin,
           life.end,
           offset,
           life.nbytes});
    }
  }
  check_placement(uses, plan.arena_nbytes());
}

void OverlapCheck::parameters_pointed(Unit& unit, const SlotView& view) {
  if (unit.resident()) {
    return;
  }
  const UsedRange slot = range_of({}, view.data, view.nbytes);
  std::vector<UsedRange> ranges;
  for (const UnitParameter& p : unit.parameters()) {
    if (unit.groups()[p.group]->weights().resident() ||
        !p.storage.has_values()) {
      continue;
    }
    ranges.push_back(range_of(
        "parameter " + p.name,
        p.tensor.data_ptr(),
        static_cast<std::int64_t>(p.tensor.nbytes())));
    const UsedRange& mine = ranges.back();
    FLATSHARD_CHECK(
        mine.begin == mine.end ||
            (mine.begin >= slot.begin && mine.end <= slot.end),
        memory,
        "parameter {} points to [{:#x}, {:#x}), outside the slot [{:#x}, "
        "{:#x}) of its unit {}",
        p.name,
        mine.begin,
        mine.end,
        slot.begin,
        slot.end,
        unit.name());
  }
  check_disjoint(std::move(ranges), "the slot of unit " + unit.name());
}

}  // namespace flatshard
