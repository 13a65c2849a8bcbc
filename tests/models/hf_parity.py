#!/usr/bin/env python3
"""Every family here and in transformers: the same loss, logits and gradients.

Runs with the installed transformers, 4.57 or 5.17. transformers makes a small random
model of each family, and saves it in several files. `flatshard train` starts from each
folder (model.init_from) on two ranks and runs one step with learning rate zero on a
dataset of one sequence. Its loss and the norm of every gradient have to be those that
transformers computes. LOGITS_PROGRAM (build/tests/llama_logits) gives the logits and
the gradients' elements on one rank. `flatshard export` then writes a folder that
transformers loads, with identical logits, and whose tensors are byte for byte the
initial ones. Both continue the sequence by the same tokens.

With --gpu instead: the models that route no tokens, wider, answer in bfloat16 on a GPU.
The reference is transformers in float32 on the CPU, with the same weights. The logits
of LOGITS_PROGRAM and the bfloat16 logits of transformers are both compared with it. Our
error may be as large as the error of transformers, see BF16_FACTOR.

Exits with 77 (skipped) without transformers, and with --gpu without a GPU.

usage: hf_parity.py PROGRAM LOGITS_PROGRAM
       hf_parity.py --gpu LOGITS_PROGRAM [--device cpu]
"""

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
SEQ_LEN = 96
# float32 sums in another order, relative to the largest gradient: the rule of
# tests/support/sum_order.h with its margin of 4. A gradient adds SEQ_LEN tokens. The
# forward of three layers has 13 sums in a row a layer and 3 more, the backward as many.
TOLERANCE = 4 * 2.4 * math.sqrt(SEQ_LEN * 2 * (13 * 3 + 3)) * 2.0**-24
# Both sides round the same values to bfloat16 at nearly the same places, so their
# errors are random with the same variance. Ours rounds at fewer places (norm with
# residual and SwiGLU are one kernel each) and sums matmuls in another order. Half as
# much again is room for that, and the error of another formula is many times as large.
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

