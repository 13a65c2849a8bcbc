"""Trains Llama-3-8B shapes with sequences that all GPUs share, and prints a table.

python3 bench/context_parallel.py --nproc 2 --layers 12 --seq 32768 65536 131072

PyTorch is bench/context_parallel_peer.py: FSDP2 with an exchange of heads, and with
torch's context_parallel. Flatshard is compared with the faster of the two. All recompute
blocks, store the result of attention, and compute the loss in chunks. The ways alternate
(--pairs). "Exposed" is communication that no compute hides, in percent of the step.
"""

import statistics
from pathlib import Path

from harness.command_line import Parser
from harness.programs import (
    RunFailed,
    file_name,
    machine,
    peer_steps,
    train_steps,
    write_json,
)
from harness.tables import by_turns, head, row

PEERS = {"PyTorch, heads": "heads", "PyTorch, keys": "keys"}


def settings_of(args, seq, comm):
    return [
        f"model.layers={args.layers}",
        f"model.max_seq_len={seq}",
        f"parallelism.context_parallel_degree={args.nproc}",
        f"parallelism.context_parallel_comm={comm}",
        "activation_checkpoint.mode=full",
        "activation_checkpoint.save=attention",
        f"activation_checkpoint.loss_chunk_tokens={args.loss_chunk}",
        *args.set,
    ]


def measure(args, seq, way, pair):
    """Returns a run's medians, or the error of one that failed."""
    name = file_name(way, seq, pair)
    try:
        if way not in PEERS:
            settings = settings_of(args, seq, way.split()[-1])
            return train_steps(args, seq, settings, args.out / name)
        options = [f"--way={PEERS[way]}", f"--seq={seq}", f"--layers={args.layers}"]
        options += [f"--loss-chunk={args.loss_chunk}"]
        log = args.out / f"{name}.log"
        return peer_steps(args, "context_parallel_peer.py", log, options)
    except RunFailed as error:  # e.g. out of memory: the others are still of use
        return {"error": str(error)}


def medians_of(runs):
    """Returns the medians of the runs, or None if one failed."""
    if any("error" in found for found in runs):
        return None
    keys = [key for key in ("ms", "peak_GiB", "exposed_ms") if key in runs[0]]
    return {key: statistics.median(found[key] for found in runs) for key in keys}


def report(seq, runs):
    """Prints a row for each way."""
    medians = {way: medians_of(each) for way, each in runs.items()}
    peers = [medians[way] for way in PEERS if medians.get(way)]
    best = min(peers, key=lambda peer: peer["ms"], default=None)
    for way, found in medians.items():
        if not found:
            errors = [run["error"] for run in runs[way] if "error" in run]
            row(way, seq, errors[0][-60:], "", "", "", "")
            continue
        ours = way not in PEERS and best
        ratios = [
            f"{found[k] / best[k]:.3f}" if ours else "" for k in ("ms", "peak_GiB")
        ]
        exposed = found.get("exposed_ms")
        share = f"{exposed / found['ms']:.1%}" if exposed is not None else ""
        ms, peak = f"{found['ms']:.1f}", f"{found['peak_GiB']:.1f}"
        row(way, seq, ms, ratios[0], peak, ratios[1], share)


def main():
    parser = Parser(__doc__).options("program", "config", "set", nproc=2, layers=12)
    parser.options(seq=[32768, 65536, 131072], warmup=2, steps=3, pairs=1)
    parser.options(loss_chunk=8192, comm=["auto"], out=Path("outputs/context_parallel"))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    args = parser.parse_args()
    results = {"machine": machine(), "nproc": args.nproc, "runs": {}}
    print(f"{args.nproc} ranks on {results['machine']}, {args.layers} layers\n")
    ways = [*args.peers, *(f"Flatshard by {comm}" for comm in args.comm)]
    head("", "seq", "ms per step", "of PyTorch", "peak GiB", "of PyTorch", "exposed")
    for seq in args.seq:

        def one(way, pair):
            return measure(args, seq, way, pair)

        results["runs"][seq] = by_turns(ways, args.pairs, one)
        report(seq, results["runs"][seq])
    write_json(args.out / "context_parallel.json", results)


if __name__ == "__main__":
    main()
