"""The same training by FSDP2 and by `flatshard train`: losses of every step side by side.

python3 bench/loss_parity.py --nproc 2

Hugging Face's Llama of 1B shapes with random weights is saved as a folder that both start
from. The text has as many sequences as a step takes, so every step of both sees all of
them, in whatever order, and the mean loss over ranks is of the same tokens. bf16 compute
and reduction, float32 main weights, AdamW whose learning rate grows from step to step,
clipping at 1. Ends with 1 when a loss differs by more than --bound.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from compare import run

BETAS, EPS, DECAY, MAX_NORM = (0.9, 0.95), 1e-8, 0.1, 1.0
# hidden, intermediate, layers, heads, kv heads, vocabulary
SHAPES = {
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "tiny": (64, 128, 2, 4, 2, 300),
}
VALIDATION = 0.05  # of a single document, its end


def make_model(args, folder):
    hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[args.shape]
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocab,
            max_position_embeddings=8192,
            rope_theta=500000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)


def make_corpus(args, folder):
    """nproc sequences, and half of one more."""
    text = folder.with_suffix(".txt")
    size = int((args.nproc + 0.5) * args.seq / (1 - VALIDATION))
    text.write_text("".join(random.Random(0).choices("abcdefgh ", k=size)))
    run(
        [args.program, "data", "prepare", f"--input={text}", f"--output={folder}"]
        + [f"--validation-fraction={VALIDATION}", "--force"],
        folder.with_suffix(".log"),
    )


def sequences(args, folder):
    tokens = numpy.fromfile(folder / "train-00000.bin", dtype="<u2").astype("int64")
    assert (len(tokens) - 1) // args.seq == args.nproc, len(tokens)
    return [
        torch.from_numpy(tokens[i * args.seq : (i + 1) * args.seq + 1])
        for i in range(args.nproc)
    ]


def train_fsdp2(args):
    """Under torchrun: prints a line of JSON with the losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    args.nproc = dist.get_world_size()
    mesh = init_device_mesh(device, (args.nproc,))
    model = LlamaForCausalLM.from_pretrained(args.out / "model", dtype=torch.float32)
    model.to(device)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=BETAS, eps=EPS, weight_decay=DECAY
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / args.steps
    )
    sample = sequences(args, args.out / "corpus")[dist.get_rank()].to(device)
    losses = []
    for _ in range(args.steps):
        logits = model(input_ids=sample[None, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[0], sample[1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / args.nproc)
    if dist.get_rank() == 0:
        print(json.dumps(losses), flush=True)
    dist.destroy_process_group()


def losses_of_fsdp2(args):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.nproc}", __file__, "--fsdp2"]
    command += [f"--seq={args.seq}", f"--steps={args.steps}", f"--out={args.out}"]
    command += [f"--lr={args.lr}"]
    out = run(command, args.out / "fsdp2.log")
    return next(json.loads(line) for line in out.split("\n") if line.startswith("["))


def losses_of_flatshard(args):
    folder = args.out / "flatshard"
    config = args.out / "config.toml"
    config.write_text(f"""
[run]
output_dir = "{folder}"
save_weights = false
[model]
init_from = "{args.out / "model"}"
[data]
train = "{args.out / "corpus"}"
[training]
steps = {args.steps}
seq_len = {args.seq}
max_norm = {MAX_NORM}
[optimizer]
lr = {args.lr}
beta1 = {BETAS[0]}
beta2 = {BETAS[1]}
eps = {EPS}
weight_decay = {DECAY}
[lr_scheduler]
name = "constant"
warmup_steps = {args.steps}
[precision]
reduce = "bfloat16"
[metrics]
log_freq = 1
""")
    run(
        [args.program, "train", str(config), f"--nproc={args.nproc}"],
        args.out / "flatshard.log",
    )
    lines = (folder / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line)["loss"] for line in lines if '"loss"' in line]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default="build/flatshard")
    parser.add_argument("--nproc", type=int, default=2, help="GPUs [2]")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-6, help="of the last step")
    parser.add_argument("--bound", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, default=Path("outputs/loss_parity"))
    parser.add_argument("--fsdp2", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.resolve()
    if args.fsdp2:
        return train_fsdp2(args)
    args.out.mkdir(parents=True, exist_ok=True)
    make_model(args, args.out / "model")
    make_corpus(args, args.out / "corpus")
    ours, theirs = losses_of_flatshard(args), losses_of_fsdp2(args)
    print("step  Flatshard    FSDP2  difference")
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        print(f"{step:4} {a:10.5f} {b:8.5f} {a - b:11.5f}")
    worst = max(abs(a - b) for a, b in zip(ours, theirs))
    print(f"largest difference {worst:.5f}, bound {args.bound}")
    return int(worst > args.bound)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(str(error))
