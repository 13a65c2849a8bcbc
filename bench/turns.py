"""Compares two builds of the trainer, alternating, on one machine and in one call.

python3 bench/turns.py before/flatshard build/flatshard --nproc 1 --pairs 5
python3 bench/turns.py before/flatshard build/flatshard --nproc 2 --shape "8B, ZeRO-3"

Each pair runs both programs, the first one first in every other pair. Prints the
median step of each run, the ratio second / first of each pair and the median ratio.
"""

import statistics
from pathlib import Path

from harness.cases import USUAL, VARIANTS
from harness.command_line import Parser
from harness.programs import file_name, machine, train_steps, write_json
from harness.tables import by_turns, ratios


def main():
    parser = Parser(__doc__, epilog="shapes:\n  " + "\n  ".join(VARIANTS))
    parser.options("config", "set", "nproc", "pairs", warmup=8, steps=24)
    parser.options(out=Path("outputs/turns"))
    parser.add_argument("programs", nargs=2)
    parser.add_argument(
        "--shape",
        choices=VARIANTS,
        action="append",
        metavar="SHAPE",
        help=f"of those below; may be repeated [{', '.join(USUAL)}]",
    )
    args = parser.parse_args()
    print(machine(), flush=True)
    results = {}
    for shape in args.shape or USUAL:
        seq, settings = VARIANTS[shape]

        def run(which, pair):
            args.program = args.programs[which]
            folder = args.out / file_name(shape, which, pair)
            return train_steps(args, seq, [*settings, *args.set], folder)

        runs = by_turns((0, 1), args.pairs, run)
        each, median = ratios(runs[0], runs[1])
        keys = ("ms", "host_ms", "peak_GiB")
        figures = [[[run[key] for key in keys] for run in runs[way]] for way in runs]
        results[shape] = {"runs": figures, "ratios": each}
        for name, rows in zip(args.programs, runs.values()):
            ms = ", ".join(f"{row['ms']:.1f}" for row in rows)
            host = statistics.median(row["host_ms"] for row in rows)
            peak = rows[-1]["peak_GiB"]
            print(f"{shape}, {name}: ms {ms}; host {host:.1f} ms; peak {peak:.2f} GiB")
        texts = ", ".join(f"{ratio:.4f}" for ratio in each)
        print(f"{shape}: second / first {texts}; median {median:.4f}", flush=True)
    write_json(args.out / "turns.json", results)


if __name__ == "__main__":
    main()
