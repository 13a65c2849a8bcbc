#include "flatshard/layout/strategy.h"
#include "flatshard/train/config.h"

namespace flatshard {
namespace {

constexpr std::string_view kDtypes = "float32|bfloat16";

// Both names of each.
std::string_view strategies() {
  static const std::string all = [] {
    std::string text;
    for (const StrategyName& row : strategy_names()) {
      for (const std::string_view name : {row.name, row.other_name}) {
        if (!name.empty()) {
          text += text.empty() ? "" : "|";
          text += name;
        }
      }
    }
    return text;
  }();
  return all;
}

// Far above what anyone trains, and low enough that no product of them
// overflows and no cast to int cuts.
constexpr double kMaxSteps = 1e12;
constexpr double kMaxTokens = 1 << 24;
constexpr double kMaxBatch = 1 << 30;
constexpr double kMaxRanks = 1 << 20;

/// KEY(section, name, "help", choices, min, max): one row of the table.
#define KEY(section, name, ...)                                                       \
  ConfigKey {                                                                         \
#section, #name,                                                                  \
        [](Config & config) -> ConfigField { return &config.section.name; },          \
                                                                          __VA_ARGS__ \
  }

const ConfigKey kKeys[] = {
    KEY(run,
        output_dir,
        "folder for config.toml, metrics.jsonl and weights, of one run at a "
        "time"),
    KEY(run,
        seed,
        "of the weights, the data order and dropout; the same seed gives the "
        "same run on any number of ranks",
        {},
        0),
    KEY(run,
        save_weights,
        "write model.safetensors when the run ends; off for benchmarks"),

    KEY(model,
        family,
        "model family; auto: that of preset, hf_config or init_from, else "
        "llama; moe: experts with any router, not for Hugging Face",
        "auto|llama|mixtral|qwen3_moe|moe"),
    KEY(model,
        init_from,
        "a Hugging Face folder whose weights to start from, but for what "
        "checkpoint.exclude names; its config.json gives the shape unless "
        "preset, hf_config or dim does"),
    KEY(model,
        hf_config,
        "a Hugging Face config.json to take the model's shape from; keys set "
        "here besides it replace its values"),
    KEY(model,
        preset,
        "a built-in shape by name, e.g. llama3_8b; keys set here besides it "
        "replace its values"),
    KEY(model, dim, "width of the residual stream", {}, 1, 1 << 20),
    KEY(model, layers, "number of blocks", {}, 1, 10000),
    KEY(model, heads, "attention heads", {}, 1, 1 << 14),
    KEY(model,
        kv_heads,
        "key and value heads (grouped-query attention); unset: heads",
        {},
        1,
        1 << 14),
    KEY(model, head_dim, "width of a head; unset: dim / heads", {}, 1, 4096),
    KEY(model, ffn_dim, "width inside the feed-forward block", {}, 1, 1 << 22),
    KEY(model,
        vocab_size,
        "number of tokens; at least the corpus' (257 for byte tokens)",
        {},
        1,
        1 << 30),
    KEY(model,
        max_seq_len,
        "longest sequence; unset: training.seq_len",
        {},
        1,
        kMaxTokens),
    KEY(model, rope_theta, "base of the rotary embedding", {}, 1, 1e15),
    KEY(model, norm_eps, "epsilon of the RMS norms", {}, 0, 1),
    KEY(model,
        initializer_range,
        "standard deviation of matrices that are trained from scratch; unset: "
        "0.02, or as hf_config says",
        {},
        0,
        1),
    KEY(model, tie_embeddings, "the head uses the embedding's weights"),
    KEY(model,
        qk_norm,
        "RMS norms of each head's query and key; unset: as the family has it"),
    KEY(model,
        num_experts,
        "experts in place of a block's feed-forward part",
        {},
        1,
        1 << 16),
    KEY(model,
        experts_per_token,
        "experts that a token goes to; unset: 2",
        {},
        1,
        1 << 16),
    KEY(model,
        moe_ffn_dim,
        "width inside an expert; unset: ffn_dim",
        {},
        1,
        1 << 22),
    KEY(model,
        shared_experts,
        "experts beside them that every token goes to",
        {},
        0,
        1 << 10),
    KEY(model,
        dense_layers,
        "blocks at the front that have no experts",
        {},
        0,
        10000),
    KEY(model,
        router_score,
        "how experts are scored: softmax over all, or each by a sigmoid; auto: "
        "softmax, or as preset and hf_config say",
        "auto|softmax|sigmoid"),
    KEY(model,
        router_normalize,
        "the weights of a token's experts add up to router_scale; unset: true"),
    KEY(model, router_scale, "factor of the weights; unset: 1", {}, 0),
    KEY(model,
        router_groups,
        "groups of experts, of which a token keeps router_kept_groups",
        {},
        1,
        1 << 16),
    KEY(model,
        router_kept_groups,
        "groups whose experts a token may go to; unset: 1",
        {},
        1,
        1 << 16),

    KEY(moe,
        aux_loss,
        "coefficient of the load-balancing loss of each layer, which is 1 when "
        "experts get equally many tokens",
        {},
        0),
    KEY(moe,
        z_loss,
        "coefficient of the mean square of the router's logsumexp",
        {},
        0),
    KEY(moe,
        balance_rate,
        "how far a bias of each expert's score moves each step against its "
        "load, e.g. 0.001; for model.family = moe",
        {},
        0),
    KEY(moe,
        expert_capacity_factor,
        "an expert takes at most so many times its even share of a "
        "microbatch's tokens on a rank, those that weigh most; 0: all",
        {},
        0),

    KEY(data,
        train,
        "corpus folder made by 'flatshard data prepare', or \"random\" for "
        "random tokens (benchmarks); or a mixture: [{ path = \"a\", weight = "
        "0.7 }, { path = \"b\", weight = 0.3 }], whose weights are shares of "
        "the sequences"),
    KEY(data,
        validation,
        "corpus folder whose validation split is used, or a mixture; empty: "
        "that of data.train"),

    KEY(training, steps, "optimizer steps of the run", {}, 1, kMaxSteps),
    KEY(training, seq_len, "tokens per sequence", {}, 1, kMaxTokens),
    KEY(training,
        local_batch_size,
        "sequences per microbatch and rank",
        {},
        1,
        1 << 20),
    KEY(training,
        global_batch_size,
        "sequences per step over all ranks; gradients are accumulated over "
        "global_batch_size / (local_batch_size * ranks) microbatches; -1: one "
        "microbatch, or as in the checkpoint that the run goes on from",
        {},
        -1,
        kMaxBatch),
    KEY(training,
        max_norm,
        "gradients are scaled down to this global 2-norm; 0: no clipping",
        {},
        0),
    KEY(training,
        on_nonfinite,
        "when a gradient is NaN or infinite: stop, naming it (looked at in "
        "logged steps), skip the update, or rewind to the last checkpoint and "
        "leave that data out",
        "stop|skip|rewind"),

    KEY(optimizer, name, "optimizer", "adamw|sgd"),
    KEY(optimizer, lr, "peak learning rate", {}, 0),
    KEY(optimizer, beta1, "adamw: decay of the first moment", {}, 0, 1),
    KEY(optimizer, beta2, "adamw: decay of the second moment", {}, 0, 1),
    KEY(optimizer, eps, "adamw: added to the denominator", {}, 0),
    KEY(optimizer,
        weight_decay,
        "decoupled weight decay of the weights that have it",
        {},
        0),
    KEY(optimizer, momentum, "sgd: momentum", {}, 0, 1),
    KEY(optimizer,
        overlap,
        "update on a stream of its own, beside the next forward: a unit's "
        "gather waits for its own weights only"),

    KEY(lr_scheduler,
        name,
        "shape of the learning rate after warm-up",
        "constant|linear|cosine|wsd"),
    KEY(lr_scheduler,
        warmup_steps,
        "steps over which the learning rate rises linearly",
        {},
        0,
        kMaxSteps),
    KEY(lr_scheduler,
        decay_ratio,
        "share of the steps, at the end, over which the learning rate falls; "
        "unset: linear and cosine fall from the end of warm-up, wsd over the "
        "last 0.2",
        {},
        0,
        1),
    KEY(lr_scheduler,
        min_lr_factor,
        "the learning rate at the end, as a share of optimizer.lr",
        {},
        0,
        1),

    KEY(parallelism,
        strategy,
        "what is sharded: zero0 nothing (no_shard), zero1 the optimizer's "
        "state "
        "(optim), zero2 gradients too (optim_grads), zero3 weights too "
        "(optim_grads_params)",
        strategies()),
    KEY(parallelism,
        data_parallel_replicate_degree,
        "outer mesh axis: copies of the sharded group; -1: the rest of the "
        "ranks",
        {},
        -1,
        kMaxRanks),
    KEY(parallelism,
        data_parallel_shard_degree,
        "inner mesh axis: ranks that a weight is sharded over; -1: the rest of "
        "the ranks",
        {},
        -1,
        kMaxRanks),
    KEY(parallelism,
        expert_parallel_degree,
        "ranks that divide the experts of each layer among them, and exchange "
        "tokens; divides data_parallel_shard_degree",
        {},
        1,
        kMaxRanks),
    KEY(parallelism,
        token_exchange,
        "how tokens travel between the ranks of expert_parallel_degree: by "
        "collectives, or by copies between the ranks' memory, which on GPUs "
        "take no SM and need all ranks on one host; auto: collective",
        "auto|collective|copies"),
    KEY(parallelism,
        overlap_expert_parallel,
        "run the backward of one microbatch beside the forward of the next, so "
        "that the tokens of one travel while the other computes; needs experts "
        "and 2 microbatches or more (docs/moe.md)"),
    KEY(parallelism,
        delay_wgrad,
        "with overlap_expert_parallel: compute weight gradients behind those "
        "of inputs, while tokens travel; keeps their inputs for longer"),
    KEY(parallelism,
        prefetch,
        "units gathered ahead of the one that computes",
        {},
        0,
        1 << 20),
    KEY(parallelism,
        reshard_after_forward,
        "release weights after forward and gather them again for backward"),
    KEY(parallelism,
        memory_budget,
        "GiB on each rank that the memory table printed at start may come to: "
        "as many units as fit stay gathered from forward to backward; 0: none",
        {},
        0),
    KEY(parallelism,
        keep_compute_weights,
        "ZeRO-3: keep a shard in precision.compute beside the main weights; "
        "false saves its memory and casts before every gather"),
    KEY(parallelism,
        copy_engines,
        "what GPUs copy to each other instead of running a collective on their "
        "SMs: gathers of the forward, or all gathers and reductions (256 MiB "
        "more); all ranks on one host. auto: all where NVLink joins them",
        "auto|none|forward|all"),
    KEY(parallelism,
        granularity,
        "what a rank boundary may not cut: element, row, dim0 (a slice along "
        "the "
        "first dimension), block:N (N rows) or tensor"),
    KEY(parallelism,
        max_padding,
        "a layout with a larger share of padding is refused",
        {},
        0),

    KEY(precision, compute, "dtype of weights and activations", kDtypes),
    KEY(precision, reduce, "dtype in which gradients are reduced", kDtypes),
    KEY(precision, main_params, "dtype of the optimizer's weights", kDtypes),
    KEY(precision, main_grads, "dtype of accumulated gradients", kDtypes),
    KEY(precision,
        scaling,
        "how gradients of ranks are averaged: mean in the collective, scaled "
        "before a sum, or per token",
        "mean|pre_scaled_sum|per_token"),

    KEY(float8,
        recipe,
        "weights of linear layers are gathered and multiplied in FP8, see "
        "docs/float8.md: a scale for each tensor, each row and column, each "
        "128 x 128, or each 32 elements",
        "none|tensorwise|rowwise|blockwise|mxfp8"),
    KEY(float8,
        exclude,
        "parameters that stay in precision.compute: shell patterns of their "
        "names with commas between them"),
    KEY(float8,
        keep_first_last,
        "the first and the last block stay in precision.compute"),
    KEY(float8,
        column_plane,
        "what the gradient of a layer's input reads: made of the rows that "
        "were gathered (derived), or quantized from main weights and gathered "
        "by itself (stored; rowwise and mxfp8). auto: derived",
        "auto|derived|stored"),
    KEY(float8,
        gather_parts,
        "what a backward gathers for a recomputation beside a stored column "
        "plane: the whole unit's rows, the recomputed layers' rows, or all "
        "planes layer by layer",
        "unit|recomputed|module"),
    KEY(float8,
        emulate,
        "GPUs that do not multiply the recipe decode it to bfloat16, which is "
        "no faster than bfloat16; CPUs always do"),

    KEY(activation_checkpoint,
        mode,
        "what backward computes again instead of keeping it",
        "none|selective|full"),

    KEY(validation,
        freq,
        "steps between validations; 0: never",
        {},
        0,
        kMaxSteps),
    KEY(validation,
        sequences,
        "sequences of training.seq_len tokens per validation, the first ones "
        "of the split; -1: the whole split",
        {},
        -1,
        kMaxSteps),

    KEY(checkpoint,
        interval,
        "steps between checkpoints, from which `--resume` goes on; one more "
        "after the last step; 0: none",
        {},
        0,
        kMaxSteps),
    KEY(checkpoint,
        keep_latest_k,
        "older checkpoints are removed when a new one is whole; 0: keep all",
        {},
        0,
        kMaxSteps),
    KEY(checkpoint,
        async,
        "write beside the training; off: training waits for the disk"),
    KEY(checkpoint, folder, "where checkpoints are, below run.output_dir"),
    KEY(checkpoint,
        load_step,
        "the step to go on from; -1: the latest with --resume, else none",
        {},
        -1,
        kMaxSteps),
    KEY(checkpoint,
        exclude,
        "what is not taken from a checkpoint or from model.init_from: shell "
        "patterns of parameter names, `optimizer`, `loader`, with commas "
        "between them"),
    KEY(checkpoint,
        export_hf_at_end,
        "write the last checkpoint as a Hugging Face folder, "
        "<run.output_dir>/hf"),

    KEY(metrics, log_freq, "steps between log lines", {}, 1, kMaxSteps),

    KEY(cuda_graph,
        impl,
        "record each block once and replay its forward and its backward as one "
        "launch each (unit), or forward and backward of the whole step, with "
        "its collectives, as one (full_iteration); for small models, whose "
        "kernels the host cannot launch as fast as the GPU runs them",
        "none|unit|full_iteration"),
    KEY(cuda_graph,
        modules,
        "parts of blocks to record instead of whole ones: attn, mlp, and "
        "moe_router of blocks with experts, with commas between"),
    KEY(cuda_graph,
        warmup_steps,
        "steps before anything is recorded",
        {},
        1,
        kMaxSteps),
    KEY(cuda_graph,
        on_miss,
        "what a block or step does that cannot be replayed: run without a "
        "graph, "
        "which is counted and logged once for each reason, or end the run",
        "eager|error"),

    KEY(profiling, enabled, "write a Chrome trace of one step"),
    KEY(profiling, step, "the step to trace, counted from 1", {}, 1, kMaxSteps),
    KEY(profiling, folder, "where traces go, below run.output_dir"),

    KEY(diagnostics,
        norms_freq,
        "steps between rows with the norm of every parameter and gradient in "
        "metrics.jsonl, shown by 'flatshard norms'; 0: never",
        {},
        0,
        kMaxSteps),
    KEY(diagnostics,
        nan_check,
        "look for NaN and infinite values in gradients (before and after their "
        "reduction) and weights; the first one ends the run by name"),
    KEY(diagnostics,
        overlap_check,
        "check that no two buffers in use share memory, at the start and "
        "whenever a slot is taken"),
    KEY(diagnostics,
        poison,
        "released weights point at memory that cannot be read (CPU: the run "
        "ends by the parameter's name) or at NaN (GPU); released slots are "
        "filled with NaN"),
    KEY(diagnostics,
        strict,
        "check the life cycle of every module, and after each step that all "
        "ranks ran the same ones in the same order"),

    KEY(comm,
        timeout_s,
        "seconds after which a rank that is silent or late for a collective is "
        "named and the run ends; longer than the longest pause between two "
        "collectives (checkpoints, evaluation)",
        {},
        1,
        1e6),
    KEY(comm,
        watcher,
        "compare what the ranks do; without it a hang ends only where the "
        "backend has a timeout of its own (Gloo)"),

    KEY(debug,
        comm_delay_us,
        "CPU only: longest random delay before each queued task; finds "
        "missing waits",
        {},
        0,
        10000000),
    KEY(debug, comm_delay_seed, "of those delays", {}, 0),
    KEY(debug,
        deterministic,
        "only deterministic kernels: the same bits from the same run, at some "
        "cost in speed"),
    KEY(debug,
        spoil_gradient_step,
        "put a NaN into a gradient of rank 0 in this step, once: to try "
        "training.on_nonfinite; 0: never",
        {},
        0,
        kMaxSteps),
    KEY(debug,
        emulate_graphs,
        "CPU only: what would be replayed as a CUDA graph runs again instead"),
    KEY(debug,
        force_balance,
        "experts are chosen in turn and not by score, for measuring: all get "
        "equally many tokens"),
};

#undef KEY

}  // namespace

std::span<const ConfigKey> config_keys() {
  return kKeys;
}

std::string ConfigKey::full_name() const {
  return std::string(section) + "." + std::string(name);
}

}  // namespace flatshard
