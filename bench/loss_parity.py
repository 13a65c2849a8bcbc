"""The same training by FSDP2 and by `flatshard train`: the losses of every step.

python3 bench/loss_parity.py --nproc 2

Both start from the same folder: Hugging Face's Llama of 1B shapes with random weights.
The text has exactly one global batch of sequences. So every step of both sees all of
them, in whatever order, and the mean loss over ranks is of the same tokens. bf16
compute and reduction, float32 main weights, AdamW whose learning rate grows from step
to step, clipping at 1. The exit status is 1 when a loss differs by more than --bound.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from harness import programs, ranks
from harness.command_line import Parser
from harness.peers import LLAMA_SIZES, fully_shard_of, llama_config

BETAS, EPS, DECAY, MAX_NORM = (0.9, 0.95), 1e-8, 0.1, 1.0
VOCABULARIES = {"1b": 128256, "tiny": 300}
VALIDATION = 0.05  # of a single document, its end


def make_model(args, folder):
    torch.manual_seed(0)
    config = llama_config(
        LLAMA_SIZES[args.shape],
        vocab_size=VOCABULARIES[args.shape],
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_corpus(args, folder):
    """Writes nproc sequences, and half of one more."""
    text = folder.with_suffix(".txt")
    size = int((args.nproc + 0.5) * args.seq / (1 - VALIDATION))
    text.write_text("".join(random.Random(0).choices("abcdefgh ", k=size)))
    command = [args.program, "data", "prepare", f"--input={text}", f"--output={folder}"]
    command += [f"--validation-fraction={VALIDATION}", "--force"]
    programs.run(command, folder.with_suffix(".log"))


def sequences(args, folder):
    tokens = numpy.fromfile(folder / "train-00000.bin", dtype="<u2").astype("int64")
    assert (len(tokens) - 1) // args.seq == args.nproc, len(tokens)
    return [
        torch.from_numpy(tokens[i * args.seq : (i + 1) * args.seq + 1])
        for i in range(args.nproc)
    ]


def train_fsdp2(args):
    """Trains under torchrun, and prints a line of JSON with the losses."""
    device = ranks.usual_device()
    mesh = ranks.join_mesh(device)
    args.nproc = mesh.size()
    model = LlamaForCausalLM.from_pretrained(args.out / "model", dtype=torch.float32)
    model.to(device)
    fully_shard = fully_shard_of("fsdp2")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
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
    ranks.say(json.dumps({"losses": losses}))
    dist.destroy_process_group()


def losses_of_fsdp2(args):
    options = ["--fsdp2", f"--seq={args.seq}", f"--steps={args.steps}"]
    options += [f"--out={args.out}", f"--lr={args.lr}"]
    log = args.out / "fsdp2.log"
    out = programs.torchrun(args.nproc, "loss_parity.py", options, log)
    return programs.json_lines(out)[0]["losses"]


def losses_of_flatshard(args):
    folder = args.out / "flatshard"
    settings = [
        f"model.init_from={args.out / 'model'}",
        f"data.train={args.out / 'corpus'}",
        f"training.steps={args.steps}",
        f"training.seq_len={args.seq}",
        f"training.max_norm={MAX_NORM}",
        f"optimizer.lr={args.lr}",
        f"optimizer.beta1={BETAS[0]}",
        f"optimizer.beta2={BETAS[1]}",
        f"optimizer.eps={EPS}",
        f"optimizer.weight_decay={DECAY}",
        "lr_scheduler.name=constant",
        f"lr_scheduler.warmup_steps={args.steps}",
        "precision.reduce=bfloat16",
    ]
    config = programs.BENCH / "random.toml"
    programs.train(args.program, config, folder, settings, f"--nproc={args.nproc}")
    return programs.losses(folder)


def main():
    parser = Parser(__doc__).options("program", "seq", nproc=2, steps=30, bound=1e-2)
    parser.add_argument(
        "--shape", choices=VOCABULARIES, default="1b", help="of the model"
    )
    parser.add_argument("--lr", type=float, default=3e-6, help="of the last step")
    parser.options(out=Path("outputs/loss_parity"))
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
    sys.exit(main())
