"""Compares `flatshard plan` with steps that were measured: docs/performance.md has them.

python3 bench/plan_accuracy.py

Each row has a step's time and peak of allocated memory, measured and planned. No GPU is
needed. Times that the host bounds depend on the machine: rows with `host` say so.
"""

import json
import statistics
import subprocess

from harness.cases import VARIANTS
from harness.command_line import Parser
from harness.tables import head, row

_NONE = "parallelism.copy_engines=none"
_ALL = "parallelism.copy_engines=all"
_TWO = ["training.global_batch_size=8", "debug.force_balance=true"]
_LARGE = [
    "training.local_batch_size=4",
    "training.global_batch_size=16",
    "debug.force_balance=true",
]
_EIGHT = ["training.global_batch_size=32", "debug.force_balance=true"]
_DIVIDED = [
    "parallelism.expert_parallel_degree=2",
    "parallelism.token_exchange=copies",
]
_AT_ONCE = ["parallelism.overlap_expert_parallel=true"]
_LATE = [*_AT_ONCE, "parallelism.delay_wgrad=true"]
_GRAPHS = ["cuda_graph.impl=unit"]
_SHARED = ["parallelism.tensor_parallel_degree=2"]
# Those of bench/tensor_parallel.py.
_TWELVE = ["model.layers=12"]
SHARED = {
    "12 layers of 8B shapes": (8192, _TWELVE),
    "12 layers of 8B shapes, seq 2048": (2048, _TWELVE),
}

# (variant, GPU, ranks, further settings, measured ms, measured GiB)
MEASURED = [
    ("12 layers of 8B shapes", "h200", 2, _SHARED, 174.8, None),
    ("12 layers of 8B shapes, seq 2048", "h200", 2, _SHARED, 54.9, None),
    ("1B", "h200", 2, [], 71.0, 14.0),
    ("3B", "h200", 2, [], 173.5, 31.2),
    ("8B, local batch 1", "h200", 8, [_NONE], 769.4, None),
    ("8B, local batch 1", "h200", 4, [], 740.6, 54.6),
    ("8B, local batch 1", "h200", 2, [], 760.0, 80.7),
    ("8B, local batch 1", "h200", 2, [_NONE], 784.2, None),
    ("8B, local batch 2", "h200", 2, [], 1475.2, 106.0),
    ("8B, local batch 3", "h200", 2, [], 2193.7, 131.2),
    ("8B, recompute full", "h200", 2, [], 967.3, 63.8),
    ("8B, recompute full, local batch 4", "h200", 2, [], 3775.0, 72.3),
    ("8B, ZeRO-3", "h200", 4, [], 195.7, 35.6),
    ("8B, ZeRO-3", "h200", 2, [], 209.5, 63.5),
    ("8B, ZeRO-2", "h200", 2, [], 218.4, 69.3),
    ("8B, ZeRO-1", "h200", 2, [], 218.1, 69.3),
    ("8B, ZeRO-3", "h100", 2, [_ALL], 227.1, 63.5),
    ("8B, ZeRO-3", "h100", 2, [_NONE], 245.4, 63.2),
    ("20 layers of 8B shapes", "h100", 2, [_ALL], 504.1, 55.0),
    ("20 layers of 8B shapes", "h100", 2, [_NONE], 518.5, 54.7),
    ("8 layers of 8B shapes", "h200", 1, [], 232.1, 45.87),
    ("8 layers, tensorwise", "h200", 1, [], 181.8, 44.45),
    ("8 layers of 8B shapes", "h100", 1, [], 237.9, 45.87),
    ("64 layers of dim 1024", "h100", 1, _GRAPHS, 54.8, None),
    ("64 layers of dim 1024", "h100", 2, [*_GRAPHS, _ALL], 52.8, None),
    ("64 layers of dim 1024", "h100", 1, [], 98.1, 19.16),
    ("8 layers, tensorwise", "h100", 1, [], 192.8, 44.4),
    ("8 layers, rowwise", "h100", 1, [], 208.1, 44.4),
    ("8 layers, blockwise", "h100", 1, [], 210.4, 44.4),
    ("8B, ZeRO-3", "h100", 2, [_ALL, "float8.recipe=tensorwise"], 192.9, 60.0),
    (
        "20 layers of 8B shapes",
        "h100",
        2,
        [_ALL, "float8.recipe=tensorwise"],
        390.4,
        52.8,
    ),
    ("20 layers of 8B shapes", "h100", 2, [_ALL, "float8.recipe=rowwise"], 421.2, 52.8),
    (
        "20 layers of 8B shapes",
        "h100",
        2,
        [_ALL, "float8.recipe=blockwise"],
        430.2,
        52.8,
    ),
    ("4 layers of Qwen3-30B-A3B", "h100", 1, [], 100.2, 48.9),
    ("4 layers of Qwen3-30B-A3B, one representation", "h100", 1, [], 108.7, 46.0),
    ("4 layers of Qwen3-30B-A3B", "h200", 1, [], 86.6, None),
    ("6 layers of Qwen3-30B-A3B", "h100", 2, [*_TWO, _ALL], 229.2, 47.5),
    (
        "6 layers of Qwen3-30B-A3B",
        "h100",
        2,
        [*_TWO, _ALL, "parallelism.strategy=zero2"],
        214.8,
        48.7,
    ),
    ("6 layers of Qwen3-30B-A3B", "h100", 2, [*_TWO, _ALL, *_DIVIDED], 212.2, 46.2),
    (
        "6 layers of Qwen3-30B-A3B",
        "h100",
        2,
        [*_TWO, _ALL, *_DIVIDED, *_AT_ONCE],
        203.5,
        47.9,
    ),
    (
        "6 layers of Qwen3-30B-A3B",
        "h100",
        2,
        [*_TWO, _ALL, *_DIVIDED, *_LATE],
        201.2,
        47.9,
    ),
    ("6 layers of Qwen3-30B-A3B", "h100", 2, [*_LARGE, _ALL], 367.7, 53.0),
    ("6 layers of Qwen3-30B-A3B", "h100", 2, [*_EIGHT, _ALL], 851.8, 47.5),
    ("6 layers of Qwen3-30B-A3B", "h100", 2, [*_EIGHT, _ALL, *_DIVIDED], 784.3, 46.2),
    (
        "6 layers of Qwen3-30B-A3B",
        "h100",
        2,
        [*_EIGHT, _ALL, *_DIVIDED, *_LATE],
        727.4,
        48.0,
    ),
]


