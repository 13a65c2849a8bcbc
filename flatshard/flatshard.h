#pragma once

/// The public C++ API in one include. A program that cares for compile time
/// includes the single headers instead.

// Errors, and the owners of the ranges of a flat index space.
#include "flatshard/core/error.h"
#include "flatshard/core/init_spec.h"
#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/granularity.h"
#include "flatshard/layout/placement.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/layout/tensor_slice.h"

// Devices and ranks.
#include "flatshard/comm/store.h"
#include "flatshard/device/stream.h"
#include "flatshard/launch/environment.h"
#include "flatshard/launch/local_ranks.h"
#include "flatshard/mesh/mesh.h"

// FP8 tensors and their matmuls.
#include "flatshard/float8/float8_matmul.h"
#include "flatshard/float8/quantize.h"

// Modules and layers for one device.
#include "flatshard/nn/attention.h"
#include "flatshard/nn/detached.h"
#include "flatshard/nn/dropout.h"
#include "flatshard/nn/embedding.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/loss.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/recompute.h"
#include "flatshard/nn/region.h"
#include "flatshard/nn/rms_norm.h"
#include "flatshard/nn/rope.h"
#include "flatshard/nn/swiglu.h"

// Layers that ranks share.
#include "flatshard/fully_shard/tensor_parallel.h"
#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/tensor_parallel/collective_tensor_parallel.h"

// Experts, and the exchange of tokens with other ranks' experts.
#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/fully_shard/expert_parallel.h"
#include "flatshard/moe/grouped_linear.h"
#include "flatshard/moe/nodes.h"
#include "flatshard/moe/permute.h"
#include "flatshard/moe/router.h"
#include "flatshard/moe/token_exchange.h"
#include "flatshard/peer/page_communicator.h"
#include "flatshard/peer/peer_communicator.h"

// Saving and loading at any number of ranks.
#include "flatshard/checkpoint/checkpointer.h"
#include "flatshard/checkpoint/init_weights.h"
#include "flatshard/checkpoint/load.h"
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/format/checkpoint_folder.h"

// Sharding a module and updating its weights.
#include "flatshard/diagnostics/memory_table.h"
#include "flatshard/diagnostics/nan_check.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/diagnostics/overlap_check.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/graphs/step_graph.h"
#include "flatshard/group/named_shard.h"
#include "flatshard/group/param_group.h"
#include "flatshard/group/precision.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/grad_norm.h"
#include "flatshard/optim/lr_schedule.h"
#include "flatshard/optim/sgd.h"
#include "flatshard/overlap/backward_pass.h"
#include "flatshard/overlap/overlap_runner.h"
