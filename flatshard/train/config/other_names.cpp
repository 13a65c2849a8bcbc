#include "flatshard/train/config/other_names.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <sstream>

#include <fmt/format.h>

namespace flatshard::config {
namespace {

struct OtherNames {
  std::string_view names;  ///< separated by spaces
  std::string_view hint;   ///< after "give "
};

constexpr auto kOtherKeys = std::to_array<OtherNames>({
    {"epochs num_epochs num_train_epochs max_epochs n_epochs total_epochs",
     "training.steps, the number of optimizer steps; the first lines of a run "
     "print the steps of an epoch"},
    {"max_steps num_steps train_steps total_steps num_training_steps max_iters "
     "train_iters iterations num_iterations",
     "training.steps"},
    {"per_device_train_batch_size per_gpu_train_batch_size micro_batch_size "
     "microbatch_size train_micro_batch_size_per_gpu device_batch_size "
     "batch_size_per_device",
     "training.local_batch_size, the sequences of one microbatch of one rank"},
    {"batch_size train_batch_size total_batch_size",
     "training.global_batch_size, the sequences of one step of all ranks, or "
     "training.local_batch_size, the sequences of one microbatch of one rank"},
    {"gradient_accumulation_steps gradient_accumulation "
     "accumulate_grad_batches grad_accum_steps",
     "training.global_batch_size (training.local_batch_size times ranks times "
     "microbatches per step)"},
    {"sequence_len sequence_length seq_length max_seq_len max_seq_length "
     "max_sequence_length max_length block_size context_length cutoff_len "
     "model_max_length",
     "training.seq_len"},
    {"learning_rate max_lr base_lr peak_lr lr_max", "optimizer.lr"},
    {"lr_wsd_decay_style lr_decay_type", "lr_scheduler.decay_type"},
    {"param_group_overrides lr_groups param_groups_config",
     "[[optimizer.param_groups]]"},
    {"embedding_lr decoupled_lr",
     "[[optimizer.param_groups]] with pattern = \"embed_tokens\" and lr_mult"},
    {"min_lr lr_min", "lr_scheduler.min_lr_factor, a fraction of optimizer.lr"},
    {"lr_scheduler lr_scheduler_type lr_scheduler_name lr_decay_style "
     "scheduler",
     "lr_scheduler.name"},
    {"warmup_ratio warmup_iters num_warmup_steps lr_warmup_iters "
     "warmup_num_steps",
     "lr_scheduler.warmup_steps, a number of steps"},
    {"optim optimizer_name optimizer_type", "optimizer.name"},
    {"betas adam_beta1 adam_beta2 beta_1 beta_2",
     "optimizer.beta1 and optimizer.beta2"},
    {"epsilon adam_epsilon adam_eps", "optimizer.eps"},
    {"wd adam_weight_decay", "optimizer.weight_decay"},
    {"max_grad_norm grad_clip clip_grad gradient_clipping gradient_clip_val "
     "grad_norm_clip clip_grad_norm",
     "training.max_norm"},
    {"bf16 fp16 dtype torch_dtype mixed_precision mixed_precision_param "
     "amp precision",
     "precision.compute = \"bfloat16\" or \"float32\"; weights that the "
     "optimizer updates have precision.main_params"},
    {"mixed_precision_reduce", "precision.reduce"},
    {"fp8 float8 enable_fp8", "float8.recipe"},
    {"load_in_8bit load_in_4bit qlora",
     "float8.recipe for a base model in FP8; 4 and 8 bit integers are not "
     "supported"},
    {"model_name model_name_or_path base_model base_model_name_or_path "
     "pretrained_model_name_or_path initial_load_path hf_assets_path",
     "model.init_from, a Hugging Face folder with weights"},
    {"flavor model_flavor model_size", "model.preset"},
    {"n_embd d_model hidden_size", "model.dim"},
    {"n_layer n_layers num_layers num_hidden_layers", "model.layers"},
    {"n_head n_heads num_heads num_attention_heads", "model.heads"},
    {"n_kv_heads num_kv_heads num_key_value_heads", "model.kv_heads"},
    {"intermediate_size ffn_hidden_size", "model.ffn_dim"},
    {"dataset datasets dataset_name dataset_path dataset_dir train_data "
     "train_file data_path train_dataset",
     "data.train, a folder that 'flatshard data prepare' makes"},
    {"val_data validation_file test_datasets eval_dataset val_dataset",
     "data.validation, a folder that 'flatshard data prepare' makes"},
    {"val_set_size val_size validation_split",
     "--validation-fraction to 'flatshard data prepare'"},
    {"tokenizer tokenizer_path tokenizer_name tokenizer_name_or_path",
     "--tokenizer to 'flatshard data prepare'"},
    {"chat_template template", "--chat to 'flatshard data prepare'"},
    {"train_on_inputs train_on_prompt mask_prompt completion_only_loss "
     "assistant_only_loss",
     "--train-on to 'flatshard data prepare'"},
    {"sample_packing packing_strategy packed pack_sequences",
     "data.packing = \"documents\""},
    {"gradient_checkpointing activation_checkpointing selective_ac_option "
     "recompute_granularity",
     "activation_checkpoint.mode"},
    {"recompute_num_layers checkpoint_layers", "activation_checkpoint.layers"},
    {"compile torch_compile use_compile", "cuda_graph.impl, for CUDA graphs"},
    {"flash_attention use_flash_attn flash_attn attn_implementation "
     "attention_implementation sdp_attention xformers_attention",
     "no key: the fastest attention that fits the GPU is always used"},
    {"deepspeed fsdp fsdp_config fsdp_transformer_layer_cls_to_wrap "
     "sharding_strategy zero_stage zero_optimization",
     "parallelism.strategy"},
    {"dp_size data_parallel_degree data_parallel_size dp_shard",
     "parallelism.data_parallel_shard_degree"},
    {"tp tp_size tp_degree tensor_parallel tensor_parallel_size "
     "tensor_model_parallel_size",
     "parallelism.tensor_parallel_degree"},
    {"cp cp_size cp_degree context_parallel context_parallel_size "
     "sequence_parallel_size sp_size ulysses_degree",
     "parallelism.context_parallel_degree"},
    {"cp_comm_type cp_style", "parallelism.context_parallel_method"},
    {"ep ep_size ep_degree expert_parallel expert_parallel_size "
     "expert_model_parallel_size",
     "parallelism.expert_parallel_degree"},
    {"dump_folder out_dir save_dir save_folder output_path output_directory",
     "run.output_dir"},
    {"random_seed data_seed", "run.seed"},
    {"logging_steps log_interval log_every log_every_n_steps "
     "log_every_steps",
     "metrics.log_freq"},
    {"report_to enable_tensorboard logging_dir use_tensorboard "
     "save_tb_folder",
     "metrics.tensorboard"},
    {"wandb wandb_project wandb_entity wandb_name wandb_run_id use_wandb "
     "enable_wandb wandb_log",
     "metrics.tensorboard = true, for event files"},
    {"save_steps save_interval save_every save_freq checkpoint_interval "
     "save_strategy saves_per_epoch enable_checkpoint",
     "checkpoint.interval, a number of steps"},
    {"save_total_limit keep_last_n max_checkpoints keep_last",
     "checkpoint.keep_latest_k"},
    {"resume resume_from resume_from_checkpoint auto_resume_from_checkpoints",
     "--resume on the command line, or checkpoint.load_step"},
    {"eval_steps eval_interval eval_freq eval_strategy evaluation_strategy "
     "evals_per_epoch val_check_interval",
     "validation.freq, a number of steps"},
    {"eval_iters eval_batches limit_val_batches", "validation.sequences"},
    {"r lora_r lora_rank", "lora.rank"},
    {"lora_alpha", "lora.alpha"},
    {"lora_dropout", "lora.dropout"},
    {"target_modules lora_target lora_target_modules lora_target_linear",
     "lora.targets"},
    {"use_rslora peft_use_rslora", "lora.rslora"},
    {"init_lora_weights peft_init_lora_weights", "lora.init"},
    {"adapter peft use_peft use_lora finetuning_type", "lora.rank"},
    {"lora_model_dir adapter_name_or_path", "lora.init_from_adapter"},
    {"router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef "
     "load_balance_loss_weight",
     "moe.aux_loss"},
    {"router_z_loss_coef moe_z_loss_coeff", "moe.z_loss"},
    {"load_balance_coeff", "moe.balance_rate"},
});

constexpr auto kOtherSections = std::to_array<OtherNames>({
    {"job", "run"},
    {"train trainer trainingarguments training_arguments", "training"},
    {"dataset datasets dataloader", "data"},
    {"eval evaluation val", "validation"},
    {"logging wandb tensorboard", "metrics"},
    {"checkpointing checkpointer", "checkpoint"},
    {"distributed fsdp deepspeed dist", "parallelism"},
    {"scheduler lr_schedule", "lr_scheduler"},
    {"peft adapter", "lora"},
    {"quantize quantization", "float8"},
    {"compile", "cuda_graph"},
});

// Returns the hint of the entry that has the name, in any case and with
// hyphens.
template <std::size_t N>
std::string_view hint_in(
    const std::array<OtherNames, N>& table,
    std::string_view name) {
  std::string wanted(name);
  std::ranges::transform(wanted, wanted.begin(), [](unsigned char c) {
    return c == '-' ? '_' : static_cast<char>(std::tolower(c));
  });
  if (wanted.empty() || wanted.find(' ') != std::string::npos) {
    return {};
  }
  for (const OtherNames& entry : table) {
    const std::string all = fmt::format(" {} ", entry.names);
    if (all.find(fmt::format(" {} ", wanted)) != std::string::npos) {
      return entry.hint;
    }
  }
  return {};
}

}  // namespace

std::string hint_for_other_name(std::string_view name) {
  const std::string_view hint = hint_in(kOtherKeys, name);
  return hint.empty() ? "" : fmt::format("give {}", hint);
}

std::vector<std::string> other_names() {
  std::vector<std::string> found;
  for (const OtherNames& entry : kOtherKeys) {
    std::istringstream names{std::string(entry.names)};
    for (std::string name; names >> name;) {
      found.push_back(name);
    }
  }
  return found;
}

std::string_view section_for_other_name(std::string_view name) {
  return hint_in(kOtherSections, name);
}

}  // namespace flatshard::config
