"""Adapters of 4-bit bases of torchao (NF4), with FSDP2, accelerate and Trainer."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from tests.python.libraries import cpu, models, trainer_cases
from tests.python.libraries.accelerate_cases import Run

cpu.ranks_as_gpus()


class Nf4Linear(nn.Linear):
    def forward(self, x):
        return linear_nf4(x, self.weight)


def with_adapters():
    """Returns a Llama whose projections of attention have NF4 weights, frozen."""
    model = models.llama().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            quantized = Nf4Linear(linear.in_features, linear.out_features, bias=False)
            # Small blocks, so that two ranks can split them.
            weight = to_nf4(linear.weight.detach(), block_size=8, scaler_block_size=8)
            quantized.weight = nn.Parameter(weight, requires_grad=False)
            setattr(layer.self_attn, name, quantized)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(3)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def adapter_of(model):
    return {
        name: p.full_tensor().detach()
        for name, p in model.named_parameters()
        if "lora_" in name
    }


def case_accelerate(folder):
    run = Run(with_adapters())
    run.train()
    adapter = adapter_of(run.model)
    return {"losses": run.losses, "norms": run.norms, "adapter": adapter}


def case_trainer(folder):
    trainer = trainer_cases.make(folder, with_adapters())
    trainer.train()
    adapter = adapter_of(trainer.model_wrapped)
    seen = trainer.seen
    return {"losses": seen.losses, "norms": seen.norms, "adapter": adapter}
