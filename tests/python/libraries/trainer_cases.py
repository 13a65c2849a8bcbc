"""transformers' Trainer with FSDP2, versions 4.57 and 5."""

import os

import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.python import ring_attention
from tests.python.libraries import cpu, models

cpu.ranks_as_gpus()

IS_5 = int(transformers.__version__.split(".")[0]) >= 5
# Version 4 has no setting for it.
os.environ["FSDP_VERSION"] = "2"


class Rows(torch.utils.data.Dataset):
    def __init__(self, n=16, seed=1):
        self.rows = models.token_rows(n=n, seed=seed)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Seen(TrainerCallback):
    """Keeps the losses and norms that a Trainer logs."""

    def __init__(self):
        self.losses, self.norms, self.evaluated = [], [], []

    def on_log(self, args, state, control, logs=None, **more):
        for key, values in (
            ("loss", self.losses),
            ("grad_norm", self.norms),
            ("eval_loss", self.evaluated),
        ):
            if key in logs:
                values.append(float(logs[key]))


def arguments(folder, state_dict="FULL_STATE_DICT", fsdp_config={}, **more):
    os.environ["FSDP_STATE_DICT_TYPE"] = state_dict  # for version 4
    config = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", **fsdp_config}
    if IS_5:
        config |= {"version": 2, "state_dict_type": state_dict}
    settings = {
        "output_dir": folder,
        "max_steps": 6,
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
        "fsdp": True if IS_5 else "full_shard auto_wrap",
        "fsdp_config": config,
        **more,
    }
    if not settings["fsdp"]:
        del settings["fsdp_config"]
    return TrainingArguments(**settings)


def make(folder, model=None, trainer=Trainer, of_trainer={}, **more):
    seen = Seen()
    made = trainer(
        model=models.llama() if model is None else model,
        args=arguments(folder, **more),
        train_dataset=Rows(),
        eval_dataset=Rows(n=8, seed=7),
        callbacks=[seen],
        **of_trainer,
    )
    made.seen = seen
    return made


def found(trainer, **more):
    seen = trainer.seen
    return {
        "losses": seen.losses,
        "norms": seen.norms,
        "evaluated": seen.evaluated,
        "weights": models.full_weights(trainer.model_wrapped),
        **more,
    }


def trained(folder, *args, **more):
    trainer = make(folder, *args, **more)
    trainer.train()
    return found(trainer)


def case_train(folder):
    return trained(folder)


def case_tied(folder):
    return trained(folder, models.llama(tied=True))


def case_accumulate(folder):
    return trained(folder, gradient_accumulation_steps=2)


def case_bf16(folder):
    return trained(folder, bf16=True)


def case_evaluate_while_training(folder):
    return trained(folder, eval_strategy="steps", eval_steps=2)


def case_predict(folder):
    trainer = make(folder)
    trainer.train()
    logits = trainer.predict(Rows(n=8, seed=7)).predictions
    return found(trainer, logits=torch.from_numpy(logits))


def case_activation_checkpointing(folder):
    return trained(folder, fsdp_config={"activation_checkpointing": True})


def case_gradient_checkpointing(folder):
    return trained(folder, gradient_checkpointing=True)


def case_cpu_ram_efficient_loading(folder):
    config = {"cpu_ram_efficient_loading": True, "sync_module_states": True}
    return trained(folder, models.llama(seed=cpu.rank()), fsdp_config=config)


def case_adafactor(folder):
    return trained(folder, optim="adafactor")


def case_sgd_with_label_smoothing(folder):
    return trained(folder, optim="sgd", label_smoothing_factor=0.1)


def case_own_loss(folder):
    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **more):
            outputs = model(**inputs)
            loss = outputs.loss + 0.01 * outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    return trained(folder, trainer=OwnLoss)


def case_callback_reads_weights(folder):
    class Reads(TrainerCallback):
        sums = []

        def on_step_end(self, args, state, control, model=None, **more):
            weight = model.model.norm.weight
            self.sums.append(weight.full_tensor().sum().item())

    trainer = make(folder)
    trainer.add_callback(Reads())
    trainer.train()
    return found(trainer, sums=Reads.sums)


def case_callback_writes_weights(folder):
    class Writes(TrainerCallback):
        norms = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **more):
            norms = [p.grad.norm().full_tensor().item() for p in model.parameters()]
            self.norms.append(norms)

        def on_step_end(self, args, state, control, model=None, **more):
            for p in model.parameters():
                p.data.mul_(0.98)
                p.data.clamp_(-0.3, 0.3)

    trainer = make(folder)
    trainer.add_callback(Writes())
    trainer.train()
    return found(trainer, of_parameters=Writes.norms)


