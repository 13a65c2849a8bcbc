#!/usr/bin/env python3
"""Measures what each key of [diagnostics] costs, one run after the other.

bench/diagnostics_cost.py --config examples/llama3_8b.toml --nproc 8

Each row is a run of the trainer. The figures are the median and the least step_ms of its
metrics after the warm-up, and the difference from the first row. The first and the last
run have no key, and show the noise. Each run in between has one key.
"""

import statistics
from pathlib import Path

from harness.command_line import Parser
from harness.programs import steps_of, train

CASES = {
    "none": [],
    "norms": ["diagnostics.norms_freq=1"],
    "nan_check": ["diagnostics.nan_check=true"],
    "overlap_check": ["diagnostics.overlap_check=true"],
    "poison": ["diagnostics.poison=true"],
    "strict": ["diagnostics.strict=true"],
    "none again": [],
}


def main():
    parser = Parser(__doc__).options("nproc", "set", warmup=5, steps=10, device="auto")
    parser.options(binary="build/flatshard", out=Path("outputs/diagnostics_cost"))
    parser.add_argument("--config", required=True)
    args = parser.parse_args()
    baseline = None
    print(f"{'':<14} {'ms/step':>10} {'fastest':>10} {'more':>9}")
    for name, chosen in CASES.items():
        folder = args.out / name.replace(" ", "-")
        settings = ["run.save_weights=false", *args.set, *chosen]
        settings.insert(0, f"training.steps={args.warmup + args.steps}")
        ranks = [f"--nproc={args.nproc}", f"--device={args.device}"]
        train(args.binary, args.config, folder, settings, *ranks)
        ms = [row["step_ms"] for row in steps_of(folder, args.warmup)]
        median = statistics.median(ms)
        baseline = baseline or median
        more = median - baseline
        print(f"{name:<14} {median:>10.2f} {min(ms):>10.2f} {more:>+9.2f}", flush=True)


if __name__ == "__main__":
    main()
