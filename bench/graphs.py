"""Measures what CUDA graphs give the trainer: steps with and without, alternating.

python3 bench/graphs.py --program build/flatshard --fsdp2

Two models run, or the models of `--shape`: one that the host bounds and one that the
GPU bounds. They run on one GPU or on `--nproc`. Each pair runs the trainer as it is and
with `cuda_graph.impl=unit`, and also with `full_iteration` for `--ways eager unit
step`. The first way runs first in every other pair. On request in the same call:

  --fsdp2       FSDP2 with blocks and loss compiled, as bench/compare.py runs it, and
                with the blocks in torch's own graphs ("reduce-overhead"): how many of
                them torch recorded in the warm-up and again after it
  --same-losses N  N steps of each way with debug.deterministic: are the losses of all
                ways bitwise identical

Prints a table and the ratios, and writes both, and each run, as graphs.json. All logs
and traces are below --out. Program and config are given by path, and no network is
needed. The last column of the table names what ran eagerly in spite of graphs. It
should be empty.
"""

import collections
import statistics
from pathlib import Path

from harness import programs
from harness.cases import USUAL, VARIANTS
from harness.command_line import Parser
from harness.programs import RunFailed, fsdp2_steps, machine, train_steps
from harness.tables import by_turns, head, ms_and_range, ratios, row

SHAPES = {
    **USUAL,
    "20 layers of 8B shapes": VARIANTS["20 layers of 8B shapes"],
    **{f"8B at {seq}": (seq, []) for seq in (2048, 8192)},
}
WAYS = {
    "eager": [],
    "unit": ["cuda_graph.impl=unit"],
    "parts": ["cuda_graph.impl=unit", "cuda_graph.modules=attn,mlp"],
    "step": ["cuda_graph.impl=full_iteration"],
}


def sizes(shape):
    """Returns the shape's sizes as options of the PyTorch benchmarks."""
    found = []
    for setting in SHAPES[shape][1]:
        key, value = setting.removeprefix("model.").split("=")
        if key in ("layers", "dim", "ffn_dim", "heads", "kv_heads"):
            name = key.removesuffix("_dim").replace("_", "-")
            found.append(f"--{name}={value}")
    return found


def train(args, shape, way, name, more=()):
    """Trains one way, and returns its folder, its figures and its graphs' figures."""
    seq, settings = SHAPES[shape]
    folder = args.out / programs.file_name(shape, way, name)
    settings = [*settings, *WAYS[way], *args.set, *more]
    found = train_steps(args, seq, settings, folder)
    graphs = (r["cuda_graph"] for r in programs.metrics(folder) if "cuda_graph" in r)
    return folder, {**found, "graphs": next(graphs, {})}


def summary(runs):
    """Returns the median of the runs' medians, with their least and most."""
    fallbacks = collections.Counter()
    for run in runs:
        fallbacks.update(run["graphs"].get("fallbacks", {}))
    lows, highs = zip(*(run["range"] for run in runs))
    return {
        "ms": statistics.median(run["ms"] for run in runs),
        "range": [min(lows), max(highs)],
        "host_ms": statistics.median(run["host_ms"] for run in runs),
        "peak_GiB": max(run["peak_GiB"] for run in runs),
        "graphs_MB": max(run["graphs"].get("nbytes", 0) for run in runs) / 1e6,
        "fallbacks": fallbacks,
    }


def say_row(name, found):
    """Prints a way of running."""
    if "error" in found:
        return row(name, found["error"], "", "", "", "")
    eager = (f"{why} ({n})" for why, n in found.get("fallbacks", {}).items())
    graphs = f"{found['graphs_MB']:.0f}" if found.get("graphs_MB") else ""
    host, peak = f"{found['host_ms']:.1f}", f"{found['peak_GiB']:.2f}"
    row(name, ms_and_range(found), host, peak, graphs, "; ".join(eager))


