#!/usr/bin/env python3
"""Measures what checkpoints cost a run: stall per save, bandwidth of saves and loads.

bench/checkpoint_stall.py build/flatshard --to FOLDER --nproc 4

Trains a preset on random tokens with a checkpoint every INTERVAL steps, and writes the
time of every step. Then resumes from the last one, once with the page cache dropped (as
root) and once with it.
"""

import re
import statistics
import subprocess

from harness.command_line import Parser
from harness.programs import BENCH, steps_of, train

LOADS = ["cold", "warm"]  # with the page cache dropped first, or as it is


def stalls(output, interval, steps):
    """Returns ms of the usual step, and what each save adds to the steps after it."""
    step_ms = {row["step"]: row["step_ms"] for row in steps_of(output, 0)}
    usual = statistics.median(
        ms for step, ms in step_ms.items() if step > 4 and step % interval > 2
    )
    # A save starts after step n, so it slows down step n + 1 and the steps after it.
    return usual, [
        sum(step_ms.get(step + i, usual) - usual for i in (1, 2, 3))
        for step in range(interval, steps, interval)
    ]


def main():
    parser = Parser(__doc__).options(
        "set", "to", nproc=4, preset="llama3_1b", seq_len=4096
    )
    parser.add_argument("program")
    parser.add_argument("--interval", type=int, default=20, help="steps between saves")
    parser.add_argument(
        "--saves", type=int, default=3, help="besides the last one, or 0 for loads only"
    )
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=LOADS)
    args = parser.parse_args()
    output, interval = args.to / "run", args.interval
    steps = interval * args.saves + interval // 2
    settings = [
        f"model.preset={args.preset}",
        f"training.steps={steps}",
        f"training.seq_len={args.seq_len}",
        "precision.reduce=bfloat16",
        f"checkpoint.interval={interval}",
        "checkpoint.keep_latest_k=1",
        *args.set,
    ]
    ranks = f"--nproc={args.nproc}"
    log = train(args.program, BENCH / "random.toml", output, settings, ranks)
    usual, each = stalls(output, interval, steps)
    checkpoint = next((output / "checkpoints").glob("step-*[0-9]"))
    gigabytes = 1e-9 * sum(f.stat().st_size for f in checkpoint.iterdir())
    print(f"usual step {usual:.1f} ms; checkpoint {gigabytes:.2f} GB")
    print("stall of each save:", *(f"{s:.0f} ms" for s in each))
    for seconds in map(float, re.findall(r"saved .* in ([0-9.]+) s", log)):
        print(f"saved in {seconds:.1f} s, {gigabytes / max(seconds, 0.1):.2f} GB/s")
    # One more step: a run that has all of its steps loads nothing.
    settings += [f"training.steps={steps + 1}", "checkpoint.interval=0"]
    settings += ["checkpoint.keep_latest_k=0"]
    for what in args.loads:
        if what == "cold":
            drop = ["sh", "-c", "sync; echo 3 > /proc/sys/vm/drop_caches"]
            subprocess.run(drop, stderr=subprocess.DEVNULL)
        more = (ranks, "--resume")
        log = train(args.program, BENCH / "random.toml", output, settings, *more)
        loaded = re.search(r"loaded .*", log)
        print(f"{what}: {loaded[0] if loaded else log[-2000:]}")


if __name__ == "__main__":
    main()
