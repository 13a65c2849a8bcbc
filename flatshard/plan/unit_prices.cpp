#include "flatshard/plan/unit_prices.h"

#include "flatshard/plan/links.h"

#include <algorithm>

namespace flatshard::plan {
namespace {

/// Returns the ranks of some axes of a group's mesh, which are neighbours.
template <class Chosen>
Group group_over(const GroupShape& shape, const Job& job, Chosen&& chosen) {
  std::int64_t size = 1;
  std::int64_t stride = job.ranks;
  for (std::size_t axis = 0; axis < shape.axis_sizes.size(); ++axis) {
    if (shape.axis_sizes[axis] > 1 && chosen(axis)) {
      size *= shape.axis_sizes[axis];
      stride = std::min(stride, shape.axis_strides[axis]);
    }
  }
  return group_of(size, stride, job.ranks_per_host);
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
      const double numel = as_double(group.bytes.numel);
      const double moved =
          2 * as_double(shape.sizes.main) +
          2 * as_double(job_.optimizer_states) * sizeof(float) +
          as_double(shape.sizes.gradient) +
          (group.bytes.compute > 0 ? as_double(shape.sizes.compute) : 0);
      prices.optimizer += gpu_.pass_seconds("optimizer", numel * moved);
      prices.norm +=
          gpu_.pass_seconds("sum", numel * as_double(shape.sizes.gradient));
    }
    return prices;
  }

 private:
  void add_weights(const GroupPlan& group, UnitPrices& prices) const {
    const GroupShape& shape = group.shape;
    const Strategy& strategy = shape.strategy;
    const bool fp8 = shape.float8.has_value();
    const double element = fp8 ? 1 : as_double(shape.sizes.compute);
    const double whole = as_double(group.plane_layout.numel()) * element;
    const Group sharded = group_over(shape, job_, [&](std::size_t axis) {
      return strategy.parameter[axis].is_shard();
    });
    if (!group.resident) {
      prices.gathers_leave_host |= sharded.hosts() > 1;
      Gathers& gather = fp8 ? prices.float8 : prices.compute;
      gather.by_collective +=
          seconds(gpu_, Transfer::all_gather, whole, sharded);
      gather.by_copies += copy_seconds(gpu_, whole, sharded);
      if (!shape.keep_compute_weights && !fp8 && shape.trainable) {
        prices.cast += gpu_.pass_seconds(
            "copy",
            as_double(group.bytes.numel) *
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
            as_double(group.bytes.numel) * as_double(shape.sizes.main + 1));
      }
      prices.derive += gpu_.pass_seconds("quantize", 2 * whole);
    }
    if (group.post_forward_numel > 0) {
      const std::int64_t ranks = shape.post_forward_ranks;
      const double nbytes =
          as_double(group.post_forward_numel) * as_double(shape.sizes.compute);
      prices.from_post_forward += seconds(
          gpu_,
          Transfer::all_gather,
          whole,
          group_of(ranks, 1, job_.ranks_per_host));
      prices.save_post_forward += gpu_.pass_seconds("copy", 2 * nbytes);
    }
  }

  void add_gradients(const GroupPlan& group, UnitPrices& prices) const {
    const GroupShape& shape = group.shape;
    const Strategy& strategy = shape.strategy;
    const double whole =
        as_double(group.layout.numel()) * as_double(shape.sizes.reduce);
    prices.accumulate += gpu_.pass_seconds(
        "sum",
        whole + 2 * as_double(group.layout.numel()) *
                    as_double(job_.main_grads_size));
    const auto is_inner = [&](std::size_t axis) {
      return !group.has_outer_stage || axis > 0;
    };
    const auto is_sharded = [&](std::size_t axis) {
      return strategy.optimizer[axis].is_shard();
    };
    // A parameter that is not sharded in the end is reduced by an all-reduce.
    const Group scattered = group_over(shape, job_, [&](std::size_t axis) {
      return is_inner(axis) && is_sharded(axis);
    });
    const Group replicated = group_over(shape, job_, [&](std::size_t axis) {
      return is_inner(axis) && !is_sharded(axis);
    });
    prices.reductions_leave_host |=
        scattered.hosts() > 1 || replicated.hosts() > 1;
    const double rest = whole / as_double(scattered.size);
    double inner = 0;
    if (job_.copy_reductions && scattered.size > 1) {
      // A kernel sums every rank's slice of what this rank keeps, while engines
      // copy the next piece. Only the rest of the measured time is copies.
      const double sums = gpu_.pass_seconds(
          "sum",
          whole / as_double(scattered.size) * as_double(scattered.size + 1));
      inner += std::max(
          copied_reduction_seconds(gpu_, whole, scattered) - sums,
          0.0);
      prices.reduce_sum += sums;
    } else {
      inner += seconds(gpu_, Transfer::reduce_scatter, whole, scattered);
    }
    inner += seconds(gpu_, Transfer::all_reduce, rest, replicated);
    prices.reduce += inner;
    prices.reduce_last += inner;
    if (shape.sizes.gradient != shape.sizes.reduce || scattered.size == 1) {
      prices.reduce_sum += gpu_.pass_seconds(
          "sum",
          as_double(group.bytes.numel) *
              as_double(shape.sizes.gradient + shape.sizes.reduce));
    }
    if (group.has_outer_stage) {
      const Group outer =
          group_over(shape, job_, [](std::size_t axis) { return axis == 0; });
      prices.outer_leaves_host |= outer.hosts() > 1;
      prices.outer += seconds(
          gpu_,
          is_sharded(0) ? Transfer::reduce_scatter : Transfer::all_reduce,
          rest,
          outer);
    }
  }

  const Job& job_;
  const Gpu& gpu_;
};

}  // namespace

UnitPrices price_unit(const UnitPlan& unit, const Job& job, const Gpu& gpu) {
  return UnitPricer(job, gpu).price(unit);
}

}  // namespace flatshard::plan
