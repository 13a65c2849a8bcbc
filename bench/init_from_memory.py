#!/usr/bin/env python3
"""Host memory that model.init_from takes while it reads a Hugging Face folder.

Writes a Llama with random weights as a folder of several safetensors files, and
starts `flatshard train` twice: with random weights, and from that folder. Each
is ended when its weights are there, before the first step. For every rank:

  peak    the highest resident memory so far (VmHWM)
  own     the most that was the rank's own at any time (RssAnon, RssShmem);
          sampled every millisecond
  mapped  the most of mapped files (RssFile): programs and libraries

usage: init_from_memory.py PROGRAM --to FOLDER [--layers N] [--dtype T]
       [--nproc N] [--device D]
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

DIM, FFN_DIM, HEADS, VOCAB = 2048, 8192, 16, 32000
MAX_FILE_NBYTES = 500e6
LIMIT_S = 600

CONFIG = """
[run]
output_dir = "{output}"
save_weights = false
[model]
{model}
[data]
train = "random"
[training]
steps = 1
seq_len = 8
"""
# Said by rank 0 when all weights are there, with --resume and no checkpoint.
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
    """The bytes of all weights."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    files, size, total = [{}], 0, 0
    noise = torch.empty(VOCAB * DIM).normal_(0, 0.02).to(getattr(torch, dtype))
    for name, shape in shapes(layers):
        tensor = noise[: math.prod(shape)].view(shape).clone()
        if files[-1] and size + tensor.nbytes > MAX_FILE_NBYTES:
            save_file(files[-1], folder / f"{len(files)}.safetensors")
            files[-1] = list(files[-1])
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    save_file(files[-1], folder / f"{len(files)}.safetensors")
    names = {}
    for number, tensors in enumerate(files):
        final = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"{number + 1}.safetensors").rename(folder / final)
        names.update(dict.fromkeys(tensors, final))
    index = {"metadata": {"total_size": total}, "weight_map": names}
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
    return total


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def memory(pid):
    """{VmHWM: bytes, ...} of a process; nothing when it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    found = re.findall(r"^(VmHWM|Rss\w+):\s+(\d+) kB", text, re.M)
    return {name: int(kib) * 1024 for name, kib in found}


def has_open(pid, folder):
    """Whether a process has a file of the folder open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if Path(os.readlink(link)).parent == folder:
                return True
        except OSError:
            pass  # closed since
    return False


def measure(arguments, weights, reads):
    """A list with one dict of peaks for each rank."""
    name = "read" if reads else "random"
    output = arguments.to / name
    # The folder's files are open while they are read.
    weights = weights.resolve()
    model = (
        f'init_from = "{weights}"' if reads else f'hf_config = "{weights}/config.json"'
    )
    config = arguments.to / f"{name}.toml"
    config.write_text(CONFIG.format(output=output, model=model))
    command = [arguments.program, "train", str(config), "--resume"]
    command += ["--nproc", str(arguments.nproc), "--device", arguments.device]
    log = arguments.to / f"{name}.log"
    process = subprocess.Popen(
        command,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    peaks, reading, done = {}, set(), set()
    deadline = time.monotonic() + LIMIT_S
    try:
        while len(done) < arguments.nproc:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(log.read_text()[-4000:])
            # A single rank is the program itself.
            ranks = [process.pid] if arguments.nproc == 1 else children(process.pid)
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--to", type=Path, required=True, help="a new folder")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", help="of the folder")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True)
    try:
        weights = arguments.to / "weights"
        nbytes = write_folder(weights, arguments.layers, arguments.dtype)
        files = len(list(weights.glob("*.safetensors")))
        print(f"{nbytes / 2**20:.0f} MiB of {arguments.dtype} in {files} files; MiB:")
        without = measure(arguments, weights, reads=False)
        with_it = measure(arguments, weights, reads=True)
    finally:
        shutil.rmtree(arguments.to)
    print(f"{'rank':>4}  {'':6}  {'random':>8}  {'init_from':>9}  {'more':>8}")
    columns = {"peak": "VmHWM", "own": "own", "mapped": "RssFile"}
    for rank, (a, b) in enumerate(zip(without, with_it)):
        for label, key in columns.items():
            a_mib, b_mib = a[key] / 2**20, b[key] / 2**20
            print(
                f"{rank:4}  {label:6}  {a_mib:8.0f}  {b_mib:9.0f}  {b_mib - a_mib:8.0f}"
            )


if __name__ == "__main__":
    main()
