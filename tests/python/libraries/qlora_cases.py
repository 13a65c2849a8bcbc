"""Adapters of 4-bit bases of bitsandbytes, with FSDP2 and accelerate."""

import hashlib
import inspect

import bitsandbytes as bnb
import torch
from bitsandbytes.nn import modules
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.python.libraries import cpu, models
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


def trained(storage):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(3)
    model = get_peft_model(base(storage), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    before = {
        name: p.data.clone()
        for name, p in model.named_parameters()
        if not p.is_floating_point()
    }
    run = Run(model)
    run.train()
    for name, p in run.model.named_parameters():
        if name in before:
            assert torch.equal(p.data, before[name]), name
    state = run.accelerator.get_state_dict(run.model)
    adapter = {name: value for name, value in state.items() if "lora_" in name}
    return {"losses": run.losses, "norms": run.norms, "adapter": adapter}


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
