"""Trains with Flatshard under many settings, on one machine and in one call.

python3 bench/variants.py --nproc 4

The variants are batches, recomputation, sizes of the model, ZeRO stages and a model that
the host bounds. Each has a row of a table: the median step time, the host's part and the
peak of allocated memory. `bench/compare.py` compares with FSDP2.

--by lists alternatives to try one after the other. Each of them is one or more settings.
With several --by all combinations are tried, and the last --by changes the fastest:

python3 bench/variants.py --nproc 2 --only "8B, ZeRO-3" \\
    --by parallelism.copy_engines=none parallelism.copy_engines=all \\
    --by float8.recipe=none float8.recipe=tensorwise "float8.recipe=none model.layers=16"
"""

import itertools
from pathlib import Path

from harness.cases import VARIANTS
from harness.command_line import Parser
from harness.programs import RunFailed, file_name, machine, train_steps, write_json
from harness.tables import head, ms_and_range, row


def row_of(args, nproc, variant, chosen):
    seq, settings = VARIANTS[variant]
    args.nproc = nproc
    settings = [*settings, *args.set, *(s for text in chosen for s in text.split())]
    name = ", ".join([variant, *chosen])
    result = {"name": name, "nproc": nproc, "seq": seq}
    folder = args.out / file_name(name, nproc, "GPUs")
    try:
        found = train_steps(args, seq, settings, folder)
    except RunFailed as error:  # e.g. out of memory: the others are still of use
        row(name, nproc, seq, str(error)[-60:], "", "")
        return {**result, "error": str(error)}
    host, peak = f"{found['host_ms']:.0f}", f"{found['peak_GiB']:.1f}"
    row(name, nproc, seq, ms_and_range(found), host, peak)
    return {**result, **found}


def main():
    parser = Parser(__doc__, epilog="variants:\n  " + "\n  ".join(VARIANTS))
    parser.options("program", "config", "set", "warmup", "steps", nproc=[8])
    parser.options(out=Path("outputs/variants"))
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="VARIANT",
        choices=VARIANTS,
        default=list(VARIANTS),
        help="variants of those below, in quotes [all of them]",
    )
    parser.add_argument(
        "--by",
        action="append",
        nargs="+",
        default=[],
        metavar="SETTINGS",
        help="alternatives, each with blanks between its settings",
    )
    args = parser.parse_args()
    print(f"{machine()}\n")
    head("", "GPUs", "seq", "ms per step (range)", "host ms", "peak GiB")
    rows = [
        row_of(args, nproc, name, chosen)
        for nproc in list(args.nproc)
        for name in args.only
        for chosen in itertools.product(*args.by)
    ]
    write_json(args.out / "variants.json", {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
