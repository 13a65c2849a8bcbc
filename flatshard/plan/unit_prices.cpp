#include "flatshard/plan/unit_prices.h"

#include "flatshard/plan/links.h"

#include <algorithm>
#include <vector>

namespace flatshard::plan {
namespace {

/// Returns the ranks of some axes of a group's mesh.
template <class Chosen>
Group group_over(const GroupShape& shape, const Job& job, Chosen&& chosen) {
  std::vector<AxisRanks> axes;
  for (std::size_t axis = 0; axis < shape.mesh.sizes.size(); ++axis) {
    if (chosen(axis)) {
      axes.push_back({shape.mesh.sizes[axis], shape.mesh.strides[axis]});
    }
  }
  return group_of(axes, job.ranks_per_host);
}

class UnitPricer {
 public:
  UnitPricer(const Job& job, const Gpu& gpu) : job_(job), gpu_(gpu) {}

  UnitPrices price(const UnitPlan& unit) const {
    UnitPrices prices;
    for (const GroupPlan& group : unit.groups) {
      add_weights(group, prices);
      if (!group.shape.trainable) {
        continue;
      }
      add_gradients(group, prices);
      const GroupShape& shape = group.shape;
      prices.norm += gpu_.pass_seconds(
          "sum",
          as_double(group.bytes().numel) * as_double(shape.sizes.gradient));
    }
    return prices;
  }

 private:
  void add_weights(const GroupPlan& group, UnitPrices& prices) const {
    const GroupShape& shape = group.shape;
    const Strategy& strategy = shape.strategy;
    const bool fp8 = shape.float8.has_value();
    const double element = fp8 ? 1 : as_double(shape.sizes.compute);
    const double whole = as_double(group.plane_layout->numel()) * element;
    const Group sharded = group_over(shape, job_, [&](std::size_t axis) {
      return strategy.parameter[axis].is_shard();
    });
    if (!group.storage.resident()) {
      prices.gathers_leave_host |= sharded.hosts() > 1;
      Gathers& gather = fp8 ? prices.float8 : prices.compute;
      gather.by_collective +=
          seconds(gpu_, Transfer::all_gather, whole, sharded);
      gather.by_copies += copy_seconds(gpu_, whole, sharded);
      if (!shape.keep_compute_weights && !fp8 && shape.trainable) {
        prices.cast += gpu_.pass_seconds(
            "copy",
            as_double(group.bytes().numel) *
                as_double(shape.sizes.main + shape.sizes.compute));
      }
    }
    const Group spread = group_over(shape, job_, [&](std::size_t axis) {
      return strategy.optimizer[axis].is_shard() &&
             !strategy.parameter[axis].is_shard();
    });
    const double of_rank = whole / as_double(sharded.size);
    if (shape.trainable) {
      prices.spread += seconds(gpu_, Transfer::all_gather, of_rank, spread);
    }
    if (fp8) {
      if (shape.trainable) {
        prices.encode += gpu_.pass_seconds(
            "quantize",
            as_double(group.bytes().numel) * as_double(shape.sizes.main + 1));
      }
      prices.derive += gpu_.pass_seconds("quantize", 2 * whole);
    }
    if (group.has_post_forward()) {
      const std::int64_t ranks = shape.post_forward_ranks;
      const double nbytes = as_double(group.post_forward_numel()) *
                            as_double(shape.sizes.compute);
      prices.from_post_forward += seconds(
          gpu_,
          Transfer::all_gather,
          whole,
          group_of(ranks, 1, job_.ranks_per_host));
      prices.save_post_forward += gpu_.pass_seconds("copy", 2 * nbytes);
    }
  }

  /// The ranks of a reduction: an axis that is not sharded in the end is
  /// reduced by an all-reduce.
  struct Reduction {
    Group scattered;
    Group replicated;
    bool by_copies = false;

