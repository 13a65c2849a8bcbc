#!/usr/bin/env python3
"""Llama here and in transformers: the same loss and the same gradients.

transformers makes small random Llamas (grouped heads, tied and untied
embeddings, Llama-3 rope scaling) and saves them. `flatshard train` starts from
each folder (model.init_from) on two ranks and takes one step with learning rate
zero on a corpus of one sequence; its loss and the norm of every gradient have to
be those that transformers computes. `flatshard export` then writes a folder that
transformers loads, with identical logits.

Exits with 77 (skipped) without transformers.

usage: hf_parity.py PROGRAM
"""

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


def try_case(program, folder, name, options):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            **options,
        )
    )
    # Larger than its initialization, so that every gradient counts.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder / name)

    text = bytes((i * i * 7 + i // 3) % 251 for i in range(SEQ_LEN + 1))
    texts = folder / f"{name}-texts"
    texts.mkdir()
    (texts / "a.txt").write_bytes(text)
    corpus = folder / f"{name}-corpus"
    run(
        program,
        *["data", "prepare", "--input", texts, "--output", corpus],
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
    expected = {
        name: parameter.grad.norm().item()
        for name, parameter in model.named_parameters()
    }
    largest = max(expected.values())
    if len(norms) != len(expected):
        sys.exit(f"FAILED {name}: {sorted(norms)} are not {sorted(expected)}")
    for key, norm in norms.items():
        theirs = "model.norm.weight" if key == "lm_head.norm.weight" else key
        compare(f"{name}: gradient of {key}", norm, expected[theirs], largest)

    exported = folder / f"{name}-exported"
    run(program, "export", "--run", folder / f"{name}-run", "--to", exported)
    again = LlamaForCausalLM.from_pretrained(exported)
    if not torch.equal(again(tokens[:, :-1]).logits, logits):
        sys.exit(f"FAILED {name}: exported weights give other logits")
    print(f"{name}: loss {found:.6f}, {len(norms)} gradients, same logits")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("SKIPPED hf_parity: this Python has no transformers")
        sys.exit(SKIPPED)
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        for name, options in CASES.items():
            try_case(program, Path(folder), name, options)


if __name__ == "__main__":
    main()
