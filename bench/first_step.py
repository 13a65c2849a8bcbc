"""Measures the seconds from the start of a program to the end of its first step.

python3 bench/first_step.py --nproc 1 --to FOLDER

8 layers of Llama-3-8B, with random weights and from a Hugging Face folder of random
weights that it writes to --to. The peer is bench/fsdp2_llama.py, compiled and eager. The
same program runs with Flatshard's fully_shard, too (PYTHONPATH=build/python), and on one
rank without a library. "Of FSDP2" compares eager programs with FSDP2, eager, and others
with FSDP2, compiled. In the rows "cold", no compiled code is cached, and the page cache is dropped first (as root). In the
rows "libraries", the page cache then has torch, CUDA and the program again, but not the
folder. In the rows "warm", each program runs the second time. Also reads the folder with
16 threads, as a reference for loading. --to needs 6 GB.

Parts of programs in Python are torchrun, imports of torch, and joining of the ranks (start
of CUDA and NCCL). "Common" is the sum of these three, as they are the same for all
libraries. Then come the import of the library, the sharded model, and weights. The last
parts are the host's forward, backward and update, and the wait for the GPU.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from harness import hf_folder
from harness.command_line import Parser
from harness.models import Llama
from harness.programs import (
    BENCH,
    RunFailed,
    file_name,
    machine,
    train_command,
    write_json,
)
from harness.tables import head, row

LAYERS, SEQ, READERS = 8, 8192, 16
SIZES = {"dim": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}
TINY = {"dim": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 512}
# Library and --compile of bench/fsdp2_llama.py.
PYTHON = {
    "FSDP2, compiled": ("fsdp2", "blocks+loss"),
    "FSDP2, eager": ("fsdp2", "none"),
    "Flatshard from Python, compiled": ("flatshard", "blocks+loss"),
    "Flatshard from Python, eager": ("flatshard", "none"),
    "Unsharded, eager": ("unsharded", "none"),
}
COMMON = ("torchrun", "imports", "ranks")
WAYS = ["Flatshard", *PYTHON]
SOURCES, STATES = ["random", "folder"], ["cold", "libraries", "warm"]


def drop_page_cache():
    """Returns whether it was possible."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def read_libraries(program):
    """Puts the files that the program maps into the page cache."""
    packages = Path(torch.__file__).parents[1]
    libraries = [*packages.glob("torch/lib/*.so*"), *packages.glob("nvidia/**/*.so*")]
    for path in [Path(program), *libraries]:
        with path.open("rb", buffering=0) as file:
            while file.read(64 << 20):
                pass


def seconds_until(line, command, env, log):
    """Runs a program and returns the seconds until it prints a line, and that line."""
    with log.open("w") as file:
        begin = time.monotonic()
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env={**os.environ, **env},
        )
        seconds, found = None, ""
        for text in process.stdout:
            if seconds is None and line.match(text):
                seconds, found = time.monotonic() - begin, text.strip()
            file.write(text)
    if process.wait() or seconds is None:
        raise RunFailed(f"{command[0]} ended with {process.returncode}; see {log}")
    return seconds, found


def run_flatshard(args, folder, log):
    settings = [
        f"run.output_dir={args.out / 'run'}",
        f"training.seq_len={args.seq}",
        f"training.local_batch_size={args.local_batch}",
        "training.steps=1",
        "lr_scheduler.warmup_steps=0",
        "precision.reduce=bfloat16",
    ]
    if folder:
        settings += [f"model.init_from={folder}"]
    else:
        sizes = {**args.sizes, "ffn_dim": args.sizes["ffn"]}
        names = ("dim", "ffn_dim", "heads", "kv_heads")
        settings += [f"model.{name}={sizes[name]}" for name in names]
        settings += [
            f"model.vocab_size={sizes['vocab']}",
            f"model.layers={args.layers}",
        ]
    config = BENCH / "random.toml"
    command = train_command(
        args.program, config, [*settings, *args.set], f"--nproc={args.nproc}"
    )
    return seconds_until(re.compile("step: 1/1 "), command, {}, log)


