#!/usr/bin/env python3
"""What checkpoints cost a run: stall per save, bandwidth of saves and loads.

Trains a preset on random tokens with a checkpoint every INTERVAL steps and
writes the time of every step; then resumes, which loads the last one, once from
the page cache's point of view cold (dropped, when root) and once warm. Beside
it: what `dd` with direct I/O writes with as many processes at the same place, and
how fast it reads the checkpoint's files.

usage: checkpoint_stall.py PROGRAM --to FOLDER [--nproc N] [--preset llama3_1b]
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import time
from pathlib import Path

CONFIG = """
[run]
output_dir = "{output}"
save_weights = false
[model]
preset = "{preset}"
[data]
train = "random"
[training]
steps = {steps}
seq_len = {seq_len}
[precision]
reduce = "bfloat16"
[checkpoint]
interval = {interval}
keep_latest_k = 1
[metrics]
log_freq = 1
"""


LOADS = ["cold", "warm"]  # with the page cache dropped first, or as it is


def train(arguments, config, *more):
    command = [arguments.program, "train", str(config), *more]
    command += ["--nproc", str(arguments.nproc)]
    for setting in arguments.set:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode != 0:
        raise SystemExit(text[-4000:])
    return text


def gb_per_s(commands, gigabytes):
    """What processes reach that run at once and move so many bytes together."""
    begin = time.monotonic()
    started = [subprocess.Popen(c, stderr=subprocess.DEVNULL) for c in commands]
    for process in started:
        process.wait()
    return gigabytes / (time.monotonic() - begin)


def dd_writes(folder, processes, gigabytes):
    folder.mkdir(parents=True, exist_ok=True)
    blocks = max(1, int(gigabytes * 1e9 / processes / (8 << 20)))
    command = ["dd", "bs=8M", "if=/dev/zero", f"count={blocks}", "oflag=direct"]
    rate = gb_per_s(
        [[*command, "conv=fsync", f"of={folder / str(i)}"] for i in range(processes)],
        blocks * processes * (8 << 20) * 1e-9,
    )
    shutil.rmtree(folder)
    return rate


def dd_reads(files, gigabytes):
    """Of the files' beginnings, all at once."""
    blocks = max(1, int(gigabytes * 1e9 / len(files) / (8 << 20)))
    command = ["dd", "bs=8M", "of=/dev/null", f"count={blocks}", "iflag=direct"]
    read = sum(min(f.stat().st_size, blocks * (8 << 20)) for f in files)
    return gb_per_s([[*command, f"if={f}"] for f in files], read * 1e-9)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--preset", default="llama3_1b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument(
        "--saves", type=int, default=3, help="beside the last one; 0: loads only [3]"
    )
    parser.add_argument(
        "--loads", nargs="*", choices=LOADS, default=LOADS, help="all of them"
    )
    parser.add_argument(
        "--dd-gb", type=float, default=32, help="what dd moves at most, GB [32]"
    )
    parser.add_argument("--set", nargs="*", default=[], help="for the run's config")
    arguments = parser.parse_args()
    output = arguments.to / "run"
    config = arguments.to / "run.toml"
    steps = arguments.interval * arguments.saves + arguments.interval // 2
    arguments.to.mkdir(parents=True, exist_ok=True)
    config.write_text(
        CONFIG.format(
            output=output,
            preset=arguments.preset,
            steps=steps,
            seq_len=arguments.seq_len,
            interval=arguments.interval,
        )
    )
    text = train(arguments, config)
    saved = [float(s) for s in re.findall(r"saved .* in ([0-9.]+) s", text)]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    step_ms = {row["step"]: row["step_ms"] for row in rows if "loss" in row}
    usual = statistics.median(
        ms for step, ms in step_ms.items() if step > 4 and step % arguments.interval > 2
    )
    # A save is begun after step n, so what it costs is in step n + 1 and on.
    stalls = [
        sum(step_ms.get(step + i, usual) - usual for i in (1, 2, 3))
        for step in range(arguments.interval, steps, arguments.interval)
    ]
    checkpoint = next((output / "checkpoints").glob("step-*[0-9]"))
    gigabytes = 1e-9 * sum(f.stat().st_size for f in checkpoint.iterdir())
    print(f"usual step {usual:.1f} ms; checkpoint {gigabytes:.2f} GB")
    print("stall of each save:", *(f"{s:.0f} ms" for s in stalls))
    for seconds in saved:
        print(f"saved in {seconds:.1f} s, {gigabytes / max(seconds, 0.1):.2f} GB/s")
    moved = min(arguments.dd_gb, gigabytes)
    if arguments.saves > 0:
        rate = dd_writes(arguments.to / "dd", arguments.nproc, moved)
        print(f"dd, {arguments.nproc} at once, direct I/O: writes {rate:.2f} GB/s")
    if "cold" in arguments.loads:
        files = sorted(checkpoint.glob("*.safetensors"))
        rate = dd_reads(files, moved)
        print(f"dd, the {len(files)} files at once, direct I/O: reads {rate:.2f} GB/s")
    for what in arguments.loads:
        if what == "cold":
            subprocess.run(
                ["sh", "-c", "sync; echo 3 > /proc/sys/vm/drop_caches"],
                check=False,
                stderr=subprocess.DEVNULL,
            )
        text = train(
            arguments,
            config,
            "--resume",
            *["--set", "checkpoint.interval=0"],
            *["--set", "checkpoint.keep_latest_k=0"],
            *["--set", f"training.steps={steps}"],
        )
        loaded = re.search(r"loaded .*", text)
        print(f"{what}: {loaded[0] if loaded else text[-2000:]}")


if __name__ == "__main__":
    main()
