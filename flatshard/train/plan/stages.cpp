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

/// Appends kernels with a gather before them or a scatter after them. Copies
/// overlap with the first or the last of them, a product; see
/// nn::gather_and_multiply.
void put_transfer(
    Kernel transfer,
    const Kernels& kernels,
    bool overlaps,
    Kernels& to) {
  if (kernels.empty()) {
    to.push_back(transfer);
    return;
  }
  const bool gathers = transfer.transfer == Transfer::all_gather;
  const auto product = gathers ? kernels.begin() : std::prev(kernels.end());
  transfer.overlaps = overlaps && product->kind == Kernel::Kind::product &&
                      product->recipe.empty();
  for (auto kernel = kernels.begin(); kernel != kernels.end(); ++kernel) {
    const bool is_product = kernel == product;
    if (is_product && (transfer.overlaps || gathers)) {
      to.push_back(transfer);
    }
    to.push_back(*kernel);
    if (is_product && transfer.overlaps) {
      to.push_back(Kernel::finish());
    } else if (is_product && !gathers) {
      to.push_back(transfer);
    }
  }
}

}  // namespace

void append_stages(const Stages& stages, NodeWork& node) {
  for (const Stage& stage : stages) {
    append(node.forward, stage.work.forward);
    append(node.backward, stage.work.backward);
    append(node.wgrad, stage.work.wgrad);
  }
}

void append_shared_stages(
    const Stages& stages,
    double nbytes,
    bool overlaps,
    NodeWork& node) {
  using Reads = Stage::Reads;
  const Kernel gather = Kernel::exchange(Transfer::all_gather, nbytes);
  const Kernel scatter = Kernel::exchange(Transfer::reduce_scatter, nbytes);
  for (const Stage& stage : stages) {
    if (stage.reads == Reads::part) {
      append(node.forward, stage.work.forward);
    } else {
      put_transfer(
          stage.reads == Reads::tokens ? gather : scatter,
          stage.work.forward,
          overlaps,
          node.forward);
    }
  }
  Kernels& backward = node.backward;
  const auto start = [&](Transfer transfer) {
    backward.push_back(Kernel::exchange(transfer, nbytes, /*overlaps=*/true));
  };
  for (auto stage = stages.rbegin(); stage != stages.rend(); ++stage) {
    const bool reads_tokens = stage->reads == Reads::tokens;
    const bool gathers = reads_tokens && stage->gathers_again;
    const bool scatters = reads_tokens && stage->has_input_gradient;
    if (stage->reads == Reads::columns) {
      put_transfer(gather, stage->work.backward, overlaps, backward);
    } else {
      if (gathers) {
        start(Transfer::all_gather);
      }
      append(backward, stage->work.backward);
    }
    if (scatters) {
      start(Transfer::reduce_scatter);
    }
    if (gathers) {
      backward.push_back(Kernel::finish());
    }
    append(backward, stage->work.wgrad);
    if (scatters) {
      backward.push_back(Kernel::finish());
    }
  }
}

}  // namespace flatshard
