#include "flatshard/train/config/model_keys.h"

#include "flatshard/core/error.h"
#include "flatshard/models/config.h"
#include "flatshard/train/config/rows.h"

namespace flatshard::config {
namespace {

/// Returns whether both are given and `whole` is no multiple of `part`.
bool leaves_rest(
    const std::optional<std::int64_t>& whole,
    const std::optional<std::int64_t>& part) {
  return whole && part && *whole % *part != 0;
}

std::vector<std::string_view> family_choices() {
  std::vector<std::string_view> choices{"auto"};
  for (const std::string_view name : models::family_names()) {
    choices.push_back(name);
  }
  return choices;
}

/// Returns whether [model] chooses a scaling of rotations that has a factor.
bool scales_rope(const Config& c) {
  return c.model.rope_scaling != RopeScalingChoice::from_shape &&
         c.model.rope_scaling != RopeScalingChoice::none;
}

const ConfigKey kModelKeys[] = {
    KEY(model.family,
        "model family; auto: that of preset, hf_config or init_from, else "
        "llama; moe: experts with any router, not for Hugging Face",
        .choices = family_choices()),
    KEY(model.init_from,
        "a Hugging Face folder whose weights to start from, but for what "
        "checkpoint.exclude names; its config.json gives the shape unless "
        "preset, hf_config or dim does",
        .is_path = true),
    KEY(model.hf_config,
        "a Hugging Face config.json to take the model's shape from; keys set "
        "here besides it replace its values",
        .is_path = true),
    KEY(model.preset,
        "a built-in shape by name, e.g. llama3_8b; keys set here besides it "
        "replace its values",
        .conflicts =
            {{{"model.hf_config"},
              WHEN(!c.model.preset.empty() && !c.model.hf_config.empty()),
              "both give the shape and contradict each other; give one of "
              "them"}}),
    KEY(model.dim, "width of the residual stream", .range = {1, 1 << 20}),
    KEY(model.layers, "number of blocks", .range = {1, 10000}),
    KEY(model.heads,
        "attention heads",
        .range = {1, 1 << 14},
        .conflicts =
            {{{"model.dim"},
              WHEN(
                  leaves_rest(c.model.dim, c.model.heads) && !c.model.head_dim),
              "the width must be a multiple of the heads; or set "
              "model.head_dim"}}),
    KEY(model.kv_heads,
        "key and value heads (grouped-query attention); unset: heads",
        .range = {1, 1 << 14},
        .conflicts =
            {{{"model.heads"},
              WHEN(leaves_rest(c.model.heads, c.model.kv_heads)),
              "the heads must be a multiple of the key and value heads"}}),
    KEY(model.head_dim,
        "width of a head; unset: dim / heads",
        .range = {1, 4096}),
    KEY(model.ffn_dim,
        "width inside the feed-forward block",
        .range = {1, 1 << 22}),
    KEY(model.vocab_size,
        "number of tokens; at least the corpus' (257 for byte tokens)",
        .range = {1, 1 << 30}),
    KEY(model.max_seq_len,
        "longest sequence; unset: training.seq_len",
        .range = {1, kMaxTokens},
        .conflicts =
            {{{"training.seq_len"},
              WHEN(
                  c.training.seq_len >
                  c.model.max_seq_len.value_or(c.training.seq_len)),
              "the sequences of the run are longer"}}),
    KEY(model.rope_theta, "base of the rotary embedding", .range = {1, 1e15}),
    KEY(model.rope_scaling,
        "how rotations are stretched for sequences longer than those of the "
        "pretraining; auto: as in preset or hf_config"),
    KEY(model.rope_factor,
        "how many times longer sequences may be; max_seq_len becomes so much "
        "longer unless it is set",
        .range = {.min = 1, .max = 1e6},
        .used_if =
            {{"model.rope_scaling",
              scales_rope,
              "model.rope_scaling = llama3, linear, dynamic or yarn"}}),
    KEY(model.rope_original_seq_len,
        "longest sequence of the pretraining; unset: max_seq_len of preset or "
        "hf_config",
        .range = {1, kMaxTokens},
        .used_if =
            {{"model.rope_scaling",
              scales_rope,
              "model.rope_scaling = llama3, linear, dynamic or yarn"}}),
    KEY(model.local_rope_theta,
        "base of the rotary embedding in blocks with a sliding window; unset: "
        "as the family has it",
        .range = {1, 1e15}),
    KEY(model.norm_eps, "epsilon of the RMS norms", .range = {.max = 1}),
    KEY(model.initializer_range,
        "standard deviation of matrices that are trained from scratch; unset: "
        "0.02, or as in hf_config",
        .range = {.max = 1}),
    KEY(model.tie_embeddings, "the head uses the embedding's weights"),
    KEY(model.qk_norm,
        "RMS norms of queries and keys; unset: as the family has it"),
    KEY(model.attention_bias,
        "the projections of attention have biases; unset: as the family has "
        "it"),
    KEY(model.mlp_bias,
        "the projections of the feed-forward part have biases; for the family "
        "llama"),
    KEY(model.sliding_window,
        "a token attends to so many tokens, itself included; unset: as the "
        "family has it",
        .range = {1, kMaxTokens}),
    KEY(model.sliding_window_pattern,
        "every so many-th block attends to all tokens, the others have the "
        "sliding window; 1: no block has it; unset: as the family has it",
        .range = {1, 10000}),
    KEY(model.query_pre_attn_scalar,
        "scores of attention are divided by its square root; unset: head_dim, "
        "or as the family has it",
        .range = {.max = 1e6}),
    KEY(model.attention_soft_cap,
        "scores of attention become cap * tanh(score / cap); 0: they stay; for "
        "the family gemma2",
        .range = {.max = 1e6}),
    KEY(model.final_soft_cap,
        "logits become cap * tanh(logit / cap); 0: they stay; for Gemma",
        .range = {.max = 1e6}),
    KEY(model.plain_attention,
        "on GPUs attention may use plain operations where no kernel fits: soft "
        "caps, and windows and sinks in float32; slower, and all probabilities "
        "are kept for the backward"),
    KEY(model.num_experts,
        "experts in place of a block's feed-forward part",
        .range = {1, 1 << 16}),
    KEY(model.experts_per_token,
        "experts that a token goes to; unset: 2",
        .range = {1, 1 << 16}),
    KEY(model.moe_ffn_dim,
        "width inside an expert; unset: ffn_dim",
        .range = {1, 1 << 22}),
    KEY(model.shared_experts,
        "additional experts that every token goes to",
        .range = {.max = 1 << 10}),
    KEY(model.dense_layers,
        "blocks at the front that have no experts",
        .range = {.max = 10000}),
    KEY(model.router_score,
        "how experts are scored: softmax over all, or each by a sigmoid; auto: "
        "softmax, or as in preset or hf_config"),
    KEY(model.router_normalize,
        "the weights of a token's experts add up to router_scale; unset: true"),
    KEY(model.router_scale, "factor of the weights; unset: 1"),
    KEY(model.router_groups,
        "groups of experts, of which a token keeps router_kept_groups",
        .range = {1, 1 << 16}),
    KEY(model.router_kept_groups,
        "groups whose experts a token may go to; unset: 1",
        .range = {1, 1 << 16}),

    KEY(moe.aux_loss,
        "coefficient of the load-balancing loss of each layer, which is 1 when "
        "experts get equally many tokens"),
    KEY(moe.z_loss, "coefficient of the mean square of the router's logsumexp"),
    KEY(moe.balance_rate,
        "how far a bias of each expert's score moves each step against its "
        "load, e.g. 0.001; for model.family = moe"),
    KEY(moe.expert_capacity_factor,
        "an expert takes at most so many times its even share of a "
        "microbatch's tokens on a rank, those that weigh most; 0: all"),
};

void check_model(const Config& config) {
  const Model& model = config.model;
  FLATSHARD_CHECK(
      !scales_rope(config) || model.rope_factor,
      config,
      "model.rope_scaling = \"{}\" needs model.rope_factor, how many times "
      "longer sequences become; set it, e.g. 4.0",
      word_of(model.rope_scaling));
  // Without any of the others init_from's config.json defines the shape.
  if (model.hf_config.empty() && model.preset.empty() &&
      (model.init_from.empty() || model.dim)) {
    FLATSHARD_CHECK(
        model.dim && model.layers && model.heads && model.ffn_dim &&
            model.vocab_size,
        config,
        "[model] needs dim, layers, heads, ffn_dim and vocab_size, or preset, "
        "or hf_config; '{}' is missing",
        !model.dim       ? "dim"
        : !model.layers  ? "layers"
        : !model.heads   ? "heads"
        : !model.ffn_dim ? "ffn_dim"
                         : "vocab_size");
  }
}

}  // namespace

KeyTable model_keys() {
  return {kModelKeys, check_model};
}

}  // namespace flatshard::config
