"""What CUDA graphs give the trainer: a step with and without, by turns and in one call.

python3 bench/graphs.py --program build/flatshard --peer --fsdp2

For a model that the host bounds and one that the GPU bounds, or those of `--shape`, on
one GPU or `--nproc`: each pair runs the trainer as it is and with `cuda_graph.impl=unit`,
and with `full_iteration` when `--ways eager unit step` asks for it, the first one first
in every other pair. Then one step of each is traced, which says what the GPU itself
computes: the eager trace's is the limit. When asked for, beside it:

  --fsdp2       FSDP2 with blocks and loss compiled, as bench/compare.sh runs it, and
                with the blocks in torch's own graphs ("reduce-overhead"): how many of
                them torch recorded in the warm-up and again behind it
  --peer        for the model that the host bounds: bench/graph_peer.py, or another
                script with its options and output: PyTorch unsharded and without an
                optimizer, launched in several ways. Compared with Flatshard's step less
                the optimizer's kernels, which is forward, backward, reduction and norm
  --same-losses N  N steps of each way with debug.deterministic: do all have the same
                losses, bit for bit

Prints a table and the ratios, and writes both, and each run, as graphs.json. All logs
and traces are below --out. Program and config are given by path, and no network is
needed. The table's last column names what ran eagerly in spite of graphs; nothing is
expected there.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from compare import BENCH, flatshard, fsdp2_row, machine
from trace_summary import COMM, class_of, gpu_events, union
from turns import SHAPES as USUAL
from variants import VARIANTS

HOST_BOUND = "64 layers of dim 1024"
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


def graph_row(folder):
    """What the run's metrics say of its graphs; without graphs nothing."""
    for line in (folder / "metrics.jsonl").read_text().split("\n"):
        if '"cuda_graph"' in line:
            return json.loads(line)["cuda_graph"]
    return {}


def sizes(shape):
    """The shape's sizes as options of the PyTorch benchmarks."""
    names = {
        "model.layers": "--layers",
        "model.dim": "--dim",
        "model.ffn_dim": "--ffn",
        "model.heads": "--heads",
        "model.kv_heads": "--kv-heads",
    }
    settings = (setting.split("=") for setting in SHAPES[shape][1])
    return [f"{names[key]}={value}" for key, value in settings if key in names]


def train(args, shape, way, name, more=()):
    seq, settings = SHAPES[shape]
    args.set = [*settings, *WAYS[way], *args.more, *more]
    folder = args.out / f"{shape} {way} {name}".replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder, flatshard(args, seq, folder)


def by_turns(args, shape):
    runs = {way: [] for way in args.ways}
    for pair in range(args.pairs):
        for way in args.ways if pair % 2 == 0 else reversed(args.ways):
            folder, (ms, ms_range, host, peak) = train(args, shape, way, pair)
            runs[way].append(
                {
                    "ms": ms,
                    "range": ms_range,
                    "host_ms": host,
                    "peak_GiB": peak,
                    "graphs": graph_row(folder),
                }
            )
    return runs


def computing(args, shape, way):
    """ms of one traced step: what the GPU computes, of it the optimizer."""
    step = args.warmup + 2
    more = ["profiling.enabled=true", f"profiling.step={step}"]
    folder, _ = train(args, shape, way, "trace", more)
    events = gpu_events(folder / "profile" / f"step_{step}_rank_0.json")
    compute = [e for e in events if class_of(e["name"]) not in COMM]
    updates = [e for e in compute if class_of(e["name"]) == "optimizer"]
    return {"gpu_ms": union(compute) / 1e3, "optimizer_ms": union(updates) / 1e3}


def summary(runs):
    """Of several runs: the median of medians and what they span."""
    fallbacks = {}
    for run in runs:
        for reason, count in run["graphs"].get("fallbacks", {}).items():
            fallbacks[reason] = fallbacks.get(reason, 0) + count
    return {
        "ms": statistics.median(run["ms"] for run in runs),
        "range": [
            min(run["range"][0] for run in runs),
            max(run["range"][1] for run in runs),
        ],
        "host_ms": statistics.median(run["host_ms"] for run in runs),
        "peak_GiB": max(run["peak_GiB"] for run in runs),
        "graphs_MB": max(run["graphs"].get("nbytes", 0) for run in runs) / 1e6,
        "fallbacks": fallbacks,
    }


