#include "flatshard/train/plan/stages.h"

#include <iterator>

namespace flatshard {
namespace {

using plan::Kernel;
using plan::Kernels;
using plan::NodeWork;
using plan::Transfer;

void append(Kernels& to, const Kernels& more) {
  to.insert(to.end(), more.begin(), more.end());
}

/// Returns the matmul of a part of the rows.
Kernel with_rows(Kernel product, double rows) {
  product.m = rows;
  return product;
}

/// Appends kernels with an all-gather before them or a reduce-scatter after
/// them. The first or the last of them is a matmul. An all-gather by copies
/// overlaps the matmul of the rank's own rows, and the other rows wait for it.
/// A reduce-scatter by copies overlaps the matmul of the rank's own rows, so
/// that one runs last; see nn::gather_and_multiply.
void put_transfer(
    Kernel transfer,
    const Kernels& kernels,
    std::int64_t parts,
    Kernels& to) {
  if (kernels.empty()) {
    to.push_back(transfer);
    return;
  }
  const bool gathers = transfer.transfer == Transfer::all_gather;
  const auto product = gathers ? kernels.begin() : std::prev(kernels.end());
  transfer.is_kept = product->is_kept;
  transfer.overlaps = parts > 1 && product->kind == Kernel::Kind::product &&
                      product->recipe.empty();
  const double own = product->m / static_cast<double>(parts);
  for (auto kernel = kernels.begin(); kernel != kernels.end(); ++kernel) {
    if (kernel != product) {
      to.push_back(*kernel);
    } else if (!transfer.overlaps) {
      append(
          to,
          gathers ? Kernels{transfer, *product} : Kernels{*product, transfer});
    } else {
      const Kernel of_own = with_rows(*product, own);
      const Kernel rest = with_rows(*product, product->m - own);
      Kernel finish = Kernel::finish();
      finish.is_kept = product->is_kept;
      append(
          to,
          gathers ? Kernels{transfer, of_own, finish, rest}
                  : Kernels{rest, transfer, of_own, finish});
    }
  }
}

}  // namespace

void append_stages(const Stages& stages, NodeWork& node) {
  for (const Stage& stage : stages) {
    append(node.forward, in_runs(stage.work.forward, stage.runs));
    append(node.backward, in_runs(stage.work.backward, stage.runs));
    append(node.wgrad, in_runs(stage.work.wgrad, stage.runs));
  }
}

void append_shared_stages(
    const Stages& stages,
    double nbytes,
    std::int64_t parts,
    NodeWork& node) {
  using Reads = Stage::Reads;
  const Kernel gather = Kernel::exchange(Transfer::all_gather, nbytes);
  const Kernel scatter = Kernel::exchange(Transfer::reduce_scatter, nbytes);
  for (const Stage& stage : stages) {
    const Kernels forward = in_runs(stage.work.forward, stage.runs);
    if (stage.reads == Reads::part) {
      append(node.forward, forward);
    } else {
      put_transfer(
          (stage.reads == Reads::tokens ? gather : scatter).in_runs(stage.runs),
          forward,
          parts,
          node.forward);
    }
  }
  Kernels& backward = node.backward;
  for (auto stage = stages.rbegin(); stage != stages.rend(); ++stage) {
    const auto start = [&](Transfer transfer) {
      backward.push_back(Kernel::exchange(transfer, nbytes, /*overlaps=*/true)
                             .in_runs(stage->runs));
    };
    const Kernels of_input = in_runs(stage->work.backward, stage->runs);
    const bool reads_tokens = stage->reads == Reads::tokens;
    const bool gathers = reads_tokens && stage->gathers_again;
    const bool scatters = reads_tokens && stage->has_input_gradient;
    if (stage->reads == Reads::columns) {
      put_transfer(gather.in_runs(stage->runs), of_input, parts, backward);
    } else {
      if (gathers) {
        start(Transfer::all_gather);
      }
      append(backward, of_input);
    }
    if (scatters) {
      start(Transfer::reduce_scatter);
    }
    if (gathers) {
      backward.push_back(Kernel::finish());
    }
    append(backward, in_runs(stage->work.wgrad, stage->runs));
    if (scatters) {
      backward.push_back(Kernel::finish());
    }
  }
}

}  // namespace flatshard
