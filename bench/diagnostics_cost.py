#!/usr/bin/env python3
"""What each key of [diagnostics] costs: runs a config without any and with each.

usage: bench/diagnostics_cost.py --config examples/llama3_8b.toml --nproc 8

Every run is a run of the trainer of its own; the numbers are step_ms of
metrics.jsonl, the median over the steps after the first ones. The order is
baseline, each option, baseline again: the two baselines show the noise.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = [
    ("none", []),
    ("norms", ["diagnostics.norms_freq=1"]),
    ("nan_check", ["diagnostics.nan_check=true"]),
    ("overlap_check", ["diagnostics.overlap_check=true"]),
    ("poison", ["diagnostics.poison=true"]),
    ("strict", ["diagnostics.strict=true"]),
    ("none again", []),
]


def step_ms(folder, warmup):
    """The times of the steps after the warm-up."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [row["step_ms"] for row in rows if "step_ms" in row and row["step"] > warmup]


def run(arguments, overrides):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [
            f"run.output_dir={folder}",
            "run.save_weights=false",
            "metrics.log_freq=1",
            f"training.steps={arguments.warmup + arguments.steps}",
            *arguments.set,
            *overrides,
        ]
        command = [
            arguments.binary,
            "train",
            arguments.config,
            "--nproc",
            str(arguments.nproc),
            "--device",
            arguments.device,
        ]
        for setting in settings:
            command += ["--set", setting]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(done.stdout + f"\n{' '.join(command)} failed")
        return step_ms(folder, arguments.warmup)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--binary", default="build/flatshard")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument(
        "--set", action="append", default=[], help="more section.key=value"
    )
    arguments = parser.parse_args()
    baseline = None
    print(f"{'':<14} {'ms/step':>10} {'fastest':>10} {'more':>9}")
    for name, overrides in CASES:
        times = run(arguments, overrides)
        median = statistics.median(times)
        baseline = baseline or median
        print(
            f"{name:<14} {median:>10.2f} {min(times):>10.2f} "
            f"{median - baseline:>+9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
