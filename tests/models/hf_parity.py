#!/usr/bin/env python3
"""Llama, Mixtral and Qwen3-MoE here and in transformers: the same loss and gradients.

With the transformers that is installed, 4.57 or 5.17. transformers makes small random Llamas (grouped heads, tied and untied
embeddings, Llama-3 rope scaling) and models with experts, and saves them. `flatshard train` starts from
each folder (model.init_from) on two ranks and takes one step with learning rate
zero on a corpus of one sequence; its loss and the norm of every gradient have to
be those that transformers computes, and LOGITS_PROGRAM (build/tests/llama_logits)
gives the logits and the gradients' elements on one rank. `flatshard export` then writes a folder that
transformers loads, with identical logits, and whose tensors are byte for byte those
that it began with.

With --gpu instead: the same models, wider, answer in bfloat16 on a GPU. The
logits of LOGITS_PROGRAM and those of transformers
are both compared with transformers' in float32 on the CPU, from the same
weights; ours may be as far from them as theirs, see BF16_FACTOR.

Exits with 77 (skipped) without transformers, and with --gpu without a GPU.

usage: hf_parity.py PROGRAM LOGITS_PROGRAM
       hf_parity.py --gpu LOGITS_PROGRAM [--device cpu]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
SEQ_LEN = 96
# float32 sums in another order, relative to the largest gradient norm.
TOLERANCE = 1e-5
# Both sides round the same values to bfloat16 at nearly the same places, so
# their errors are random with the same variance. Ours rounds at fewer places
# (norm with residual and SwiGLU are one kernel each) and sums matrix products
# in another order; half as much again is room for where it does so, and the
# error of another formula is many times as large.
BF16_FACTOR = 1.5
# A logit is rounded itself: by half a unit of eight bits, at most.
BF16_UNIT = 2.0**-9
# Or the bound above would let everything pass.
LARGEST_BF16_ERROR = 0.05

CONFIG = """
[run]
output_dir = "{run}"
[model]
init_from = "{weights}"
[data]
train = "{corpus}"
[training]
steps = 1
seq_len = {seq_len}
local_batch_size = 1
global_batch_size = 2
max_norm = 0
[optimizer]
lr = 0
[precision]
compute = "float32"
[checkpoint]
interval = 1
[diagnostics]
norms_freq = 1
"""

CASES = {
    "plain": {"num_key_value_heads": 4},
    "grouped": {"num_key_value_heads": 2},
    "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama3": {
        "num_key_value_heads": 1,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mixtral": {
        "family": "Mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": None,
    },
    "qwen3_moe": {
        "family": "Qwen3Moe",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen3_moe_not_normalized": {
        "family": "Qwen3Moe",
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": False,
    },
}


def run(program, *arguments):
    done = subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        sys.exit(f"FAILED {arguments}:\n{done.stdout}\n{done.stderr}")


def compare(what, found, expected, scale):
    if abs(found - expected) > TOLERANCE * scale:
        sys.exit(f"FAILED {what}: {found} is not {expected}")


def make_model(options, **sizes):
    import torch
    import transformers

    options = dict(options)
    family = options.pop("family", "Llama")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=257,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        **sizes,
        **options,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def gradients(model):
    """Of transformers' model, by the names on disk: one for each expert.

    In memory transformers 4 has them so; 5 has one tensor of all experts.
    """
    mixtral = model.config.model_type == "mixtral"
    found = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[-1]
        if part not in ("gate_up_proj", "down_proj"):
            if mixtral:
                name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
            found[name] = parameter.grad
            continue
        block = name.split(".mlp.experts.")[0]
        inside = "block_sparse_moe" if mixtral else "mlp"
        for expert, grad in enumerate(parameter.grad):
            if part == "down_proj":
                parts = {"w2" if mixtral else "down_proj": grad}
            else:
                names = ("w1", "w3") if mixtral else ("gate_proj", "up_proj")
                parts = dict(zip(names, grad.chunk(2), strict=True))
            for end, tensor in parts.items():
                found[f"{block}.{inside}.experts.{expert}.{end}.weight"] = tensor
    return found


def norm_of(key, norms):
    """Of one of our parameters, from the norms of transformers' parameters."""
    if key == "lm_head.norm.weight":
        return norms["model.norm.weight"]
    if key in norms:
        return norms[key]
    mixtral = key.replace(".mlp.", ".block_sparse_moe.")
    if mixtral in norms:
        return norms[mixtral]
    # One tensor of all experts here, one for each there.
    block, what = key.split(".mlp.experts.")
    ends = {
        "gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"),
        "down_proj": ("down_proj", "w2"),
    }[what]
    parts = [
        norm
        for name, norm in norms.items()
        if name.startswith(block + ".")
        and ".experts." in name
        and name.split(".")[-2] in ends
    ]
    return sum(norm**2 for norm in parts) ** 0.5


