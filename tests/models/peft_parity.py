#!/usr/bin/env python3
"""LoRA of every family here and in peft: losses, gradients, logits and files.

transformers makes a small random model of each family and peft an adapter of it whose A
and B are both random. `flatshard train` starts from both folders (model.init_from,
lora.init_from_adapter) on two ranks. It runs one step of plain SGD with learning rate
1, so that the adapter's change is its gradient. Loss and gradients have to be those
that transformers and peft compute in float32. peft then loads the adapter that the run
wrote. Its logits have to equal the logits of the folder that `flatshard export --merge`
writes. A second run starts with an adapter that Flatshard initialized and has learning
rate 0. With its adapter, peft has the logits of the base.

Exits with 77 (skipped) without transformers or peft.

usage: peft_parity.py PROGRAM [CASE...]
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

from hf_parity import (
    CASES,
    SEQ_LEN,
    SKIPPED,
    change_weights,
    compare,
    make_model,
    prepare,
    run,
)

CONFIG = """
[run]
output_dir = "{run}"
[model]
init_from = "{weights}"
[lora]
rank = 4
alpha = 6
targets = "{targets}"
{more}
[data]
train = "{corpus}"
[training]
steps = 1
seq_len = {seq_len}
local_batch_size = 1
global_batch_size = 2
max_norm = 0
[optimizer]
name = "sgd"
lr = {lr}
weight_decay = 0
[lr_scheduler]
name = "constant"
[precision]
compute = "float32"
[checkpoint]
interval = 1
"""

ALL = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
ATTENTION = "q_proj, v_proj"
# One case of each family, with the targets of peft and of Flatshard.
TARGETS = {
    "grouped": (ALL.split(), "all-linear"),
    "llama_biases": (["q_proj", "down_proj"], "q_proj, down_proj"),
    "qwen2": (ALL.split(), "all-linear"),
    "qwen3": (ALL.split(), "all-linear"),
    "mistral": ("all-linear", "all-linear"),
    "olmo2": (ALL.split(), "all-linear"),
    "phi3": ("all-linear", "all-linear"),
    "gemma2": (ALL.split(), "all-linear"),
    "gemma3": (ALL.split(), "all-linear"),
    "mixtral": (["q_proj", "v_proj"], ATTENTION),
    "qwen3_moe": (["q_proj", "v_proj"], ATTENTION),
    "gpt_oss": (["q_proj", "v_proj"], ATTENTION),
}
RSLORA = {"qwen2"}
SCALE_OF_B = 0.05


def adapter_of(model, name):
    """A peft model with a random adapter, and the adapter's tensors."""
    import torch
    from peft import LoraConfig, get_peft_model

    with_adapter = get_peft_model(
        model,
        LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=TARGETS[name][0],
            use_rslora=name in RSLORA,
            task_type="CAUSAL_LM",
        ),
    )
    torch.manual_seed(2)
    with torch.no_grad():
        for key, parameter in with_adapter.named_parameters():
            if "lora_B" in key:
                parameter.copy_(SCALE_OF_B * torch.randn_like(parameter))
    return with_adapter


def train(program, folder, name, corpus, run_name, lr, more):
    config = folder / f"{run_name}.toml"
    config.write_text(
        CONFIG.format(
            run=folder / run_name,
            weights=folder / name,
            targets=TARGETS[name][1],
            more="\n".join(more),
            corpus=corpus,
            seq_len=SEQ_LEN,
            lr=lr,
        )
    )
    run(program, "train", config, "--nproc", 2, "--device", "cpu")
    rows = [json.loads(line) for line in (folder / run_name / "metrics.jsonl").open()]
    return next(row["loss"] for row in rows if "loss" in row)


def logits_of(model, tokens):
    """In float64: float32 logits of an adapter and of its merged weights are up to 3e-5
    apart, also with peft's own merge."""
    import torch

    exact = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):
        # transformers 5 uses torch's grouped matmul, and that has no float64.
        exact.set_experts_implementation("eager")
    with torch.no_grad():
        return exact(tokens[:, :-1]).logits


def with_peft(base, folder):
    """transformers' model of a folder with an adapter that peft loads."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return PeftModel.from_pretrained(model, folder)


def try_case(program, folder, data, name, options):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    corpus, tokens = data
    rslora = ["rslora = true"] if name in RSLORA else []
    model = make_model(options, hidden_size=64, intermediate_size=112)
    change_weights(model)
    model.save_pretrained(folder / name)
    base_logits = logits_of(model, tokens)
    model = adapter_of(model, name)
    started = folder / f"{name}-adapter"
    model.save_pretrained(started)
    before = load_file(started / "adapter_model.safetensors")

    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:])
    loss.backward()
    theirs = {
        key.replace(".default.", "."): parameter.grad
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    }

    start = [f'init_from_adapter = "{started}"', *rslora]
    found = train(program, folder, name, corpus, f"{name}-run", 1, start)
    compare(f"{name}: the loss", found, loss.item(), loss.item())
    after = load_file(folder / f"{name}-run" / "adapter_model.safetensors")
    if set(after) != set(before) or set(theirs) != set(before):
        sys.exit(f"FAILED {name}: {sorted(after)} are not {sorted(before)}")
    largest = max(grad.abs().max().item() for grad in theirs.values())
    furthest = 0.0
    for key, grad in theirs.items():
        apart = ((before[key] - after[key]) - grad).abs().max().item()
        furthest = max(furthest, apart / largest)
        compare(f"{name}: the gradient of {key}", apart, 0.0, largest)

    trained = with_peft(folder / name, folder / f"{name}-run")
    logits = logits_of(trained, tokens)
    moved = (logits - base_logits).abs().max().item()
    if moved < 100 * 1e-5 * base_logits.abs().max().item():
        sys.exit(f"FAILED {name}: the adapter changes nothing")
    merged = folder / f"{name}-merged"
    run(program, "export", "--run", folder / f"{name}-run", "--to", merged, "--merge")
    again = AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager")
    apart = (logits_of(again, tokens) - logits).abs().max().item()
    compare(f"{name}: merged logits", apart, 0.0, logits.abs().max().item())

    # B is initialized to zeros.
    train(program, folder, name, corpus, f"{name}-new", 0, rslora)
    fresh = logits_of(with_peft(folder / name, folder / f"{name}-new"), tokens)
    apart = (fresh - base_logits).abs().max().item()
    compare(f"{name}: logits of a new adapter", apart, 0.0, base_logits.abs().max())
    new = load_file(folder / f"{name}-new" / "adapter_model.safetensors")
    for key, tensor in new.items():
        if tensor.shape != before[key].shape or ("lora_A" in key) != bool(tensor.any()):
            sys.exit(f"FAILED {name}: {key} of a new adapter")
    print(
        f"{name}: loss {found:.6f}, {len(theirs)} gradients, {furthest:.1e} apart, "
        "same logits"
    )


def main():
    try:
        import peft  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        print(f"skipped: {error}")
        return SKIPPED
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    program = str(Path(sys.argv[1]).resolve())
    only = sys.argv[2:]  # names of cases; all without one
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare(program, folder)
        for case in TARGETS:
            if not only or case in only:
                try_case(program, folder, data, case, CASES[case])
    return 0


if __name__ == "__main__":
    sys.exit(main())
