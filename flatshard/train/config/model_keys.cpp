#include "flatshard/train/config/model_keys.h"

#include "flatshard/core/error.h"
#include "flatshard/models/config.h"
#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {
namespace {

/// Returns whether both are set and `whole` is not a multiple of `part`.
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
        "Model family. auto: the family of preset, hf_config or init_from, or "
        "llama if none of them is set. moe: experts with any router "
        "configuration; it cannot be exported to Hugging Face.",
        .choices = family_choices()),
    KEY(model.init_from,
        "Hugging Face model directory to initialize from. Parameters that "
        "match checkpoint.exclude are not loaded. Its config.json defines the "
        "architecture unless preset, hf_config or dim is set.",
        .is_path = true),
    KEY(model.hf_config,
        "Hugging Face config.json that defines the architecture. Keys that are "
        "set in [model] override its values.",
        .is_path = true),
    KEY(model.preset,
        "Name of a built-in architecture, for example llama3_8b. Keys that are "
        "set in [model] override its values.",
        .conflicts =
            {{{"model.hf_config"},
              WHEN(!c.model.preset.empty() && !c.model.hf_config.empty()),
              "both give the shape and contradict each other; give one of "
              "them"}}),
    KEY(model.dim,
        "Hidden size (width of the residual stream).",
        .range = {1, 1 << 20}),
    KEY(model.layers, "Number of transformer blocks.", .range = {1, 10000}),
    KEY(model.heads,
        "Number of attention heads.",
        .range = {1, 1 << 14},
        .conflicts =
            {{{"model.dim"},
              WHEN(
                  leaves_rest(c.model.dim, c.model.heads) && !c.model.head_dim),
              "the width must be a multiple of the heads; or set "
              "model.head_dim"}}),
    KEY(model.kv_heads,
        "Number of key and value heads (grouped-query attention). Default: "
        "heads.",
        .range = {1, 1 << 14},
        .conflicts =
            {{{"model.heads"},
              WHEN(leaves_rest(c.model.heads, c.model.kv_heads)),
              "the heads must be a multiple of the key and value heads"}}),
    KEY(model.head_dim,
        "Size of an attention head. Default: dim / heads.",
        .range = {1, 4096}),
    KEY(model.ffn_dim,
        "Hidden size of the feed-forward layers.",
        .range = {1, 1 << 22}),
    KEY(model.vocab_size,
        "Vocabulary size. Must be at least the vocabulary size of the dataset "
        "(257 for byte tokens).",
        .range = {1, 1 << 30}),
    KEY(model.max_seq_len,
        "Maximum sequence length. Default: training.seq_len.",
        .range = {1, kMaxTokens},
        .conflicts =
            {{{"training.seq_len"},
              WHEN(
                  c.training.seq_len >
                  c.model.max_seq_len.value_or(c.training.seq_len)),
              "the sequences of the run are longer"}}),
    KEY(model.rope_theta,
        "Base of the rotary position embedding (RoPE).",
        .range = {1, 1e15}),
    KEY(model.rope_scaling,
        "RoPE scaling method for sequences longer than the pretraining "
        "context. auto: the method of preset or hf_config."),
    KEY(model.rope_factor,
        "RoPE scaling factor. max_seq_len is multiplied by it unless it is set "
        "explicitly.",
        .range = {.min = 1, .max = 1e6},
        .used_if =
            {{"model.rope_scaling",
              scales_rope,
              "model.rope_scaling = llama3, linear, dynamic or yarn"}}),
    KEY(model.rope_original_seq_len,
        "Context length of the pretraining, for RoPE scaling. Default: "
        "max_seq_len of preset or hf_config.",
        .range = {1, kMaxTokens},
        .used_if =
            {{"model.rope_scaling",
              scales_rope,
              "model.rope_scaling = llama3, linear, dynamic or yarn"}}),
    KEY(model.local_rope_theta,
        "Base of RoPE in blocks with a sliding window. Default: the family's "
        "value.",
        .range = {1, 1e15}),
    KEY(model.norm_eps, "Epsilon of the RMSNorm layers.", .range = {.max = 1}),
    KEY(model.initializer_range,
        "Standard deviation of the initial weight matrices. Default: 0.02, or "
        "the value in hf_config.",
        .range = {.max = 1}),
    KEY(model.tie_embeddings,
        "Share the weights of the token embedding and the output head."),
    KEY(model.qk_norm,
        "Apply RMSNorm to queries and keys. Default: the family's value."),
    KEY(model.attention_bias,
        "Add biases to the attention projections. Default: the family's "
        "value."),
    KEY(model.mlp_bias,
        "Add biases to the feed-forward projections. Llama only."),
    KEY(model.sliding_window,
        "Sliding-window size in tokens, including the current token. Default: "
        "the family's value.",
        .range = {1, kMaxTokens}),
    KEY(model.sliding_window_pattern,
        "Every N-th block uses full attention; all others use the sliding "
        "window. 1 disables the window. Default: the family's value.",
        .range = {1, 10000}),
    KEY(model.query_pre_attn_scalar,
        "Attention scores are divided by the square root of this number. "
        "Default: head_dim, or the family's value.",
        .range = {.max = 1e6}),
    KEY(model.attention_soft_cap,
        "Soft cap for attention scores: cap * tanh(score / cap). 0 disables "
        "it. Gemma 2 only.",
        .range = {.max = 1e6}),
    KEY(model.final_soft_cap,
        "Soft cap for the logits: cap * tanh(logit / cap). 0 disables it. "
        "Gemma only.",
        .range = {.max = 1e6}),
    KEY(model.plain_attention,
        "Allow unfused attention on GPUs if no fused kernel supports the "
        "configuration (soft caps, and windows and sinks in float32). Slower, "
        "and stores all attention probabilities for the backward pass."),
    KEY(model.num_experts,
        "Number of experts per block. They replace the feed-forward layer.",
        .range = {1, 1 << 16}),
    KEY(model.experts_per_token,
        "Number of experts that each token is routed to. Default: 2.",
        .range = {1, 1 << 16}),
    KEY(model.moe_ffn_dim,
        "Hidden size of an expert. Default: ffn_dim.",
        .range = {1, 1 << 22}),
    KEY(model.shared_experts,
        "Number of shared experts. They process every token.",
        .range = {.max = 1 << 10}),
    KEY(model.dense_layers,
        "Number of blocks at the start of the model without experts.",
        .range = {.max = 10000}),
    KEY(model.router_score,
        "Scoring function of the router: softmax over all experts, or a "
        "sigmoid per expert. auto: the function of preset or hf_config, "
        "otherwise softmax."),
    KEY(model.router_normalize,
        "Normalize the routing weights of a token to sum to router_scale. "
        "Default: true."),
    KEY(model.router_scale,
        "Scaling factor of the routing weights. Default: 1."),
    KEY(model.router_groups,
        "Number of expert groups for group-limited routing. Each token is "
        "routed within router_kept_groups of them.",
        .range = {1, 1 << 16}),
    KEY(model.router_kept_groups,
        "Number of expert groups that a token can be routed to. Default: 1.",
        .range = {1, 1 << 16}),

    KEY(moe.aux_loss,
        "Coefficient of the load-balancing loss of each layer. The loss is 1 "
        "if all experts get the same number of tokens."),
    KEY(moe.z_loss,
        "Coefficient of the router z-loss, the mean squared logsumexp of the "
        "router logits."),
    KEY(moe.balance_rate,
        "Update rate of the per-expert routing bias (auxiliary-loss-free load "
        "balancing), for example 0.001. Requires model.family = moe."),
    KEY(moe.expert_capacity_factor,
        "Capacity factor: an expert processes at most this multiple of the "
        "average number of tokens per expert, per rank and microbatch. Tokens "
        "with the lowest routing weights are dropped. 0: no limit."),
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