def run_python(args, way, folder, caches, log):
    library, compiled = PYTHON[way]
    sizes = [f"--{name.replace('_', '-')}={n}" for name, n in args.sizes.items()]
    options = [
        f"--layers={args.layers}",
        f"--seq={args.seq}",
        f"--library={library}",
        f"--compile={compiled}",
    ]
    options += [f"--local-batch={args.local_batch}"]
    options += ["--warmup=0", "--steps=1", "--gqa"]
    if folder:
        options += [f"--init-from={folder}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.nproc}", BENCH / "fsdp2_llama.py"]
    env = {
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "TRITON_CACHE_DIR": f"{caches}/triton",
    }
    line = re.compile(r"\{\"")
    return seconds_until(line, [*command, *sizes, *options], env, log)


def gigabytes_per_second(folder):
    """Reads all files of a folder in pieces of 8 MiB, on several threads."""
    piece = 8 << 20
    pieces = [
        (file, begin)
        for file in sorted(folder.iterdir())
        for begin in range(0, file.stat().st_size, piece)
    ]

    def read(mine):
        for file, begin in mine:
            descriptor = os.open(file, os.O_RDONLY)
            os.pread(descriptor, piece, begin)
            os.close(descriptor)

    begin = time.monotonic()
    threads = [
        threading.Thread(target=read, args=(pieces[i::READERS],))
        for i in range(READERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    return 1e-9 * nbytes / (time.monotonic() - begin)


def parts_of(line, seconds):
    """Returns the parts of the start that a program's line has, and the sum of COMMON."""
    if not line.startswith("{"):
        start = re.search(r"start: .*", line)
        return start[0] if start else "", None
    found = json.loads(line)
    start, host = found["start_s"], found["host_ms_forward_backward_step"]
    names = ("forward", "backward", "update", "GPU")
    step = zip(names, (*host, found["ms"] - sum(host)))
    before = seconds - sum(start.values()) - found["ms"] / 1e3
    parts = {"torchrun": before, **start, **{name: ms / 1e3 for name, ms in step}}
    common = sum(parts[name] for name in COMMON)
    return ", ".join(f"{name} {s:.1f}" for name, s in parts.items()), round(common, 2)


def measure(args, results, weights):
    """Runs each way once for each state of the caches, and prints the rows."""
    folder = args.to if weights == "folder" else None
    with tempfile.TemporaryDirectory() as caches:
        for state in args.states:
            found = {}
            for way in args.ways:
                if state != "warm" and not drop_page_cache():
                    print("the page cache was not dropped: run as root", flush=True)
                if state == "libraries":
                    read_libraries(args.program)
                log = args.out / f"{file_name(weights, state, way)}.log"
                if way in PYTHON:
                    found[way] = run_python(args, way, folder, caches, log)
                else:
                    found[way] = run_flatshard(args, folder, log)
            for way, (seconds, line) in found.items():
                peer = found.get(f"FSDP2, {'eager' if 'eager' in way else 'compiled'}")
                parts, common = parts_of(line, seconds)
                ratio = f"{seconds / peer[0]:.2f}" if peer else ""
                same = "" if common is None else f"{common:.1f}"
                row(weights, state, way, f"{seconds:.1f}", ratio, same, parts)
                results.append(
                    {
                        "weights": weights,
                        "caches": state,
                        "way": way,
                        "s": seconds,
                        "common_s": common,
                        "parts": parts,
                    }
                )


def main():
    parser = Parser(__doc__).options(
        "program", "set", "nproc", "tiny", "to", local_batch=1
    )
    parser.options(out=Path("outputs/first_step"))
    # The last one needs a single rank.
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:-1])
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    args = parser.parse_args()
    args.sizes = TINY if args.tiny else SIZES
    args.layers, args.seq = (2, 64) if args.tiny else (LAYERS, SEQ)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{args.nproc} ranks on {machine()}\n")
    if "folder" in args.sources:
        with torch.device("meta"):
            sizes = SimpleNamespace(**args.sizes, layers=args.layers, gqa=True)
            hf_folder.write(args.to, Llama(sizes), sizes)
        for state in args.states:
            if state != "warm":
                drop_page_cache()
            speed = gigabytes_per_second(args.to)
            print(f"reading the folder, {state}: {speed:.2f} GB/s", flush=True)
    print()
    columns = ("weights", "caches", "", "s", "of FSDP2", "common", "parts")
    head(*columns, left=(0, 1, 2, 6))
    results = []
    for source in args.sources:
        measure(args, results, source)
    write_json(args.out / "first_step.json", {"machine": machine(), "rows": results})


if __name__ == "__main__":
    main()