def same_bytes(name, ours, theirs):
    """The tensors of two folders of weights."""
    from safetensors.torch import load_file

    ours = load_file(ours / "model.safetensors")
    theirs = load_file(theirs / "model.safetensors")
    if set(ours) != set(theirs):
        sys.exit(f"FAILED {name}: {sorted(ours)} are not {sorted(theirs)}")
    for key, tensor in theirs.items():
        if tensor.dtype != ours[key].dtype or not tensor.equal(ours[key]):
            sys.exit(f"FAILED {name}: {key} was changed on its way")


def some_bytes():
    return bytes((i * i * 7 + i // 3) % 251 for i in range(SEQ_LEN + 1))


def try_case(program, logits_program, folder, name, options):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = make_model(options, hidden_size=64, intermediate_size=112)
    # Larger than its initialization, so that every gradient counts.
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "q_norm" not in key and "k_norm" not in key:
                parameter.mul_(3)
    model.save_pretrained(folder / name)

    text = some_bytes()
    texts = folder / f"{name}-text"
    texts.write_bytes(text)
    corpus = folder / f"{name}-corpus"
    run(
        program,
        *["data", "prepare", "--input", texts, "--format", "bytes"],
        *["--output", corpus],
        *["--validation-fraction", 0],
    )
    config = folder / f"{name}.toml"
    config.write_text(
        CONFIG.format(
            run=folder / f"{name}-run",
            weights=folder / name,
            corpus=corpus,
            seq_len=SEQ_LEN,
        )
    )
    run(program, "train", config, "--nproc", 2, "--device", "cpu")

    tokens = torch.tensor(list(text))[None]
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:])
    loss.backward()
    rows = [
        json.loads(line) for line in (folder / f"{name}-run" / "metrics.jsonl").open()
    ]
    found = next(row["loss"] for row in rows if "loss" in row)
    compare(f"{name}: the loss", found, loss.item(), loss.item())
    norms = next(row["grad_norms"] for row in rows if "grad_norms" in row)
    theirs = gradients(model)
    expected = {key: grad.norm().item() for key, grad in theirs.items()}
    largest = max(expected.values())
    all_ours, all_theirs = (
        sum(norm**2 for norm in each.values()) ** 0.5 for each in (norms, expected)
    )
    compare(f"{name}: all gradients", all_ours, all_theirs, all_theirs)
    for key, norm in norms.items():
        compare(f"{name}: gradient of {key}", norm, norm_of(key, expected), largest)

    (folder / "tokens").write_text(" ".join(map(str, tokens[0].tolist())))
    outputs = [folder / f"{name}-{what}.safetensors" for what in ("logits", "grads")]
    run(
        logits_program,
        *[folder / name, folder / "tokens", outputs[0], "cpu", "float32", outputs[1]],
    )
    apart = load_file(outputs[0])["logits"][:-1] - logits[0]
    apart = apart.abs().max().item()
    compare(f"{name}: logits", apart, 0.0, logits.abs().max().item())
    ours = load_file(outputs[1])
    compare(f"{name}: the loss", ours.pop("loss").item(), loss.item(), loss.item())
    if set(ours) != set(expected):
        sys.exit(f"FAILED {name}: {sorted(ours)} are not {sorted(expected)}")
    furthest = 0.0
    for key, grad in theirs.items():
        apart = (ours[key] - grad).abs().max().item()
        scale = grad.abs().max().item()
        furthest = max(furthest, apart / scale)
        compare(f"{name}: elements of the gradient of {key}", apart, 0.0, scale)

    exported = folder / f"{name}-exported"
    run(program, "export", "--run", folder / f"{name}-run", "--to", exported)
    if not model.config.tie_word_embeddings:  # the tied one has another name here
        same_bytes(name, exported, folder / name)
    again = AutoModelForCausalLM.from_pretrained(exported)
    if not torch.equal(again(tokens[:, :-1]).logits, logits):
        sys.exit(f"FAILED {name}: exported weights give other logits")
    print(
        f"{name}: loss {found:.6f}, {len(norms)} gradients, {furthest:.1e} apart, "
        "same logits"
    )


