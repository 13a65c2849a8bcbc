"""accelerate with FSDP2."""

import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from tests.python import ring_attention
from tests.python.libraries import cpu, models

cpu.ranks_as_gpus()


class Run:
    """A model, its optimizer, scheduler and data, prepared by an Accelerator."""

    def __init__(self, model=None, plugin={}, optimizer=None, batch=2, **accelerator):
        settings = {
            "auto_wrap_policy": "transformer_based_wrap",
            "cpu_ram_efficient_loading": False,
            **plugin,
        }
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
        self.accelerator = Accelerator(fsdp_plugin=plugin, **accelerator)
        model = models.llama() if model is None else model
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2))
        optimizer = optimizer(trained)
        scheduler = get_linear_schedule_with_warmup(optimizer, 2, 40)
        loader = DataLoader(models.token_dataset(), batch_size=batch)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.losses, self.norms = [], []

    def step(self, ids, clip=True):
        loss = self.model(input_ids=ids, labels=ids).loss
        self.accelerator.backward(loss)
        if clip and self.accelerator.sync_gradients:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            self.norms.append(norm.item())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        mean = self.accelerator.reduce(loss.detach().clone(), "mean")
        self.losses.append(mean.item())

    def train(self, steps=6, **more):
        """Returns the losses of the next steps."""
        done = 0
        while True:
            for (ids,) in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.step(ids, **more)
                done += 1
                if done == steps:
                    return self.losses[-steps:]

    def found(self, **more):
        weights = models.full_weights(self.model)
        return {"losses": self.losses, "norms": self.norms, "weights": weights, **more}


def trained(*args, steps=6, **more):
    run = Run(*args, **more)
    run.train(steps)
    return run.found()


def case_plain(folder):
    return trained()


def case_no_wrap(folder):
    return trained(plugin={"auto_wrap_policy": "no_wrap"})


def case_tied(folder):
    return trained(models.llama(tied=True))


def case_reshard_after_forward_false(folder):
    return trained(plugin={"reshard_after_forward": False})


def case_accumulate(folder):
    return trained(gradient_accumulation_steps=2, steps=8)


def case_no_sync(folder):
    run = Run()
    batches = [batch for (batch,) in run.loader]
    for first, second in zip(batches[::2], batches[1::2]):
        with run.accelerator.no_sync(run.model):
            run.accelerator.backward(run.model(input_ids=first, labels=first).loss)
        run.step(second)
    return run.found()


def case_without_clip(folder):
    run = Run()
    run.train(clip=False)
    return run.found()


def case_bf16(folder):
    return trained(mixed_precision="bf16")


def case_bf16_model(folder):
    model = models.llama(dtype=torch.bfloat16)
    return trained(model, mixed_precision="bf16")


def case_autocast(folder):
    run = Run()
    for (ids,) in run.loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.step(ids)
    return run.found()


def case_activation_checkpointing(folder):
    return trained(plugin={"activation_checkpointing": True})


def case_cpu_ram_efficient_loading(folder):
    # Only rank 0's values are used.
    model = models.llama(seed=cpu.rank())
    return trained(model, plugin={"cpu_ram_efficient_loading": True})


def case_cpu_ram_efficient_loading_tied(folder):
    model = models.llama(tied=True, seed=cpu.rank())
    return trained(model, plugin={"cpu_ram_efficient_loading": True})


def case_cpu_ram_efficient_loading_bf16(folder):
    model = models.llama(dtype=torch.bfloat16, seed=cpu.rank())
    plugin = {"cpu_ram_efficient_loading": True}
    return trained(model, plugin=plugin, mixed_precision="bf16")


def case_sgd_momentum(folder):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)

    return trained(optimizer=sgd)


def case_adamw_fused(folder):
    return trained(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))


def case_parameter_groups(folder):
    def optimizer(parameters):
        decayed = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)

    return trained(optimizer=optimizer)


def case_frozen_layers(folder):
    model = models.llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return trained(model)


def case_ignored_modules(folder):
    return trained(plugin={"ignored_modules": r".*model\.norm"})


def case_hsdp(folder):
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    return trained(parallelism_config=mesh, batch=1, steps=4)


