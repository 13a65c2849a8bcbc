"""Trains Llama-3-8B with FSDP2 + torch.compile and with Flatshard, and prints a table.

python3 bench/compare.py --nproc 8

One machine and one call, one library after the other. With several --peer it tries each
setting of FSDP2, and compares Flatshard with the fastest. --out has the table as
compare.json, and all logs.
"""

from pathlib import Path

from harness.command_line import Parser
from harness.programs import fsdp2_steps, machine, train_steps, write_json
from harness.tables import head, ms_and_range, row


def report(results, name, found, peer=None):
    result = {"name": name}
    result |= {key: found[key] for key in ("ms", "range", "host_ms", "peak_GiB")}
    ratios = ["", ""]
    if peer is not None:
        ms, peak = (found[key] / peer[key] for key in ("ms", "peak_GiB"))
        result["of_fsdp2"] = {"ms": ms, "peak": peak}
        ratios = [f"{ms:.3f}", f"{peak:.3f}"]
    results["rows"].append(result)
    host, peak = f"{found['host_ms']:.0f}", f"{found['peak_GiB']:.1f}"
    row(name, ms_and_range(found), ratios[0], host, peak, ratios[1])


def main():
    parser = Parser(__doc__)
    parser.options("program", "config", "set", nproc=8, seq=[8192, 2048], steps=10)
    parser.options("warmup", out=Path("outputs/compare"))
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        help="options of bench/fsdp2_llama.py, e.g. --peer=--gqa, repeated to try several",
    )
    args = parser.parse_args()
    results = {"machine": machine(), "nproc": args.nproc, "rows": []}
    print(f"{args.nproc} ranks on {results['machine']}\n")
    head("", "ms per step (range)", "of FSDP2", "host ms", "peak GiB", "of FSDP2")
    for seq in args.seq:
        peers = []
        for options in [peer.split() for peer in args.peer] or [[]]:
            peers.append(fsdp2_steps(args, seq, options))
            report(results, f"{' '.join(['FSDP2', *options])}, seq {seq}", peers[-1])
        ours = train_steps(args, seq, args.set, args.out / f"flatshard-{seq}")
        best = min(peers, key=lambda peer: peer["ms"])
        report(results, f"Flatshard, seq {seq}", ours, best)
    write_json(args.out / "compare.json", results)


if __name__ == "__main__":
    main()