def case_train_twice(folder):
    trainer = make(folder, max_steps=3)
    trainer.train()
    trainer.train()
    return found(trainer)


def resumed(folder, state_dict, model=models.llama, **more):
    """Trains 6 steps, and again 3 and 3 from a checkpoint."""
    more["state_dict"] = state_dict
    whole = make(f"{folder}/whole", model(), **more)
    whole.train()
    expected = found(whole)
    cpu.reset_accelerate()
    saves = {"save_strategy": "steps", "save_steps": 3}
    first = make(f"{folder}/parts", model(), **saves, **more)
    first.train()
    assert first.seen.losses == expected["losses"]
    cpu.reset_accelerate()
    second = make(f"{folder}/parts", model(seed=9), **more)
    second.train(resume_from_checkpoint=f"{folder}/parts/checkpoint-3")
    got = found(second)
    assert got["losses"] == expected["losses"][3:], (got["losses"], expected["losses"])
    for name, weight in expected["weights"].items():
        assert torch.equal(weight, got["weights"][name]), name
    files = sorted(os.listdir(f"{folder}/parts/checkpoint-3"))
    return {**expected, "files": files}


def case_resume_full(folder):
    return resumed(folder, "FULL_STATE_DICT")


def case_resume_sharded(folder):
    return resumed(folder, "SHARDED_STATE_DICT")


def with_optimizer_of_flatshard(folder, optimizer, state_dict):
    """Trains with an optimizer that Trainer gives sharded parameters, and with one that is
    made of them; saves, and resumes."""

    class Own(Trainer):
        def create_optimizer(self, *args):
            self.optimizer = optimizer(list(self.model.parameters()))
            return self.optimizer

    class MadeAfter(TrainerCallback):
        def on_train_begin(self, args, state, control, **more):
            made = optimizer(list(more["model"].parameters()))
            more["optimizer"].optimizer = made

    more = {"lr_scheduler_type": "constant"}
    after = make(f"{folder}/after", models.wide_llama(), **more)
    after.add_callback(MadeAfter())
    after.train()
    cpu.reset_accelerate()
    found = resumed(folder, state_dict, models.wide_llama, trainer=Own, **more)
    assert after.seen.losses == found["losses"]
    made = after.optimizer.optimizer
    assert models.has_int8_states(made) == (optimizer is models.int8_adamw)
    return found


def case_int8_adamw_of_flatshard(folder):
    return with_optimizer_of_flatshard(folder, models.int8_adamw, "FULL_STATE_DICT")


def case_muon_of_flatshard(folder):
    return with_optimizer_of_flatshard(folder, models.muon, "SHARDED_STATE_DICT")