case_hsdp.ranks = 4


def case_hsdp_save_state(folder):
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    run = Run(
        plugin={"state_dict_type": "SHARDED_STATE_DICT"},
        parallelism_config=mesh,
        batch=1,
    )
    run.train(2)
    run.accelerator.save_state(f"{folder}/saved")
    second = run.train(2)
    run.accelerator.load_state(f"{folder}/saved")
    assert run.train(2) == second
    return run.found()


case_hsdp_save_state.ranks = 4


def context_parallel(cp, steps=4, **more):
    """Trains under accelerate's context parallelism, and in one process.

    A rank divides the sum of its losses by the number of targets of all ranks. Gradients
    are averaged over the ranks, so the loss is multiplied by their number.
    """
    ring_attention.use_on_cpus()
    ranks = torch.distributed.get_world_size()
    mesh = ParallelismConfig(cp_size=cp, dp_shard_size=ranks // cp)
    run = Run(parallelism_config=mesh, batch=1, optimizer=sgd, **more)
    alone = models.llama()
    optimizer = sgd(alone.parameters())
    # The warm-up starts at 0.
    run.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    expected = []
    for step in range(steps):
        rows = models.token_rows(n=ranks // cp, length=16, seed=step)
        labels = nn.functional.pad(rows, (0, 1), value=-100)[:, 1:].clone()
        if step == 0:  # one target, on one rank
            labels[:, 1:] = labels[1:] = -100
        targets = (labels != -100).sum()
        positions = torch.arange(rows.shape[1]).expand(rows.shape)
        buffers = [t[cpu.rank() // cp, None].clone() for t in (rows, labels, positions)]
        with run.accelerator.maybe_context_parallel(
            buffers=buffers,
            buffer_seq_dims=[1, 1, 1],
            no_restore_buffers=set(buffers),
        ):
            loss = sum_of_losses(run.model, *buffers) / targets
            run.accelerator.backward(loss * ranks)
        norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.norms.append(norm.full_tensor().item())
        run.losses.append(run.accelerator.reduce(loss.detach(), "sum").item())
        loss = sum_of_losses(alone, rows, labels, positions) / targets
        loss.backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss.item(), norm.item()))
    found = list(zip(run.losses, run.norms))
    assert found == [pytest.approx(row, rel=1e-5) for row in expected]
    return run


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def sum_of_losses(model, rows, labels, positions):
    logits = model(input_ids=rows, position_ids=positions).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def case_context_parallel(folder):
    return context_parallel(2).found()


def case_context_parallel_activation_checkpointing(folder):
    return context_parallel(2, plugin={"activation_checkpointing": True}).found()


def case_context_parallel_and_data_parallel(folder):
    return context_parallel(2).found()


case_context_parallel_and_data_parallel.ranks = 4


def case_context_parallel_save_state(folder):
    """Two ranks without context parallelism read what two ranks with it have saved."""
    plugin = {"state_dict_type": "SHARDED_STATE_DICT"}
    run = context_parallel(2, plugin=plugin)
    run.accelerator.save_state(f"{folder}/saved")
    run.accelerator.wait_for_everyone()
    expected = models.full_weights(run.model)
    cpu.reset_accelerate()
    again = Run(models.llama(seed=5), plugin, optimizer=sgd)
    again.accelerator.load_state(f"{folder}/saved")
    read = models.full_weights(again.model)
    assert all(torch.equal(value, read[name]) for name, value in expected.items())
    again.train(2)
    return {"first": run.found(), "second": again.found()}


def case_prepare_twice(folder):
    run = Run()
    run.train(2)
    model, optimizer = run.accelerator.prepare(run.model, run.optimizer)
    assert model is run.model
    run.optimizer = optimizer
    run.train(2)
    # With another optimizer, as a second Trainer.train() has.
    run.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.optimizer, run.model = run.accelerator.prepare(run.optimizer, run.model)
    run.scheduler = get_linear_schedule_with_warmup(run.optimizer, 2, 40)
    run.train(3)
    return run.found()


def with_optimizer_of_flatshard(folder, optimizer):
    """Trains with an optimizer that `prepare` gives sharded parameters, and with one that
    is made of them; saves, and resumes."""
    found = save_and_resume(
        folder, "SHARDED_STATE_DICT", model=models.wide_llama, optimizer=optimizer
    )
    cpu.reset_accelerate()
    after = Run(models.wide_llama())
    made = optimizer(list(after.model.parameters()))
    scheduler = get_linear_schedule_with_warmup(made, 2, 40)
    after.optimizer, after.model, after.scheduler = after.accelerator.prepare(
        made, after.model, scheduler
    )
    assert after.train(3) == found["losses"][:3]
    assert models.has_int8_states(made) == (optimizer is models.int8_adamw)
    return found


def case_int8_adamw_of_flatshard(folder):
    return with_optimizer_of_flatshard(folder, models.int8_adamw)


def case_muon_of_flatshard(folder):
    return with_optimizer_of_flatshard(folder, models.muon)


def save_and_resume(
    folder, state_dict_type, model=models.llama, optimizer=None, **plugin
):
    """Trains, saves, trains on; then resumes in the same run and in a new one."""
    plugin = {"state_dict_type": state_dict_type, **plugin}
    run = Run(model(), plugin=plugin, optimizer=optimizer)
    run.train(3)
    run.accelerator.save_state(f"{folder}/saved")
    run.accelerator.wait_for_everyone()
    files = sorted(os.listdir(f"{folder}/saved"))
    expected = run.train(3)
    weights = models.full_weights(run.model)
    run.accelerator.load_state(f"{folder}/saved")
    assert run.train(3) == expected
    cpu.reset_accelerate()
    again = Run(model(seed=5), plugin, optimizer)
    again.accelerator.load_state(f"{folder}/saved")
    assert again.train(3) == expected
    resumed = models.full_weights(again.model)
    assert all(torch.equal(value, resumed[name]) for name, value in weights.items())
    return run.found(files=files)


def case_save_state_sharded(folder):
    return save_and_resume(folder, "SHARDED_STATE_DICT")


def case_save_state_full(folder):
    return save_and_resume(folder, "FULL_STATE_DICT")


def case_save_state_sharded_ram_efficient(folder):
    ram = {"cpu_ram_efficient_loading": True}
    return save_and_resume(folder, "SHARDED_STATE_DICT", **ram)


class Averaged:
    """Averaged weights (EMA), from shards."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.values = [p.detach().clone() for p in self.parameters]

    def update(self):
        now = [p.detach() for p in self.parameters]
        torch._foreach_lerp_(self.values, now, 0.1)

    @torch.no_grad()
    def swap(self):
        for p, value in zip(self.parameters, self.values):
            former = p.detach().clone()
            p.copy_(value)
            value.copy_(former)

    def state_dict(self):
        return {str(i): value.full_tensor() for i, value in enumerate(self.values)}

    def load_state_dict(self, state):
        for i, value in enumerate(self.values):
            full = state[str(i)]
            value.copy_(distribute_tensor(full, value.device_mesh, value.placements))


def case_averaged_weights(folder):
    """Saved in the middle of an epoch, and put in place of the weights."""
    run = Run(plugin={"state_dict_type": "SHARDED_STATE_DICT"})
    averaged = Averaged(run.model)
    run.accelerator.register_for_checkpointing(averaged)

    def train(loader):
        for (ids,), _ in zip(loader, range(2)):
            run.step(ids)
            averaged.update()
        return run.losses[-2:], averaged.state_dict()

    train(run.loader)
    run.accelerator.save_state(f"{folder}/saved")
    losses, expected = train(run.accelerator.skip_first_batches(run.loader, 2))
    run.accelerator.load_state(f"{folder}/saved")
    again, found = train(run.accelerator.skip_first_batches(run.loader, 2))
    assert again == losses
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    averaged.swap()
    swapped = models.full_weights(run.model)
    averaged.swap()
    run.train(2)
    return run.found(averaged=found, swapped=swapped)


def case_save_model(folder):
    from safetensors.torch import load_file

    run = Run()
    run.train(2)
    accelerator, model = run.accelerator, run.model
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, f"{folder}/model")
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.wait_for_everyone()
    name = "model.safetensors"
    saved = {
        kind: load_file(f"{folder}/{kind}/{name}") for kind in ("model", "pretrained")
    }
    return run.found(saved=saved, state=state)


def case_merge_weights(folder):
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    run = Run(plugin={"state_dict_type": "SHARDED_STATE_DICT"})
    run.train(2)
    run.accelerator.save_state(f"{folder}/saved")
    run.accelerator.wait_for_everyone()
    merge_fsdp_weights(f"{folder}/saved/pytorch_model_fsdp_0", f"{folder}/merged")
    run.accelerator.wait_for_everyone()
    return run.found(merged=load_file(f"{folder}/merged/model.safetensors"))


def case_evaluate(folder):
    run = Run()
    run.train(3)
    data = DataLoader(models.token_dataset(n=11, seed=9), batch_size=2)
    data = run.accelerator.prepare(data)
    seen, losses = [], []
    run.model.eval()
    for (ids,) in data:
        with torch.no_grad():
            out = run.model(input_ids=ids, labels=ids)
        guessed = out.logits.argmax(-1)
        guessed, ids = run.accelerator.gather_for_metrics((guessed, ids))
        seen.append([guessed.tolist(), list(ids.shape)])
        losses.append(out.loss.item())
    run.model.train()
    run.train(2)
    return run.found(seen=seen, evaluated=losses)


def case_generate(folder):
    run = Run()
    run.train(3)
    model = run.accelerator.unwrap_model(run.model)
    prompts = torch.tensor([[3, 1, 2], [5, 4, 7]])
    with torch.no_grad():
        texts = model.generate(
            prompts, max_new_tokens=4, do_sample=False, synced_gpus=True
        )
    run.train(2)
    return run.found(texts=texts.tolist())


def case_encoder_decoder(folder):
    """T5's encoder, decoder and head share an embedding: one process's losses."""
    model = models.t5()
    rows = models.token_rows().chunk(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 40)
    expected = []
    for ids in rows:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for _ in range(2):  # accelerate does so for two ranks
            scheduler.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    run = Run(models.t5(), {"state_dict_type": "SHARDED_STATE_DICT"})
    assert run.train(4) == pytest.approx(expected, rel=1e-5)
    run.accelerator.save_state(f"{folder}/saved")
    later = run.train(2)
    run.accelerator.load_state(f"{folder}/saved")
    assert run.train(2) == later
    return run.found()


def lora(model=None, target_modules=("q_proj", "v_proj"), **more):
    """Returns a model with adapters whose values differ from zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, target_modules=list(target_modules), task_type="CAUSAL_LM", **more
    )
    model = get_peft_model(models.llama() if model is None else model, config)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def case_lora(folder):
    run = Run(lora())
    run.train()
    accelerator = run.accelerator
    accelerator.save_state(f"{folder}/saved")
    expected = run.train(2)
    accelerator.load_state(f"{folder}/saved")
    assert run.train(2) == expected
    state = accelerator.get_state_dict(run.model)
    accelerator.unwrap_model(run.model).save_pretrained(
        f"{folder}/adapter",
        is_main_process=accelerator.is_main_process,
        state_dict=state,
    )
    accelerator.wait_for_everyone()
    from safetensors.torch import load_file

    return run.found(adapter=load_file(f"{folder}/adapter/adapter_model.safetensors"))


def case_lora_bf16_base(folder):
    model = lora(models.llama(dtype=torch.bfloat16))
    return trained(model, mixed_precision="bf16")


def case_teacher(folder):
    """A frozen model that the program shards itself."""
    from torch.distributed.fsdp import fully_shard

    run = Run()
    teacher = models.llama(seed=4).eval().requires_grad_(False)
    fully_shard(teacher)
    for (ids,) in run.loader:
        with torch.no_grad():
            target = teacher(input_ids=ids).logits.log_softmax(-1)
        logits = run.model(input_ids=ids).logits.log_softmax(-1)
        loss = nn.functional.kl_div(
            logits, target, log_target=True, reduction="batchmean"
        )
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.losses.append(run.accelerator.reduce(loss.detach().clone()).item())
    return run.found()
