"""TRL with FSDP2."""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models as tokenizer_models, pre_tokenizers
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer
from trl import (
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.distillation_trainer import DistillationConfig, DistillationTrainer

from tests.python.libraries import cpu, models
from tests.python.libraries.trainer_cases import Seen

cpu.ranks_as_gpus()

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def tokenizer():
    """Returns a tokenizer of words w3 to w64."""
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    words |= {f"w{i}": i for i in range(3, models.VOCAB)}
    made = Tokenizer(tokenizer_models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )


def texts(n=16, length=12, seed=1):
    rows = models.token_rows(n, length, seed).clamp(min=3)
    # Lengths differ, so that packing and padding have something to do.
    return [
        " ".join(f"w{i}" for i in row[: length - n % 5 - k % 4])
        for k, row in enumerate(rows.tolist())
    ]


def settings(folder, **more):
    return {
        "output_dir": folder,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        },
        **more,
    }


def trained(trainer_class, config, data, model=None, of_trainer={}, resume=None):
    seen = Seen()
    torch.manual_seed(4)  # of an adapter's first values
    trainer = trainer_class(
        model=models.llama() if model is None else model,
        args=config,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        callbacks=[seen],
        **of_trainer,
    )
    trainer.train(resume_from_checkpoint=resume)
    return {
        "losses": seen.losses,
        "norms": seen.norms,
        "evaluated": seen.evaluated,
        "weights": models.full_weights(trainer.model_wrapped),
    }, trainer


def sft(folder, model=None, of_trainer={}, resume=None, **more):
    config = SFTConfig(**settings(folder, max_length=16, **more))
    data = {"text": texts()}
    return trained(SFTTrainer, config, data, model, of_trainer, resume)


def case_sft(folder):
    return sft(folder)[0]


def case_sft_packed(folder):
    return sft(folder, packing=True, packing_strategy="wrapped")[0]


def case_sft_gradient_checkpointing(folder):
    return sft(folder, gradient_checkpointing=True)[0]


def case_sft_bf16(folder):
    return sft(folder, bf16=True)[0]


def case_sft_lora(folder):
    """Trains an adapter and saves it."""
    from safetensors.torch import load_file

    found, trainer = sft(folder, of_trainer={"peft_config": LORA})
    trainer.save_model(f"{folder}/saved")
    trainer.accelerator.wait_for_everyone()
    return {**found, "saved": load_file(f"{folder}/saved/adapter_model.safetensors")}


def case_sft_lora_bf16_packed(folder):
    model = models.llama(dtype=torch.bfloat16)
    more = {"bf16": True, "packing": True, "packing_strategy": "wrapped"}
    return sft(folder, model, {"peft_config": LORA}, **more)[0]


def case_sft_lora_resume(folder):
    saves = {"save_strategy": "steps", "save_steps": 2}
    lora = {"peft_config": LORA}
    whole, _ = sft(folder, of_trainer=lora, **saves)
    cpu.reset_accelerate()
    checkpoint = f"{folder}/checkpoint-2"
    again, _ = sft(f"{folder}/again", of_trainer=lora, resume=checkpoint)
    assert again["losses"][-2:] == whole["losses"][-2:]
    return whole


def case_sft_best_model(folder):
    steps = {"save_strategy": "steps", "save_steps": 2}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2}
    data = Dataset.from_dict({"text": texts(8, seed=7)})
    return sft(
        folder,
        of_trainer={"eval_dataset": data},
        load_best_model_at_end=True,
        **steps,
        **evaluation,
    )[0]


def preferences():
    good, bad = texts(seed=5), texts(seed=6)
    return {"prompt": texts(length=6, seed=4), "chosen": good, "rejected": bad}


def dpo(folder, of_trainer={}, **more):
    config = DPOConfig(**settings(folder, max_length=32, **more))
    return trained(DPOTrainer, config, preferences(), of_trainer=of_trainer)[0]


def case_dpo(folder):
    return dpo(folder, {"ref_model": models.llama()})


def case_dpo_own_reference(folder):
    """The trainer loads the reference model from where the model came from."""
    if cpu.rank() == 0:
        models.llama().save_pretrained(f"{folder}/pretrained")
    torch.distributed.barrier()
    model = LlamaForCausalLM.from_pretrained(f"{folder}/pretrained", use_cache=False)
    config = DPOConfig(**settings(folder, max_length=32))
    return trained(DPOTrainer, config, preferences(), model)[0]


def case_dpo_lora(folder):
    return dpo(folder, {"peft_config": LORA})


def case_dpo_synced_reference(folder):
    """Each step mixes the policy's shards into a reference model with other units."""
    reference = {"ref_model": models.llama()}
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 1}
    return dpo(folder, reference, loss_type=["ipo"], **synced)


def case_orpo(folder):
    config = ORPOConfig(**settings(folder, max_length=32))
    return trained(ORPOTrainer, config, preferences())[0]


def case_kto(folder):
    config = KTOConfig(**settings(folder, max_length=32))
    completions = texts(seed=5)[:8] + texts(seed=6)[8:]
    data = {"completion": completions, "label": [i % 2 == 0 for i in range(16)]}
    data["prompt"] = texts(length=6, seed=4)
    reference = {"ref_model": models.llama()}
    return trained(KTOTrainer, config, data, of_trainer=reference)[0]


def case_reward(folder):
    config = RewardConfig(**settings(folder, max_length=32))
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(models.llama_config(num_labels=1))
    return trained(RewardTrainer, config, preferences(), model)[0]


def case_distillation(folder):
    """The loss of student and teacher is computed in chunks of their heads."""
    sizes = {"max_steps": 2, "max_completion_length": 6}
    config = DistillationConfig(**settings(folder, **sizes))
    data = {"prompt": texts(length=6, seed=4), "completion": texts(seed=5)}
    teacher = {"teacher_model": models.llama(seed=3)}
    return trained(DistillationTrainer, config, data, of_trainer=teacher)[0]


def reward_length(completions, **more):
    return [float(len(set(text.split()))) for text in completions]


def rewarded(folder, config, trainer):
    """Generates with the sharded model."""
    sizes = {"max_steps": 2, "num_generations": 2, "max_completion_length": 6}
    config = config(**settings(folder, beta=0.0, **sizes))
    data = {"prompt": texts(length=6, seed=4)}
    of_trainer = {"reward_funcs": reward_length}
    return trained(trainer, config, data, of_trainer=of_trainer)[0]


def case_grpo(folder):
    return rewarded(folder, GRPOConfig, GRPOTrainer)


def case_rloo(folder):
    return rewarded(folder, RLOOConfig, RLOOTrainer)