def measure_shape(args, shape):
    runs = by_turns(args.ways, args.pairs, lambda *run: train(args, shape, *run)[1])
    ways = {way: summary(runs[way]) for way in runs}
    result = {"runs": runs, "ways": ways, "ratios": {}}
    for way, found in ways.items():
        say_row(f"{shape}, {way}", found)
    found = result["ratios"]
    eager = ways.get("eager")
    for way in (way for way in runs if eager and way != "eager"):
        each, median = ratios(runs["eager"], runs[way])
        found[f"{way} / eager, ms of each pair"] = each
        found[f"{way} / eager, ms"] = median
        found[f"{way} / eager, host ms"] = ways[way]["host_ms"] / eager["host_ms"]
        found[f"{way} - eager, peak GiB"] = ways[way]["peak_GiB"] - eager["peak_GiB"]
    return result


def same_losses(args, shape):
    """Compares the losses of each way in a few deterministic steps."""
    losses = {}
    for way in args.ways:
        more = ["debug.deterministic=true", f"training.steps={args.same_losses}"]
        folder, _ = train(args, shape, way, "losses", more)
        losses[way] = programs.losses(folder)
    first = losses[args.ways[0]]
    same = len(first) == args.same_losses and all(v == first for v in losses.values())
    found = "are bitwise identical" if same else "DIFFER"
    ways = ", ".join(args.ways)
    row(f"{shape}: {len(first)} losses of {ways} {found}", "", "", "", "", "")
    return {"same": same, "losses": losses}


def fsdp2_rows(args, shape):
    """Measures FSDP2 compiled, and replaying torch's own graphs."""
    rows = {}
    for way, more in (("compiled", []), ("reduce-overhead", ["--reduce-overhead"])):
        options = [*sizes(shape), "--gqa", *more]
        try:
            found = fsdp2_steps(args, SHAPES[shape][0], options)
            keys = ("ms", "range", "host_ms", "peak_GiB", "graphs_recorded")
            rows[way] = {key: found[key] for key in keys}
            again = found["graphs_recorded"][1]
            rows[way]["fallbacks"] = {"graphs recorded again": again} if again else {}
        except RunFailed as error:  # the others are still of use
            rows[way] = {"error": str(error)}
        say_row(f"{shape}, FSDP2 {way}", rows[way])
    return rows


def say_ratios(results):
    print()
    head("ratio", "")
    for shape, result in results["shapes"].items():
        for name, value in result["ratios"].items():
            values = value if isinstance(value, list) else [value]
            row(f"{shape}: {name}", ", ".join(f"{v:.3f}" for v in values))


def parse():
    parser = Parser(__doc__).options("program", "config", "set", "nproc", "pairs")
    parser.options(warmup=12, steps=12, out=Path("outputs/graphs"))
    parser.add_argument(
        "--shape", choices=SHAPES, action="append", help="[64, 8 layers]"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=["eager", "unit"],
        help="of running the trainer. parts: attn and mlp of each block. step: forward "
        "and backward of a step as one graph",
    )
    parser.add_argument("--fsdp2", action="store_true", help="also FSDP2, compiled")
    parser.add_argument("--same-losses", type=int, default=0, metavar="N", help="steps")
    return parser.parse_args()


def main():
    args = parse()
    results = {"machine": machine(), "shapes": {}}
    print(results["machine"] + "\n")
    columns = ("", "ms per step (range)", "host ms", "peak GiB", "MB of graphs")
    head(*columns, "ran eagerly", left=(0, 5))
    try:
        for shape in args.shape or USUAL:
            result = measure_shape(args, shape) if args.pairs else {"ratios": {}}
            results["shapes"][shape] = result
            if args.same_losses:
                result["same_losses"] = same_losses(args, shape)
            if args.fsdp2:
                result["fsdp2"] = fsdp2_rows(args, shape)
    finally:  # what was measured is of use
        programs.write_json(args.out / "graphs.json", results)
    say_ratios(results)


if __name__ == "__main__":
    main()
