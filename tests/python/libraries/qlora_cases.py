"""Adapters of 4-bit bases of bitsandbytes, with FSDP2 and accelerate."""

import hashlib
import inspect

import bitsandbytes as bnb
import torch
from bitsandbytes.nn import modules
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.python.libraries import cpu, models, trainer_cases
from tests.python.libraries.accelerate_cases import Run

cpu.ranks_as_gpus()


def base(storage):
    """Returns a Llama whose projections have 4-bit weights, stored as `storage`."""
    model = models.llama()
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Linear):
                    continue
                quantized = bnb.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=torch.float32,
                    quant_type="nf4",
                    quant_storage=storage,
                )
                quantized.load_state_dict(child.state_dict())
                setattr(parent, name, quantized.to("cpu"))
    return model.requires_grad_(False)


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def with_adapters(storage):
    torch.manual_seed(3)
    model = get_peft_model(base(storage), LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def integers_of(model):
    return {
        name: p.data.clone()
        for name, p in model.named_parameters()
        if not p.is_floating_point()
    }


def check_unchanged(model, before):
    for name, p in model.named_parameters():
        if name in before:
            assert torch.equal(p.data, before[name]), name


def adapter_of(accelerator, model):
    state = accelerator.get_state_dict(model)
    return {name: value for name, value in state.items() if "lora_" in name}


def trained(storage):
    model = with_adapters(storage)
    before = integers_of(model)
    run = Run(model)
    run.train()
    check_unchanged(run.model, before)
    adapter = adapter_of(run.accelerator, run.model)
    return {"losses": run.losses, "norms": run.norms, "adapter": adapter}


def trained_by(trainer, before):
    trainer.train()
    check_unchanged(trainer.model, before)
    return {
        "losses": trainer.seen.losses,
        "norms": trainer.seen.norms,
        "adapter": adapter_of(trainer.accelerator, trainer.model_wrapped),
    }


def case_versions_of_the_patch(folder):
    """The patched function is one that the patch was tried with."""
    function = modules.fix_4bit_weight_quant_state_from_module
    source = inspect.getsource(inspect.unwrap(function))
    if function is not inspect.unwrap(function):
        from flatshard_as_fsdp2.bitsandbytes_weights import TRIED

        digest = hashlib.sha256(source.encode()).hexdigest()
        assert TRIED[bnb.__version__] == digest, digest
    return {"source": source}


def case_stored_as_integers(folder):
    return trained(torch.uint8)


def case_stored_as_float32(folder):
    return trained(torch.float32)


def case_trainer_with_integers(folder):
    model = with_adapters(torch.uint8)
    before = integers_of(model)
    return trained_by(trainer_cases.make(folder, model), before)


def case_trainer_with_float32(folder):
    return trained_by(trainer_cases.make(folder, with_adapters(torch.float32)), {})


def case_sft(folder):
    """SFTTrainer makes the adapters, and saves them."""
    from safetensors.torch import load_file

    from tests.python.libraries import trl_cases

    found, trainer = trl_cases.sft(folder, base(torch.uint8), {"peft_config": LORA})
    trainer.save_model(f"{folder}/saved")
    trainer.accelerator.wait_for_everyone()
    saved = load_file(f"{folder}/saved/adapter_model.safetensors")
    return {"losses": found["losses"], "norms": found["norms"], "saved": saved}


def case_another_precision(folder):
    """A cast would change the bytes of the weights: FSDP2 does it, Flatshard raises."""
    model = get_peft_model(base(torch.float32), LoraConfig(target_modules=["q_proj"]))
    error = ""
    try:
        run = Run(model, mixed_precision="bf16")
    except ValueError as raised:
        error = str(raised)
    assert "bnb_4bit_quant_storage" in error or models.sharded_by(run.model) == "torch"
    return {}
