#pragma once

#include "flatshard/exchange/stream_exchange.h"
#include "flatshard/fully_shard/context_parallel.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/fully_shard/make_token_exchange.h"
#include "flatshard/fully_shard/tensor_parallel.h"
#include "flatshard/launch/environment.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/models/config.h"
#include "flatshard/models/llama.h"
#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/schedule/overlap_plan.h"
#include "flatshard/train/config/run_config.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Maps [parallelism] to meshes, strategies and other options of the
// library.
namespace flatshard {

/// Returns the name in Strategy::named for this mesh: a replicate degree above
/// 1 turns zero1, zero2 and zero3 into their HSDP forms.
std::string strategy_name(const config::Parallelism& keys);

/// {dp: n}, or {replicate: r, shard: s}; with expert parallelism {edp, ep}
/// in place of the last; then cp with context parallelism, after cp_hosts where
/// its ranks are on several hosts; with tensor
/// parallelism tp as the innermost. If experts are split, too, their width is
/// split over tp and an axis etp after ep. etp has
/// expert_tensor_parallel_degree / tp ranks. Where ranks that share a sequence
/// have different experts, ep has expert_parallel_degree / cp ranks, and etp
/// comes after cp. The keys are resolved.
std::vector<MeshAxis> mesh_axes(const config::Parallelism& keys);

/// Returns comm.timeout_s.
std::chrono::milliseconds timeout_of(const config::Comm& keys);

/// Returns the mesh of all ranks with these axes. Its watcher and timeouts are
/// [comm]'s. Collective.
std::shared_ptr<Mesh> make_mesh(
    const std::vector<MeshAxis>& axes,
    const config::Comm& comm,
    const RankEnvironment& env,
    at::Device device,
    OnStuckAbort on_stuck_abort);

/// Returns the config's choice, and for auto the one that was measured to be
/// fastest (docs/performance.md).
/// @param linked  returns whether NVLink joins all ranks; only called for
/// auto.
CopyEngines copy_engines_of(
    const config::Parallelism& keys,
    const config::CudaGraph& graph,
    const std::function<bool()>& linked);
/// Returns it for the ranks of a mesh. Collective.
CopyEngines choose_copy_engines(
    const config::Parallelism& keys,
    const config::CudaGraph& graph,
    Mesh& mesh);

/// Returns the options of the streams in addition to compute: [debug]'s delays.
StreamOptions comm_streams(const config::Debug& keys);

/// Returns the bytes of the rows of a microbatch that a rank routes to experts,
/// with their weights: PeerExchangeOptions::window_nbytes.
std::int64_t exchange_window_nbytes(
    const Config& config,
    const models::ModelConfig& model);

/// Returns how tokens are exchanged between the ranks that have parts of the
/// experts. Collective.
/// @param options  the keys decide on copies and on the ranks of an expert.
std::shared_ptr<StreamExchange> make_exchange(
    const config::Parallelism& keys,
    TokenExchangeOptions options,
    Mesh& mesh);

/// Returns whether the ranks that share layers copy activations to each other.
/// For auto it is the faster choice by measurements: copies of layers without
/// FP8 weights, adapters and graphs (docs/guides/tensor_parallel.md).
/// @param plain_layers  see Config::has_plain_layers.
/// @param linked  returns whether NVLink joins these ranks; only called for
///   auto.
bool copies_activations(
    const config::Parallelism& keys,
    bool plain_layers,
    const std::function<bool()>& linked);

/// Returns the bytes of a microbatch between two layers, of all ranks that
/// share these: PeerTensorParallelOptions::window_nbytes.
std::int64_t tensor_window_nbytes(
    const Config& config,
    const models::ModelConfig& model);

/// Returns the ranks that share this rank's layers, along the axis tp; null:
/// layers are not split. Collective.
/// @param plain_layers  for copies_activations. It sets options.copies.
nn::TensorParallelPtr tensor_parallel_ranks(
    const config::Parallelism& keys,
    bool plain_layers,
    TensorParallelOptions options,
    Mesh& mesh);

/// Returns the ranks that share this rank's sequences, along the axes cp_hosts
/// and cp; null: it has all of their tokens. Collective.
/// @param options  the keys decide on copies and hosts.
nn::ContextParallelPtr context_parallel_ranks(
    const config::Parallelism& keys,
    ContextParallelOptions options,
    Mesh& mesh);

/// Returns the axes along which ranks have different parts of the experts, and
/// exchange tokens.
std::vector<std::string> expert_axes(const config::Parallelism& keys);

/// Returns the bytes of the queries, keys and values that a rank sends at once
/// for a microbatch: PeerContextParallelOptions::window_nbytes.
std::int64_t context_window_nbytes(
    const Config& config,
    const models::ModelConfig& model);

/// Returns FullyShardOptions::placement_of. Experts are sharded over all axes
/// but those along which ranks have other experts or another part of their
/// width. See placement_of_parts for layers that are shared. Empty: all
/// parameters are sharded over all axes.
std::function<ParameterPlacement(const std::string& name)> parameter_placement(
    const config::Parallelism& keys,
    models::Llama& model,
    const Mesh& mesh);

/// Returns how microbatches run in pieces of blocks; unset: by ordinary
/// forwards.
std::optional<OverlapPlanOptions> overlap_options(
    const config::Parallelism& keys,
    models::ActivationCheckpoint recompute,
    const models::ModelConfig& model);

/// Returns how a run shards its model: see fully_shard, and describe.
/// @param layers  with adapters, where the run has some.
/// @param copy_engines  the result of choose_copy_engines.
/// @param num_microbatches  of a step on each rank.
FullyShardOptions model_shard_options(
    const Config& config,
    const models::ModelConfig& model,
    models::Llama& layers,
    const Mesh& mesh,
    const CopyEngines& copy_engines,
    std::int64_t num_microbatches);

}  // namespace flatshard