def planned(args, variant, gpu, ranks, settings):
    seq, of_variant = (VARIANTS | SHARED)[variant]
    command = [args.program, "plan", args.config, "--json", f"--ranks={ranks}"]
    command += ["--gpu", args.gpu or gpu]
    for setting in (f"training.seq_len={seq}", *of_variant, *settings):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def change(of, to):
    return 100 * (of / to - 1)


def text(value, digits=1):
    return "" if value is None else f"{value:.{digits}f}"


def main():
    parser = Parser(__doc__)
    parser.options("program", "config", json="", gpu="")
    args = parser.parse_args()
    columns = ("ms: measured", "planned", "%", "GiB: measured", "planned", "%")
    head("", "", *columns, left=(0, 1))
    times, sizes, rows = [], [], []
    for variant, gpu, ranks, settings, ms, gib in MEASURED:
        found = planned(args, variant, gpu, ranks, settings)
        got_ms, got_gib = found["step_ms"], found["peak_bytes"] / 2**30
        by_host = found["bound"] == "host"
        if not by_host:
            times.append(abs(change(got_ms, ms)))
        if gib is not None:
            sizes.append(abs(change(got_gib, gib)))
        name = ", ".join([variant, *(s.split(".", 1)[1] for s in settings)])
        row(
            name + (" (host)" if by_host else ""),
            f"{ranks}x {gpu.upper()}",
            text(ms),
            text(got_ms),
            f"{change(got_ms, ms):+.1f}",
            text(gib),
            text(got_gib),
            "" if gib is None else f"{change(got_gib, gib):+.1f}",
        )
        rows.append({"name": name, "gpu": gpu, "ranks": ranks, "ms": ms} | found)
    for what, errors in (("time", times), ("memory", sizes)):
        print(
            f"{what}: median {statistics.median(errors):.1f} %, "
            f"most {max(errors):.1f} %, of {len(errors)}"
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(rows, out, indent=1)


if __name__ == "__main__":
    main()