def best(folder, state_dict):
    steps = {"save_strategy": "steps", "save_steps": 2}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = make(
        folder,
        state_dict=state_dict,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        # The first checkpoint is the best one.
        greater_is_better=True,
        **steps,
        **evaluation,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    return found(trainer, after=trainer.evaluate()["eval_loss"])


def case_best_model_full(folder):
    return best(folder, "FULL_STATE_DICT")


def case_best_model_sharded(folder):
    return best(folder, "SHARDED_STATE_DICT")


def case_save_model(folder):
    from safetensors.torch import load_file

    trainer = make(folder)
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    trainer.accelerator.wait_for_everyone()
    saved = load_file(f"{folder}/saved/model.safetensors")
    weights = models.full_weights(trainer.model_wrapped)
    for name, weight in weights.items():
        assert torch.equal(saved[name], weight), name
    return found(trainer, saved=saved)


def case_lora(folder):
    """Trains an adapter, saves it, and resumes."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    def adapted():
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        torch.manual_seed(4)
        return get_peft_model(models.llama(), config)

    saves = {"save_strategy": "steps", "save_steps": 3}
    whole = make(folder, adapted(), **saves)
    whole.train()
    whole.save_model(f"{folder}/saved")
    whole.accelerator.wait_for_everyone()
    saved = load_file(f"{folder}/saved/adapter_model.safetensors")
    expected = found(whole, saved=saved)
    cpu.reset_accelerate()
    second = make(f"{folder}/second", adapted())
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    assert second.seen.losses == expected["losses"][3:]
    return expected


def from_distributed_config(folder, tied=False, of_config={}, **more):
    """A model that transformers shards when it loads it."""
    return loaded_sharded(folder, models.llama(tied=tied), of_config, **more)


def loaded_sharded(folder, model, of_config, **more):
    from transformers.distributed import DistributedConfig

    if cpu.rank() == 0:
        model.save_pretrained(f"{folder}/pretrained")
    torch.distributed.barrier()
    sizes = {"fsdp_size": torch.distributed.get_world_size(), **of_config}
    return type(model).from_pretrained(
        f"{folder}/pretrained", distributed_config=DistributedConfig(**sizes), **more
    )


def own_loop(model, steps=5, tp=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.distributed.get_world_size() // tp
    rows = models.token_rows(n=batches * steps).chunk(batches)[cpu.rank() // tp]
    losses = []
    for row in rows:
        loss = model(input_ids=row[None], labels=row[None]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": models.full_weights(model)}


def only_5(case):
    if IS_5:
        globals()[f"case_{case.__name__}"] = case
    return case


@only_5
def distributed_config(folder):
    return own_loop(from_distributed_config(folder))


@only_5
def distributed_config_mixed_precision(folder):
    return own_loop(
        from_distributed_config(folder, of_config={"fsdp_mixed_precision": True})
    )


@only_5
def distributed_config_save(folder):
    from safetensors.torch import load_file

    model = from_distributed_config(folder)
    expected = own_loop(model)
    model.save_pretrained(f"{folder}/saved")
    torch.distributed.barrier()
    return {**expected, "saved": load_file(f"{folder}/saved/model.safetensors")}


@only_5
def distributed_config_trainer(folder):
    model = from_distributed_config(folder)
    return trained(folder, model, fsdp=False)


@only_5
def distributed_config_tied(folder):
    """transformers ties parameters of two units after it sharded them. FSDP2 trains with
    two copies, Flatshard raises."""
    model = from_distributed_config(folder, tied=True)
    error = ""
    try:
        own_loop(model)
    except ValueError as raised:
        error = str(raised)
    assert "share values" in error or models.sharded_by(model) == "torch"
    return {}


@only_5
def distributed_config_generate(folder):
    model = from_distributed_config(folder)
    expected = own_loop(model)
    prompts = torch.tensor([[3, 1, 2], [5, 4, 7]])
    with torch.no_grad():
        texts = model.generate(prompts, max_new_tokens=4, do_sample=False)
    return {**expected, "texts": texts.tolist()}


def on_4_ranks(case):
    case.ranks = 4
    return case


def with_experts(folder, **of_config):
    """Experts are DTensors over "ep", and sharded over "efsdp" of a mesh of their own."""
    return loaded_sharded(folder, models.qwen3_moe(), of_config)


@only_5
@on_4_ranks
def distributed_config_experts(folder):
    return own_loop(with_experts(folder, ep_size=2))


@only_5
@on_4_ranks
def distributed_config_experts_of_one_rank(folder):
    return own_loop(with_experts(folder, ep_size=4))


@only_5
@on_4_ranks
def distributed_config_experts_hsdp(folder):
    return own_loop(with_experts(folder, fsdp_size=2, dp_replicate_size=2, ep_size=2))


@only_5
@on_4_ranks
def distributed_config_experts_tensor_parallel(folder):
    return own_loop(with_experts(folder, fsdp_size=2, tp_size=2, ep_size=4), tp=2)


@only_5
@on_4_ranks
def distributed_config_experts_save(folder):
    from safetensors.torch import load_file

    model = with_experts(folder, ep_size=2)
    expected = own_loop(model)
    model.save_pretrained(f"{folder}/saved")
    torch.distributed.barrier()
    return {**expected, "saved": load_file(f"{folder}/saved/model.safetensors")}


@only_5
@on_4_ranks
def distributed_config_experts_trainer(folder):
    return trained(folder, with_experts(folder, ep_size=2), fsdp=False)


def context_parallel(folder):
    """Trains with half of each sequence on a rank, and with full sequences on as many
    ranks. A step has the same rows. Some have a tenth of the others' targets."""
    from accelerate.utils import ParallelismConfig

    ring_attention.use_on_cpus()
    rows = models.token_rows(n=32)
    labels = rows.clone()
    labels[::3, 2:] = -100
    data = [{"input_ids": row, "labels": of_row} for row, of_row in zip(rows, labels)]

    def train(batch, **more):
        more = {"per_device_train_batch_size": batch, "optim": "sgd", **more}
        trainer = make(folder, max_steps=4, **more)
        trainer.train_dataset = data
        trainer.train()
        cpu.reset_accelerate()
        return found(trainer)

    shards = torch.distributed.get_world_size() // 2
    mesh = ParallelismConfig(cp_size=2, dp_shard_size=shards)
    split, whole = train(2, parallelism_config=mesh), train(1)
    assert split["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert split["norms"] == pytest.approx(whole["norms"], rel=1e-5)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(split["weights"][name], weight)
    return split


def case_context_parallel(folder):
    return context_parallel(folder)


@on_4_ranks
def case_context_parallel_and_data_parallel(folder):
    return context_parallel(folder)
