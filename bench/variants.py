"""Flatshard alone under many settings, on one machine and in one call.

python3 bench/variants.py --nproc 4

Batches, recomputation, sizes of the model, ZeRO stages and a model that the host bounds:
a row of a table for each, with the median step time, the host's part and the peak of
allocated memory. `bench/compare.sh` is for what FSDP2 runs as well.

Alternatives behind --by are tried one after the other, each of them some settings; with
several --by all combinations are, the last one the fastest to change:

python3 bench/variants.py --nproc 2 --only "8B, ZeRO-3" \\
    --by parallelism.copy_engines=none parallelism.copy_engines=all \\
    --by float8.recipe=none float8.recipe=tensorwise "float8.recipe=none model.layers=16"
"""

import argparse
import itertools
import json
from pathlib import Path

from compare import flatshard, machine

EXPERTS = [
    "model.preset=qwen3_30b_a3b",
    "model.layers=4",
    "training.local_batch_size=2",
]
# Sequence length and what differs from examples/llama3_8b.toml.
VARIANTS = {
    "8B, local batch 1": (8192, []),
    "8B, local batch 2": (8192, ["training.local_batch_size=2"]),
    "8B, local batch 3": (8192, ["training.local_batch_size=3"]),
    "8B, recompute full": (8192, ["activation_checkpoint.mode=full"]),
    "8B, recompute full, local batch 4": (
        8192,
        ["activation_checkpoint.mode=full", "training.local_batch_size=4"],
    ),
    "1B": (4096, ["model.preset=llama3_1b"]),
    "3B": (4096, ["model.preset=llama3_3b"]),
    "8B, ZeRO-3": (2048, []),
    "8B, ZeRO-2": (2048, ["parallelism.strategy=optim_grads"]),
    "8B, ZeRO-1": (2048, ["parallelism.strategy=optim"]),
    "64 layers of dim 1024": (
        2048,
        [
            "model.layers=64",
            "model.dim=1024",
            "model.heads=16",
            "model.kv_heads=8",
            "model.head_dim=64",
            "model.ffn_dim=3584",
        ],
    ),
    "8 layers of 8B shapes": (8192, ["model.layers=8"]),
    "20 layers of 8B shapes": (8192, ["model.layers=20"]),
    "8 layers, tensorwise": (8192, ["model.layers=8", "float8.recipe=tensorwise"]),
    "8 layers, rowwise": (8192, ["model.layers=8", "float8.recipe=rowwise"]),
    "8 layers, blockwise": (8192, ["model.layers=8", "float8.recipe=blockwise"]),
    "4 layers of Qwen3-30B-A3B": (4096, EXPERTS),
    "4 layers of Qwen3-30B-A3B, one representation": (
        4096,
        [*EXPERTS, "parallelism.keep_compute_weights=false"],
    ),
    "6 layers of Qwen3-30B-A3B": (4096, [*EXPERTS, "model.layers=6"]),
}


def row_of(args, nproc, variant, chosen):
    seq, settings = VARIANTS[variant]
    args.nproc = nproc
    args.set = [*settings, *args.more, *(s for text in chosen for s in text.split())]
    name = ", ".join([variant, *chosen])
    label = f"{name}, {nproc} GPUs"
    folder = args.out / label.replace(",", "").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        ms, (low, high), host, peak = flatshard(args, seq, folder)
    except RuntimeError as error:  # e.g. out of memory: the others are still of use
        print(f"| {name} | {nproc} | {seq} | {str(error)[-60:]} | | |", flush=True)
        return {"name": name, "nproc": nproc, "seq": seq, "error": str(error)}
    print(
        f"| {name} | {nproc} | {seq} | {ms:.1f} ({low:.1f} to {high:.1f}) | "
        f"{host:.0f} | {peak:.1f} |",
        flush=True,
    )
    return {
        "name": name,
        "nproc": nproc,
        "seq": seq,
        "ms": ms,
        "range": [low, high],
        "host_ms": host,
        "peak_GiB": peak,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="variants:\n  " + "\n  ".join(VARIANTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--program", default="build/flatshard")
    parser.add_argument("--config", default="examples/llama3_8b.toml")
    parser.add_argument("--nproc", type=int, nargs="+", default=[8], help="GPUs [8]")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="VARIANT",
        choices=VARIANTS,
        default=list(VARIANTS),
        help="of those below, in quotes [all]",
    )
    parser.add_argument("--warmup", type=int, default=4, help="steps [4]")
    parser.add_argument("--steps", type=int, default=8, help="measured [8]")
    parser.add_argument(
        "--set", dest="more", nargs="*", default=[], help="for all configs, last"
    )
    parser.add_argument(
        "--by",
        action="append",
        nargs="+",
        default=[],
        metavar="SETTINGS",
        help="alternatives, each with blanks between its settings",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/variants"))
    args = parser.parse_args()
    counts = list(args.nproc)
    print(f"{machine()}\n\n| | GPUs | seq | ms per step (range) | host ms | peak GiB |")
    print("|---|---:|---:|---:|---:|---:|")
    rows = [
        row_of(args, nproc, name, chosen)
        for nproc in counts
        for name in args.only
        for chosen in itertools.product(*args.by)
    ]
    results = {"machine": machine(), "rows": rows}
    (args.out / "variants.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