def rms(tensor):
    return tensor.square().mean().sqrt().item()


def try_logits(program, device, folder, name, options):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    # Heads of 64 elements, which GPUs have kernels for.
    model = make_model(options, hidden_size=256, intermediate_size=448)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Attention that looks at some tokens more than at others; the same
            # weights in float32 and bfloat16.
            factor = 1 if key.endswith("norm.weight") else 3
            parameter.copy_((parameter * factor).bfloat16())
    model.save_pretrained(folder / name)
    if "rope_scaling" in options:
        written = (folder / name / "config.json").read_text()
        if "llama3" not in written or "500000" not in written:
            sys.exit(f"FAILED {name}: transformers wrote no rope scaling:\n{written}")
    tokens = torch.tensor(list(some_bytes()))[None]
    (folder / "tokens").write_text(" ".join(map(str, tokens[0].tolist())))
    with torch.no_grad():
        exact = model(tokens).logits[0]
        # Not model.bfloat16(), which would round the rotation's frequencies.
        theirs = AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.bfloat16
        )
        theirs = theirs.to(device)(tokens.to(device)).logits[0].float().cpu()
    out = folder / f"{name}.safetensors"
    run(program, folder / name, folder / "tokens", out, device, "bfloat16")
    ours = load_file(out)["logits"]
    if ours.shape != exact.shape:
        sys.exit(f"FAILED {name}: logits {ours.shape} are not {exact.shape}")
    scale = rms(exact)
    if rms(theirs - exact) > LARGEST_BF16_ERROR * scale:
        sys.exit(f"FAILED {name}: transformers' own error says nothing")
    largest = exact.abs().max().item()
    for what, found, expected, size in (
        ("root mean square", rms(ours - exact), rms(theirs - exact), scale),
        (
            "maximum",
            (ours - exact).abs().max().item(),
            (theirs - exact).abs().max().item(),
            largest,
        ),
    ):
        bound = BF16_FACTOR * expected + BF16_UNIT * size
        if not found <= bound:
            sys.exit(
                f"FAILED {name}: {what} of the logits' error {found:.4g}, bound "
                f"{bound:.4g} (transformers {expected:.4g}, logits {size:.4g})"
            )
        print(
            f"{name}: {what} of the logits' error {found:.4g}, transformers' "
            f"{expected:.4g}, bound {bound:.4g}, of logits {size:.4g}"
        )


def skip(why):
    print(f"SKIPPED hf_parity: {why}")
    sys.exit(SKIPPED)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", nargs="?", help="flatshard")
    parser.add_argument("logits_program", help="build/tests/llama_logits")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument(
        "--device", default="cuda", help="of --gpu; cpu tries it without one"
    )
    arguments = parser.parse_args()
    if (arguments.program is None) != arguments.gpu:
        parser.error("expected PROGRAM LOGITS_PROGRAM, or --gpu LOGITS_PROGRAM")
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError:
        skip("this Python has no transformers")
    device = arguments.device
    if arguments.gpu and device == "cuda" and not torch.cuda.is_available():
        skip("there is no GPU")
    logits_program = str(Path(arguments.logits_program).resolve())
    with tempfile.TemporaryDirectory() as folder:
        for name, options in CASES.items():
            if arguments.gpu and "family" in options:
                continue  # a token whose experts change says nothing of rounding
            if arguments.gpu:
                try_logits(logits_program, device, Path(folder), name, options)
            else:
                program = str(Path(arguments.program).resolve())
                try_case(program, logits_program, Path(folder), name, options)


if __name__ == "__main__":
    main()