def say_row(name, row):
    """A way of running in the table."""
    if "error" in row:
        print(f"| {name} | {row['error']} | | | | |", flush=True)
        return
    low, high = row["range"]
    eager = "; ".join(f"{why} ({n})" for why, n in row.get("fallbacks", {}).items())
    graphs = f"{row['graphs_MB']:.0f}" if row.get("graphs_MB") else ""
    print(
        f"| {name} | {row['ms']:.1f} ({low:.1f} to {high:.1f}) | {row['host_ms']:.1f} "
        f"| {row['peak_GiB']:.2f} | {graphs} | {eager} |",
        flush=True,
    )


def measure_shape(args, shape):
    runs = by_turns(args, shape)
    result = {"runs": runs, "ways": {way: summary(runs[way]) for way in runs}}
    for way, row in result["ways"].items():
        say_row(f"{shape}, {way}", row)
    ratios = {}
    if "eager" in runs:
        eager = result["ways"]["eager"]
        for way in (way for way in runs if way != "eager"):
            row = result["ways"][way]
            pairs = [b["ms"] / a["ms"] for a, b in zip(runs["eager"], runs[way])]
            ratios[f"{way} / eager, ms of each pair"] = pairs
            ratios[f"{way} / eager, ms"] = statistics.median(pairs)
            ratios[f"{way} / eager, host ms"] = row["host_ms"] / eager["host_ms"]
            ratios[f"{way} - eager, peak GiB"] = row["peak_GiB"] - eager["peak_GiB"]
    if args.trace:
        result["traces"] = {way: computing(args, shape, way) for way in runs}
        limit = result["traces"].get("eager", {}).get("gpu_ms")
        for way, row in result["ways"].items() if limit else ():
            ratios[f"{way} / what the GPU computes, ms"] = row["ms"] / limit
    result["ratios"] = ratios
    return result


def same_losses(args, shape):
    """Of a few deterministic steps each way's losses, and whether they are the same."""
    losses = {}
    for way in args.ways:
        more = ["debug.deterministic=true", f"training.steps={args.same_losses}"]
        folder, _ = train(args, shape, way, "losses", more)
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses[way] = [row["loss"] for row in rows if "loss" in row]
    first = losses[args.ways[0]]
    same = len(first) == args.same_losses and all(v == first for v in losses.values())
    ways = ", ".join(args.ways)
    print(
        f"| {shape}: {len(first)} losses of {ways} "
        f"{'are the same bits' if same else 'DIFFER'} | | | | | |",
        flush=True,
    )
    return {"same": same, "losses": losses}


def fsdp2_rows(args, shape):
    """FSDP2 compiled, and replaying torch's own graphs."""
    rows = {}
    for way, more in (("compiled", []), ("reduce-overhead", ["--reduce-overhead"])):
        try:
            found = fsdp2_row(args, SHAPES[shape][0], [*sizes(shape), "--gqa", *more])
            again = found["graphs_recorded"][1]
            row = {
                "ms": found["ms"],
                "range": found["ms_range"],
                "host_ms": sum(found["host_ms_forward_backward_step"]),
                "peak_GiB": found["peak_GiB"],
                "graphs_recorded": found["graphs_recorded"],
                "fallbacks": {"graphs recorded again": again} if again else {},
            }
        except RuntimeError as error:  # the others are still of use
            row = {"error": str(error)}
        rows[way] = row
        say_row(f"{shape}, FSDP2 {way}", row)
    return rows


