"""Step time and memory of programs of transformers, TRL and accelerate, on FSDP2 and on
Flatshard.

PYTHONPATH=build/python python3 bench/libraries.py
PYTHONPATH=build/python python3 bench/libraries.py --case sft --pairs 3
PYTHONPATH=build/python python3 bench/libraries.py --case trainer --unsharded

Each case is a program of bench/libraries_train.py, started once as it is and once below
`python -m flatshard.as_fsdp2 --require`, alternating. Prints a line of JSON for each
case: the medians of the runs' median steps and peaks, and the medians of the pairs'
ratios, Flatshard / FSDP2. A case whose library is missing is reported and left out.

--unsharded also runs the case on one GPU without sharding, with bfloat16 weights,
gradients and states. That is a lower bound of a step, and not the same training.
"""

import json
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.command_line import Parser
from harness.programs import BENCH, file_name, json_lines, machine, run, write_json
from harness.tables import by_turns, ratios

# name: (packages, arguments of bench/libraries_train.py)
CASES = {
    "trainer": (["transformers", "accelerate"], ["trainer"]),
    "trainer compiled": (["transformers", "accelerate"], ["trainer", "--compile"]),
    "sft": (["trl", "peft", "transformers", "accelerate"], ["sft"]),
    "accelerate": (["accelerate", "timm"], ["accelerate"]),
    "accelerate compiled": (["accelerate", "timm"], ["accelerate", "--compile"]),
}


def versions(packages):
    """Returns {package: version}, where None is one that is not installed."""
    found = {}
    for package in ["torch", *packages]:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def command(args, way, words):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += [f"--nproc-per-node={args.nproc}"]
    if way == "flatshard":
        swap = [sys.executable, "-m", "flatshard.as_fsdp2", "--require"]
        start = [*swap, *args.swap_options.split(), *start]
    if way == "unsharded":
        start, words = [sys.executable], [*words, "--unsharded"]
    sizes = [f"--warmup={args.warmup}", f"--steps={args.steps}", f"--seq={args.seq}"]
    sizes += [f"--layers={args.layers}", f"--images={args.images}"]
    sizes += [*(["--tiny"] if args.tiny else [])]
    program = BENCH / "libraries_train.py"
    return [*start, program, *words, *sizes]


def measure(args, name, words):
    """Returns {way: rows of its runs}."""

    def one(way, pair):
        log = args.out / f"{file_name(name, way, pair)}.log"
        row = json_lines(run(command(args, way, words), log))[0]
        if (row["sharded_by"] or "unsharded") != way:
            sys.exit(f"{log}: expected {way} to shard, got {row['sharded_by']}")
        return row

    ways = ("fsdp2", "flatshard", *(["unsharded"] if args.unsharded else []))
    return by_turns(ways, args.pairs, one)


def summary(name, packages, runs):
    fsdp2, flatshard = runs["fsdp2"], runs["flatshard"]
    found = {"case": name, "versions": packages}
    for way, rows in runs.items():
        found[way] = {
            key: round(statistics.median(row[key] for row in rows), 2)
            for key in ("ms", "peak_GiB")
        }
        found[way]["each_ms"] = [row["ms"] for row in rows]
        found[way]["loss"] = rows[0]["loss"]
    each, median = ratios(fsdp2, flatshard)
    found["ratios"] = [round(ratio, 4) for ratio in each]
    found["ratio"] = round(median, 4)
    if "unsharded" in runs:
        found["unsharded_ratio"] = round(ratios(fsdp2, runs["unsharded"])[1], 4)
    peaks = [found[way]["peak_GiB"] for way in ("fsdp2", "flatshard")]
    found["peak_ratio"] = round(peaks[1] / peaks[0], 4) if peaks[0] else None
    return found


def main():
    parser = Parser(__doc__).options("nproc", "seq", "tiny", "json", warmup=8, steps=16)
    parser.options(pairs=5, images=32, layers=16, out=Path("outputs/libraries"))
    parser.add_argument("--case", choices=CASES, action="append", help="[all]")
    parser.add_argument(
        "--swap-options",
        default="",
        metavar="TEXT",
        help="of python -m flatshard.as_fsdp2, such as '--strategy zero2'",
    )
    parser.add_argument(
        "--unsharded",
        action="store_true",
        help="runs without sharding too; only cases of trainer",
    )
    args = parser.parse_args()
    if args.unsharded and not {*(args.case or CASES)} <= {
        "trainer",
        "trainer compiled",
    }:
        parser.error("--unsharded requires --case trainer or --case 'trainer compiled'")
    if args.unsharded and args.nproc > 1:
        parser.error(f"--unsharded requires --nproc 1, got {args.nproc}")
    print(f"{args.nproc} ranks, {machine()}", flush=True)
    results = []
    for name in args.case or CASES:
        packages, words = CASES[name]
        packages = versions(packages)
        missing = [package for package, found in packages.items() if found is None]
        if missing:
            print(f"{name}: left out, {', '.join(missing)} not installed", flush=True)
            continue
        found = summary(name, packages, measure(args, name, words))
        print(json.dumps(found), flush=True)
        results.append(found)
    write_json(args.json, results)


if __name__ == "__main__":
    main()
