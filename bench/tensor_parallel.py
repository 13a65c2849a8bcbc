"""Trains 12 layers of Llama-3-8B over two GPUs that share them, and prints a table.

python3 bench/tensor_parallel.py

PyTorch is bench/tensor_parallel_peer.py: `parallelize_module` with SequenceParallel,
blocks and loss compiled, with and without overlapped matmuls. Flatshard, by collectives
and by copies, is compared with the faster of the two. All runs are on one machine in
one call, one library after the other.
"""

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
from harness.tables import head, ms_and_range, row


def pytorch_steps(args, seq, options):
    log = args.out / f"{file_name('peer', seq, *options)}.log"
    options = [f"--seq={seq}", f"--tp={args.tp}", f"--layers={args.layers}", *options]
    return peer_steps(args, "tensor_parallel_peer.py", log, options)


def report(results, name, found, peer=None):
    ratio = f"{found['ms'] / peer['ms']:.3f}" if peer else ""
    host, peak = f"{found['host_ms']:.0f}", f"{found['peak_GiB']:.1f}"
    row(name, ms_and_range(found), ratio, host, peak)
    results["rows"].append({"name": name, **found})


def main():
    parser = Parser(__doc__).options("program", "config", "set", "warmup", "steps")
    parser.options(nproc=2, tp=2, layers=12, seq=[8192, 2048])
    parser.options(comm=["collective", "copies"])
    parser.options(out=Path("outputs/tensor_parallel"))
    args = parser.parse_args()
    results = {"machine": machine(), "nproc": args.nproc, "tp": args.tp, "rows": []}
    print(f"{args.nproc} ranks on {results['machine']}, tp {args.tp}\n")
    head("", "ms per step (range)", "of PyTorch", "host ms", "peak GiB")
    for seq in args.seq:
        peers = []
        for options in ([], ["--micro-pipeline"]):
            name = f"{' '.join(['PyTorch', *options])}, seq {seq}"
            try:
                peers.append(pytorch_steps(args, seq, options))
            except RunFailed as error:  # a setting that this machine does not run
                row(name, str(error)[-60:], "", "", "")
                continue
            report(results, name, peers[-1])
        best = min(peers, key=lambda peer: peer["ms"], default=None)
        for comm in args.comm:
            settings = [
                f"model.layers={args.layers}",
                f"parallelism.tensor_parallel_degree={args.tp}",
                f"parallelism.tensor_parallel_comm={comm}",
                *args.set,
            ]
            folder = args.out / file_name("flatshard", comm, seq)
            ours = train_steps(args, seq, settings, folder)
            report(results, f"Flatshard by {comm}, seq {seq}", ours, best)
    write_json(args.out / "tensor_parallel.json", results)


if __name__ == "__main__":
    main()