    bool leaves_host() const {
      return scattered.hosts() > 1 || replicated.hosts() > 1;
    }
  };
  template <class Chosen>
  Reduction reduction_over(const GroupShape& shape, Chosen&& chosen) const {
    const auto over = [&](bool sharded) {
      return group_over(shape, job_, [&](std::size_t axis) {
        return chosen(axis) &&
               shape.strategy.optimizer[axis].is_shard() == sharded;
      });
    };
    const Group scattered = over(true);
    return {
        .scattered = scattered,
        .replicated = over(false),
        .by_copies = job_.copy_reductions && scattered.size > 1};
  }
  /// In a reduction by copies a kernel sums the slices of all ranks for this
  /// rank's part, while engines copy the next piece. Only the rest of the
  /// measured time is copies.
  double summing_seconds(const Reduction& over, double nbytes) const {
    return over.by_copies ? gpu_.pass_seconds(
                                "sum",
                                nbytes / as_double(over.scattered.size) *
                                    as_double(over.scattered.size + 1))
                          : 0;
  }
  double reduction_seconds(const Reduction& over, double nbytes) const {
    const double scatter =
        over.by_copies
            ? std::max(
                  copied_reduction_seconds(gpu_, nbytes, over.scattered) -
                      summing_seconds(over, nbytes),
                  0.0)
            : seconds(gpu_, Transfer::reduce_scatter, nbytes, over.scattered);
    return scatter + seconds(
                         gpu_,
                         Transfer::all_reduce,
                         nbytes / as_double(over.scattered.size),
                         over.replicated);
  }

  void add_gradients(const GroupPlan& group, UnitPrices& prices) const {
    const GroupShape& shape = group.shape;
    const StoragePlan& storage = group.storage;
    const double whole =
        as_double(group.layout->numel()) * as_double(shape.sizes.reduce);
    prices.accumulate += gpu_.pass_seconds(
        "sum",
        whole + 2 * as_double(group.layout->numel()) *
                    as_double(shape.sizes.accumulated));
    const auto is_inner = [&](std::size_t axis) {
      return !storage.has_outer_stage() || axis > 0;
    };
    // If a sum over the inner axes is pending, the last microbatch reduces it
    // over the other axes.
    const Reduction early = reduction_over(shape, [&](std::size_t axis) {
      return is_inner(axis) && shape.strategy.gradient[axis].is_shard();
    });
    const Reduction last = reduction_over(shape, is_inner);
    prices.reductions_leave_host |= early.leaves_host() || last.leaves_host();
    prices.reduce += reduction_seconds(early, whole);
    prices.reduce_last += reduction_seconds(last, whole);
    prices.reduce_sum += summing_seconds(last, whole);
    Reduction outer;
    if (storage.has_outer_stage()) {
      outer = reduction_over(shape, [](std::size_t axis) { return axis == 0; });
      outer.by_copies =
          outer.by_copies && storage.outer == StoragePlan::Outer::alone;
    }
    const bool scatters = last.scattered.size > 1 || outer.scattered.size > 1;
    if (shape.sizes.gradient != shape.sizes.reduce || !scatters) {
      prices.reduce_sum += gpu_.pass_seconds(
          "sum",
          as_double(group.bytes().numel) *
              as_double(shape.sizes.gradient + shape.sizes.reduce));
    }
    if (!storage.has_outer_stage()) {
      return;
    }
    prices.outer_leaves_host |= outer.leaves_host();
    prices.reduce_sum += summing_seconds(outer, whole);
    const double taken =
        reduction_seconds(outer, whole / as_double(last.scattered.size));
    prices.outer += taken;
    prices.outer_early += storage.sums_inner ? 0 : taken;
    prices.outer_by_copies |= outer.by_copies;
  }

  const Job& job_;
  const Gpu& gpu_;
};

}  // namespace

UnitPrices price_unit(const UnitPlan& unit, const Job& job, const Gpu& gpu) {
  return UnitPricer(job, gpu).price(unit);
}

}  // namespace flatshard::plan
