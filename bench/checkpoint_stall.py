#!/usr/bin/env python3
"""What checkpoints cost a run: stall per save, bandwidth of saves and loads.

Trains a preset on random tokens with a checkpoint every INTERVAL steps and
writes the time of every step; then resumes, which loads the last one, once from
the page cache's point of view cold (dropped, when root) and once warm. Beside
it: what `dd` with direct I/O writes and reads with as many processes at the same
place.

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


def dd(folder, processes, gigabytes):
    """GB/s that `processes` at once write, then read, past the page cache."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = max(1, int(gigabytes * 1e9 / processes / (8 << 20)))
    rates = []
    for arguments in (
        ["if=/dev/zero", "of={}", f"count={blocks}", "oflag=direct", "conv=fsync"],
        ["if={}", "of=/dev/null", "iflag=direct"],
    ):
        begin = time.monotonic()
        started = [
            subprocess.Popen(
                ["dd", "bs=8M", *(a.format(folder / str(i)) for a in arguments)],
                stderr=subprocess.DEVNULL,
            )
            for i in range(processes)
        ]
        for process in started:
            process.wait()
        seconds = time.monotonic() - begin
        rates.append(blocks * processes * (8 << 20) * 1e-9 / seconds)
    shutil.rmtree(folder)
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--preset", default="llama3_1b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--saves", type=int, default=3)
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
        print(f"saved in {seconds:.1f} s, {gigabytes / seconds:.2f} GB/s")
    written, read = dd(arguments.to / "dd", arguments.nproc, gigabytes)
    print(
        f"dd, {arguments.nproc} at once, direct I/O: writes {written:.2f} GB/s, "
        f"reads {read:.2f} GB/s"
    )
    for what in ("cold", "warm"):
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