def peer_rows(args):
    seq = SHAPES[HOST_BOUND][0]
    command = [sys.executable, str(args.peer), f"--seq={seq}", *sizes(HOST_BOUND)]
    log = args.out / "peer.log"
    with log.open("w") as file:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=file, text=True, check=False
        )
        file.write(done.stdout)
    lines = [line for line in done.stdout.split("\n") if line.startswith("{")]
    rows = {row.pop("way"): row for row in map(json.loads, lines)}
    if not rows:
        raise RuntimeError(f"{args.peer} ended with {done.returncode}; see {log}")
    for way, row in rows.items():
        say_row(f"{HOST_BOUND}, unsharded, no optimizer: {way}", row)
    return rows


def compare_peers(rows, ours):
    """Forward and backward, of ours with reduction and norm, as part of theirs."""
    ratios = {}
    for way, trace in ours.get("traces", {}).items():
        ms = ours["ways"][way]["ms"] - trace["optimizer_ms"]
        for peer, row in rows.items():
            if "error" not in row:
                ratios[f"{way} less the optimizer / unsharded {peer}, ms"] = ms / row["ms"]
    return ratios


def say_ratios(results):
    print("\n| ratio | |\n|---|---:|")
    for shape, result in results["shapes"].items():
        for name, value in result["ratios"].items():
            values = value if isinstance(value, list) else [value]
            text = ", ".join(f"{v:.3f}" for v in values)
            print(f"| {shape}: {name} | {text} |")
        for way, trace in result.get("traces", {}).items():
            text = f"{trace['gpu_ms']:.1f}, of it {trace['optimizer_ms']:.1f}"
            print(f"| {shape}: the GPU computes, {way}; the optimizer, ms | {text} |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default="build/flatshard", help="[%(default)s]")
    parser.add_argument(
        "--config", default="examples/llama3_8b.toml", help="[%(default)s]"
    )
    parser.add_argument("--nproc", type=int, default=1, help="GPUs [1]")
    parser.add_argument(
        "--shape", choices=SHAPES, action="append", help="[64 layers, 8 layers]"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=["eager", "unit"],
        help="of running the trainer; parts: attn and mlp of each block; step: forward "
        "and backward of a step as one graph [eager unit]",
    )
    parser.add_argument("--pairs", type=int, default=5, help="runs of each way; 0: none [5]")
    parser.add_argument("--warmup", type=int, default=12, help="steps [12]")
    parser.add_argument("--steps", type=int, default=12, help="measured [12]")
    parser.add_argument(
        "--peer",
        type=Path,
        nargs="?",
        const=BENCH / "graph_peer.py",
        metavar="SCRIPT",
        help="PyTorch unsharded as well [bench/graph_peer.py]",
    )
    parser.add_argument(
        "--fsdp2", action="store_true", help="FSDP2 with torch.compile as well"
    )
    parser.add_argument(
        "--same-losses", type=int, default=0, metavar="N", help="steps to compare [none]"
    )
    parser.add_argument(
        "--no-trace", dest="trace", action="store_false", help="measure alone"
    )
    parser.add_argument(
        "--set", dest="more", nargs="*", default=[], help="for all configs, last"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/graphs"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    results = {"machine": machine(), "shapes": {}}
    print(
        f"{results['machine']}\n\n| | ms per step (range) | host ms | peak GiB | MB of "
        "graphs | ran eagerly |\n|---|---:|---:|---:|---:|---|",
        flush=True,
    )
    try:
        for shape in args.shape or USUAL:
            result = measure_shape(args, shape) if args.pairs else {"ratios": {}}
            results["shapes"][shape] = result
            if args.same_losses:
                result["same_losses"] = same_losses(args, shape)
            if args.fsdp2:
                result["fsdp2"] = fsdp2_rows(args, shape)
        if args.peer:
            results["peer"] = peer_rows(args)
            ours = results["shapes"].get(HOST_BOUND, {"ratios": {}})
            ours["ratios"].update(compare_peers(results["peer"], ours))
    finally:  # what was measured is of use
        (args.out / "graphs.json").write_text(json.dumps(results, indent=1) + "\n")
    say_ratios(results)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
