"""Two builds of the trainer by turns, on one machine and in one call: is one slower?

python3 bench/turns.py before/flatshard build/flatshard --nproc 1 --pairs 5

Each pair runs both programs, the first one first in every other pair. Prints the
median step of each run, the ratio second / first of each pair and the median ratio.
"""

import argparse
import json
import statistics
from pathlib import Path

from compare import flatshard, machine
from variants import VARIANTS

SHAPES = {
    "8 layers of 8B shapes": (8192, ["model.layers=8"]),
    "64 layers of dim 1024": VARIANTS["64 layers of dim 1024"],
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs=2)
    parser.add_argument("--config", default="examples/llama3_8b.toml")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--out", type=Path, default=Path("outputs/turns"))
    args = parser.parse_args()
    print(machine(), flush=True)
    results = {}
    for shape in args.shape or SHAPES:
        seq, args.set = SHAPES[shape]
        runs = [[], []]
        for pair in range(args.pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                args.program = args.programs[which]
                folder = args.out / f"{shape}-{which}-{pair}".replace(" ", "-")
                folder.mkdir(parents=True, exist_ok=True)
                ms, _, host, peak = flatshard(args, seq, folder)
                runs[which].append((ms, host, peak))
        ratios = [b[0] / a[0] for a, b in zip(*runs)]
        results[shape] = {"runs": runs, "ratios": ratios}
        for which, name in enumerate(args.programs):
            print(
                f"{shape}, {name}: ms "
                + ", ".join(f"{ms:.1f}" for ms, _, _ in runs[which])
                + f"; host {statistics.median(r[1] for r in runs[which]):.1f} ms"
                + f"; peak {runs[which][-1][2]:.2f} GiB",
                flush=True,
            )
        print(
            f"{shape}: second / first {', '.join(f'{r:.4f}' for r in ratios)}; median "
            f"{statistics.median(ratios):.4f}",
            flush=True,
        )
    (args.out / "turns.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