# Keys of a case that transformers' config does not have.
FAMILY = "family"
# These keys become rope_parameters in config.json, as transformers 5 writes them.
VERSION_5 = "version 5"
CONTINUES = "continues"
OWN_KEYS = (FAMILY, VERSION_5, CONTINUES)

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
    "llama_biases": {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama_yarn": {
        "num_key_value_heads": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
        },
        VERSION_5: ["rope_theta", "rope_scaling"],
    },
    # Sequences are longer than max_position_embeddings.
    "llama_dynamic": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 48,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        # Its cache keeps keys that were rotated for shorter sequences.
        CONTINUES: False,
    },
    "qwen2": {
        FAMILY: "Qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3": {
        FAMILY: "Qwen3",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {FAMILY: "Mistral", "num_key_value_heads": 2, "sliding_window": 70},
    "mistral_long": {
        FAMILY: "Mistral",
        "num_key_value_heads": 1,
        "sliding_window": 500,
    },
    "olmo2": {FAMILY: "Olmo2", "num_key_value_heads": 2},
    "phi3": {FAMILY: "Phi3", "num_key_value_heads": 2, "sliding_window": 40},
    "phi3_longrope": {
        FAMILY: "Phi3",
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 1.5, 2.5, 4.0],
        },
    },
    # Only eager attention of transformers caps scores.
    "gemma2": {
        FAMILY: "Gemma2",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        FAMILY: "Gemma3",
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 40,
        "sliding_window": 33,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        VERSION_5: ["rope_theta", "rope_local_base_freq", "rope_scaling"],
    },
    "mixtral": {
        FAMILY: "Mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": None,
    },
    "gpt_oss": {
        FAMILY: "GptOss",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_moe": {
        FAMILY: "Qwen3Moe",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen3_moe_not_normalized": {
        FAMILY: "Qwen3Moe",
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

    family = options.get(FAMILY, "Llama")
    keys = {
        "max_position_embeddings": 256,
        # Or the embedding of one token would have no gradient.
        "pad_token_id": None,
        "attn_implementation": "eager",
        **{key: options[key] for key in options if key not in OWN_KEYS},
    }
    config_class = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_class)(
        vocab_size=257,
        num_hidden_layers=3,
        num_attention_heads=4,
        **sizes,
        **copy.deepcopy(keys),
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def save_model(model, folder, version_5):
    """Several files, and config.json as a newer transformers writes it."""
    model.save_pretrained(folder, max_shard_size="60KB")
    if not version_5:
        return
    path = folder / "config.json"
    written = json.loads(path.read_text())
    values = {key: written.pop(key) for key in version_5 if key in written}
    if not values:
        return  # it is that transformers
    rope = {"rope_theta": values["rope_theta"], **values["rope_scaling"]}
    if "rope_local_base_freq" in values:
        local = values["rope_local_base_freq"]
        rope = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    path.write_text(json.dumps({**written, "rope_parameters": rope}))


def gradients(model):
    """Returns the gradients of transformers' model, by the names on disk: one for each
    expert.

    In memory transformers 4 has them so; 5 has one tensor of all experts, as gpt_oss
    has on disk, too.
    """
    import torch

    mixtral = model.config.model_type == "mixtral"
    together = model.config.model_type == "gpt_oss"
    found = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[-1]
        if together or part not in ("gate_up_proj", "down_proj"):
            if mixtral:
                name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
            # An expert that no token went to has none.
            grad = parameter.grad
            found[name] = torch.zeros_like(parameter) if grad is None else grad
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


POST_NORMS = [
    (".post_attention_layernorm.", ".self_attn.post_norm."),
    (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
    (".post_feedforward_layernorm.", ".mlp.post_norm."),
]
# Flatshard's names for parts of names on disk.
RENAMES = {
    "mixtral": [(".block_sparse_moe.", ".mlp.")],
    "gpt_oss": [(".mlp.router.", ".mlp.gate.")],
    "olmo2": POST_NORMS,
    "gemma2": POST_NORMS,
    "gemma3_text": POST_NORMS,
}


def split_as_here(config, name, tensor):
    """Returns names of Flatshard's parameters and their parts of one tensor on disk."""
    if name == "model.norm.weight":
        return [("lm_head.norm.weight", tensor)]
    if name.endswith(".qkv_proj.weight"):
        head = config.hidden_size // config.num_attention_heads
        heads = [config.num_attention_heads] + 2 * [config.num_key_value_heads]
        rows = tensor.split([n * head for n in heads])
        return [
            (name.replace("qkv_proj", f"{part}_proj"), rows[i])
            for i, part in enumerate("qkv")
        ]
    if name.endswith(".mlp.gate_up_proj.weight"):
        return [
            (name.replace("gate_up_proj", part), rows)
            for part, rows in zip(
                ("gate_proj", "up_proj"), tensor.chunk(2), strict=True
            )
        ]
    for theirs, ours in RENAMES.get(config.model_type, []):
        if theirs in name:
            name = name.replace(theirs, ours)
            break
    if ".experts." in name and config.model_type != "gpt_oss":
        block = name.split(".experts.")[0]
        down = name.split(".")[-2] in ("down_proj", "w2")
        name = f"{block}.experts.{'down_proj' if down else 'gate_up_proj'}"
    return [(name, tensor)]


def norms_as_here(config, grads):
    """Returns norms of the gradients of Flatshard's parameters."""
    squares = {}
    for name, grad in grads.items():
        for ours, tensor in split_as_here(config, name, grad):
            square = tensor.norm().item() ** 2
            squares[ours] = squares.get(ours, 0.0) + square
    return {name: square**0.5 for name, square in squares.items()}


def load_folder(folder):
    from safetensors.torch import load_file

    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def same_bytes(name, ours, theirs):
    """The tensors of two folders of weights."""
    ours, theirs = load_folder(ours), load_folder(theirs)
    if set(ours) != set(theirs):
        sys.exit(f"FAILED {name}: {sorted(ours)} are not {sorted(theirs)}")
    for key, tensor in theirs.items():
        if tensor.dtype != ours[key].dtype or not tensor.equal(ours[key]):
            sys.exit(f"FAILED {name}: {key} was changed on its way")


def some_bytes():
    return bytes((i * i * 7 + i // 3) % 251 for i in range(SEQ_LEN + 1))


def prepare(program, folder):
    """Returns a dataset of one sequence, and its tokens."""
    import torch

    text = some_bytes()
    (folder / "text").write_bytes(text)
    corpus = folder / "corpus"
    run(
        program,
        *["data", "prepare", "--input", folder / "text", "--format", "bytes"],
        *["--output", corpus],
        *["--validation-fraction", 0],
    )
    return corpus, torch.tensor(list(text))[None]


def change_weights(model):
    """Larger than at initialization, so that every gradient counts."""
    import torch

    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith("bias"):
                parameter.mul_(3)
                continue
            # The weights of norms before layers may be initialized to ones or to zeros.
            larger = 2 if "norm" in name and "_norm." not in name else 0
            parameter.add_(larger + 0.2 * torch.randn_like(parameter))


def try_case(program, logits_program, folder, data, name, options):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    corpus, tokens = data
    model = make_model(options, hidden_size=64, intermediate_size=112)
    change_weights(model)
    save_model(model, folder / name, options.get(VERSION_5))

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
    expected = norms_as_here(model.config, theirs)
    if set(norms) != set(expected):
        sys.exit(f"FAILED {name}: {sorted(norms)} are not {sorted(expected)}")
    largest = max(expected.values())
    all_ours, all_theirs = (
        sum(norm**2 for norm in each.values()) ** 0.5 for each in (norms, expected)
    )
    compare(f"{name}: all gradients", all_ours, all_theirs, all_theirs)
    for key, norm in norms.items():
        compare(f"{name}: gradient of {key}", norm, expected[key], largest)

    (folder / "tokens").write_text(" ".join(map(str, tokens[0].tolist())))
    outputs = [folder / f"{name}-{what}.safetensors" for what in ("logits", "grads")]
    run(
        logits_program,
        *[folder / name, folder / "tokens", outputs[0], "cpu", "float32", outputs[1]],
    )
    answers = load_file(outputs[0])
    with torch.no_grad():
        apart = answers["logits"] - model(tokens).logits[0]
    apart = apart.abs().max().item()
    compare(f"{name}: logits", apart, 0.0, logits.abs().max().item())
    ours = load_file(outputs[1])
    compare(f"{name}: the loss", ours.pop("loss").item(), loss.item(), loss.item())
    if set(ours) != set(theirs):
        sys.exit(f"FAILED {name}: {sorted(ours)} are not {sorted(theirs)}")
    # The largest element of each parameter here. All experts are one parameter.
    scales = {}
    for key, grad in theirs.items():
        for name_here, part in split_as_here(model.config, key, grad):
            value = part.abs().max().item()
            scales[name_here] = max(scales.get(name_here, 0.0), value)
    furthest = 0.0
    for key, grad in theirs.items():
        apart = (ours[key] - grad).abs().max().item()
        parts = [part for part, _ in split_as_here(model.config, key, grad)]
        if name == "gpt_oss" and key.endswith("k_proj.bias"):
            # Also compared with the gradient of its weight: tokens cancel in the bias,
            # and their rounding does not.
            parts += [part.removesuffix("bias") + "weight" for part in parts]
        scale = max(scales.get(part, 0.0) for part in parts)
        furthest = max(furthest, apart / scale)
        compare(f"{name}: elements of the gradient of {key}", apart, 0.0, scale)

    exported = folder / f"{name}-exported"
    run(program, "export", "--run", folder / f"{name}-run", "--to", exported)
    if not model.config.tie_word_embeddings:  # the tied one has another name here
        same_bytes(name, exported, folder / name)
    again = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    if not torch.equal(again(tokens[:, :-1]).logits, logits):
        sys.exit(f"FAILED {name}: exported weights give other logits")
    if options.get(CONTINUES, True):
        again.generation_config.eos_token_id = None
        continued = answers["continued"].long().tolist()
        out = again.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=len(continued),
            do_sample=False,
            pad_token_id=0,
        )
        if out[0, tokens.shape[1] :].tolist() != continued:
            sys.exit(f"FAILED {name}: {out[0, -8:].tolist()} are not {continued}")
    print(
        f"{name}: loss {found:.6f}, {len(norms)} gradients, {furthest:.1e} apart, "
        "same logits"
    )


# Not with --gpu: a token whose experts change proves nothing about rounding, and
# longrope has factors for one size of heads.
UNCOMPARED = ("mixtral", "gpt_oss", "phi3_longrope")


def rms(tensor):
    return tensor.square().mean().sqrt().item()


def try_logits(program, device, folder, name, options):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    # Heads of 64 elements, because GPUs have kernels for them.
    model = make_model(options, hidden_size=256, intermediate_size=448)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Attention that looks at some tokens more than at others; the same
            # weights in float32 and bfloat16.
            factor = 1 if key.endswith("norm.weight") else 3
            parameter.copy_((parameter * factor).bfloat16())
    model.save_pretrained(folder / name)
    if name == "llama3":
        written = (folder / name / "config.json").read_text()
        if "llama3" not in written or "500000" not in written:
            sys.exit(f"FAILED {name}: transformers wrote no rope scaling:\n{written}")
    tokens = torch.tensor(list(some_bytes()))[None]
    (folder / "tokens").write_text(" ".join(map(str, tokens[0].tolist())))
    with torch.no_grad():
        exact = model(tokens).logits[0]
        # Not model.bfloat16(), because it would round the frequencies of the rotary
        # embedding.
        theirs = AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.bfloat16, attn_implementation="eager"
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
    parser.add_argument("--only", nargs="*", help="names of cases; all without it")
    arguments = parser.parse_args()
    if (arguments.program is None) != arguments.gpu:
        parser.error("expected PROGRAM LOGITS_PROGRAM, or --gpu LOGITS_PROGRAM")
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError:
        skip("this Python has no transformers")
    # More threads would spend most of their time waiting for each other.
    torch.set_num_threads(1)
    device = arguments.device
    if arguments.gpu and device == "cuda" and not torch.cuda.is_available():
        skip("there is no GPU")
    logits_program = str(Path(arguments.logits_program).resolve())
    cases = {name: CASES[name] for name in arguments.only or CASES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not arguments.gpu:
            program = str(Path(arguments.program).resolve())
            data = prepare(program, folder)
        for name, options in cases.items():
            if not arguments.gpu:
                try_case(program, logits_program, folder, data, name, options)
            elif "moe" not in name and name not in UNCOMPARED:
                try_logits(logits_program, device, folder, name, options)


if __name__ == "__main__":
    main()
