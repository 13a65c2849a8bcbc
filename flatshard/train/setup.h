#pragma once

#include "flatshard/launch/environment.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/models/config.h"
#include "flatshard/optim/lr_schedule.h"
#include "flatshard/optim/optimizer.h"
#include "flatshard/train/config.h"
#include "flatshard/unit/fully_shard.h"

#include <memory>
#include <string>
#include <vector>

// From a Config's words to the objects of the library.
namespace flatshard {

/// [model]: preset or hf_config first, then every key that is set.
/// @throws Error{config} naming the key.
models::ModelConfig model_config(const Config& config);

/// The corpus folder whose tokenizer the run's tokens are of: the first of
/// data.train; empty when all are random tokens.
std::string tokenizer_corpus(const Config& config);

/// torch's name of a dtype, e.g. "bfloat16". @throws Error{config}.
at::ScalarType parse_dtype(const std::string& name, const std::string& key);

/// The name that Strategy::named knows for this mesh: a replicate degree above
/// 1 turns zero1, zero2 and zero3 into their HSDP forms.
std::string strategy_name(const Config& config);

/// {dp: n}, or {replicate: r, shard: s}. The config is resolved.
std::vector<MeshAxis> mesh_axes(const Config& config);

/// none, forward or all: what the config says, and for auto what was measured
/// to be fastest (docs/performance.md). Collective.
std::string choose_copy_engines(const Config& config, Mesh& mesh);

/// Everything but the units.
/// @param copy_engines  what choose_copy_engines said.
FullyShardOptions shard_options(
    const Config& config,
    const std::string& copy_engines);

std::unique_ptr<Optimizer> make_optimizer(
    const Config& config,
    const std::vector<ParamGroup*>& groups);

LrSchedule lr_schedule(const Config& config);

/// Bytes that a rank holds at least at the end of a backward: its part of main
/// weights, gradients and optimizer state. The config is resolved.
std::int64_t least_memory(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t world);

/// Refuses a model whose least_memory does not fit, before anything of that
/// size is made: a machine that lends more memory than it has would end the run
/// later, without a word. @throws Error{memory}.
void check_memory(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t world,
    at::Device device);

/// "cpu", "cuda" or "auto" (a GPU when there is one for this local rank).
/// @throws Error{config} when there is no such device.
at::Device choose_device(const std::string& name, const RankEnvironment& env);

}  // namespace flatshard
