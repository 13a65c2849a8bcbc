#!/usr/bin/env python3
"""Measures the host memory that model.init_from takes to read a Hugging Face folder.

bench/init_from_memory.py build/flatshard --to FOLDER --layers 4

Writes a Llama with random weights as a folder of several safetensors files, and starts
`flatshard train` twice: with random weights, and from that folder. Each is ended when
its weights are there, before the first step. For every rank:

  peak    the highest resident memory so far (VmHWM)
  own     the most that was the rank's own at any time (RssAnon, RssShmem);
          sampled every millisecond
  mapped  the most of mapped files (RssFile): programs and libraries
"""

import json
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from harness.command_line import Parser
from harness.programs import BENCH, train_command

DIM, FFN_DIM, HEADS, VOCAB = 2048, 8192, 16, 32000
MAX_FILE_NBYTES = 500e6
LIMIT_S = 600
COLUMNS = {"peak": "VmHWM", "own": "own", "mapped": "RssFile"}
# Printed by rank 0 when all weights are there, with --resume and no checkpoint.
READY = "starting from the first step"


def shapes(layers):
    yield "model.embed_tokens.weight", (VOCAB, DIM)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name in "qkvo":
            yield f"{layer}.self_attn.{name}_proj.weight", (DIM, DIM)
        for name in ("gate", "up"):
            yield f"{layer}.mlp.{name}_proj.weight", (FFN_DIM, DIM)
        yield f"{layer}.mlp.down_proj.weight", (DIM, FFN_DIM)
        for name in ("input", "post_attention"):
            yield f"{layer}.{name}_layernorm.weight", (DIM,)
    yield "model.norm.weight", (DIM,)
    yield "lm_head.weight", (VOCAB, DIM)


def write_folder(folder, layers, dtype):
    """Returns the bytes of all weights and the number of files."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    noise = torch.empty(VOCAB * DIM).normal_(0, 0.02).to(getattr(torch, dtype))
    files, size, total = [{}], 0, 0
    for name, shape in shapes(layers):
        nbytes = math.prod(shape) * noise.element_size()
        if files[-1] and size + nbytes > MAX_FILE_NBYTES:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += nbytes
        total += nbytes
    places = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        places |= dict.fromkeys(tensors, file)
        drawn = {
            name: noise[: math.prod(shape)].view(shape).clone()
            for name, shape in tensors.items()
        }
        save_file(drawn, folder / file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": DIM,
        "intermediate_size": FFN_DIM,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return total, len(files)


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def memory(pid):
    """Returns {VmHWM: bytes, ...} of a process; nothing when it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    found = re.findall(r"^(VmHWM|Rss\w+):\s+(\d+) kB", text, re.M)
    return {name: int(kib) * 1024 for name, kib in found}


def has_open(pid, folder):
    """Returns whether a process has a file of the folder open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if Path(os.readlink(link)).parent == folder:
                return True
        except OSError:
            pass  # closed since
    return False


def measure(args, weights, reads):
    """Returns a list with one dict of peaks for each rank."""
    name = "read" if reads else "random"
    # The folder's files are open while they are read.
    weights = weights.resolve()
    model = f"init_from={weights}" if reads else f"hf_config={weights}/config.json"
    settings = [f"run.output_dir={args.to / name}", f"model.{model}"]
    settings += ["training.steps=1", "training.seq_len=8"]
    more = ("--resume", f"--nproc={args.nproc}", f"--device={args.device}")
    log = args.to / f"{name}.log"
    process = subprocess.Popen(
        train_command(args.program, BENCH / "random.toml", settings, *more),
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    peaks, reading, done = {}, set(), set()
    deadline = time.monotonic() + LIMIT_S
    try:
        while len(done) < args.nproc:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(log.read_text()[-4000:])
            # A single rank is the program itself.
            ranks = [process.pid] if args.nproc == 1 else children(process.pid)
            for pid in set(ranks) - done:
                now = memory(pid)
                if not now:
                    continue
                now["own"] = now["RssAnon"] + now["RssShmem"]
                before = peaks.setdefault(pid, now)
                peaks[pid] = {key: max(now[key], before[key]) for key in now}
                if has_open(pid, weights):
                    reading.add(pid)
                elif pid in reading:
                    done.add(pid)
            if not reads and READY in log.read_text():
                done.update(ranks)
            time.sleep(1e-3)
    finally:
        process.kill()  # the ranks end with it
        process.wait()
    return [peaks[pid] for pid in sorted(peaks)]


def main():
    parser = Parser(__doc__).options(layers=10, nproc=2, device="cpu")
    parser.add_argument("program")
    parser.add_argument("--to", type=Path, required=True, help="a new folder")
    parser.add_argument("--dtype", default="bfloat16", help="of the folder")
    args = parser.parse_args()
    args.to.mkdir(parents=True)
    try:
        weights = args.to / "weights"
        nbytes, files = write_folder(weights, args.layers, args.dtype)
        print(f"{nbytes / 2**20:.0f} MiB of {args.dtype} in {files} files; MiB:")
        runs = [measure(args, weights, reads) for reads in (False, True)]
    finally:
        shutil.rmtree(args.to)
    print(f"{'rank':>4}  {'':6}  {'random':>8}  {'init_from':>9}  {'more':>8}")
    for rank, peaks in enumerate(zip(*runs)):
        for label, key in COLUMNS.items():
            a, b = (peak[key] / 2**20 for peak in peaks)
            print(f"{rank:4}  {label:6}  {a:8.0f}  {b:9.0f}  {b - a:8.0f}")


if __name__ == "__main__":
    main()
