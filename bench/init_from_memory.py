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

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import torch
import transformers

from harness.command_line import Parser
from harness.peers import llama_config
from harness.programs import BENCH, train_command

DIM, FFN_DIM, HEADS, VOCAB = 2048, 8192, 16, 32000
LIMIT_S = 600
COLUMNS = {"peak": "VmHWM", "own": "own", "mapped": "RssFile"}
# Printed by rank 0 when all weights are there, with --resume and no checkpoint.
READY = "starting from the first step"


def write_folder(folder, layers, dtype):
    """Returns the bytes of all weights and the number of files."""
    config = llama_config((DIM, FFN_DIM, layers, HEADS, HEADS), vocab_size=VOCAB)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="500MB")
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    return nbytes, len(list(folder.glob("*.safetensors")))


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def memory(pid):
    """Returns {VmHWM: bytes, ...} of a process, or nothing when it has ended."""
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
