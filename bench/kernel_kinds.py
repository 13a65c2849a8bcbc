"""Reads a Chrome trace and prints a table of the GPU's time by kind of kernel.

python3 bench/kernel_kinds.py TRACE.json

TRACE.json, or TRACE.json.gz, is a trace of one step by the trainer (profiling.enabled) or
by torch.profiler. For one of several steps, --steps divides all figures. "ms" is the sum
of a kind's kernels. "added" is the time in which a kernel of the kind runs and none of
the rows above, so that these times and the idle time add up to the step: from the start
of the first kernel to the end of the last. The profiler slows the host, so a step without
it can have less idle time. Below the table are the largest kernels of the
kind "other kernels".
"""

import collections
import re
import sys

from harness.command_line import Parser
from harness.tables import head, row
from harness.traces import events_of, span_of

OTHER = "other kernels"
# The first expression found in the name of a kernel or copy counts. Inductor names
# pointwise kernels and sums by the operators next to them.
KINDS = (
    (OTHER, r"^triton_(poi|red|per|for)_"),
    ("attention", r"fmha|flash|sdpa|attention|cudnn(?!::cnn)"),
    ("matmuls of Flatshard", r"flatshard.*matmul"),
    ("matmuls", r"gemm|gemv|nvjet|cutlass|splitk|xmma|^triton_(tem|mm)"),
    ("communication", r"nccl|ptop|p2p"),
    ("copies and fills", r"^mem(cpy|set)"),
    (OTHER, ""),
)
ROWS = (
    "attention",
    "matmuls",
    "matmuls of Flatshard",
    OTHER,
    "communication",
    "copies and fills",
)
NAMES = 12
Work = collections.namedtuple("Work", "begin end kind name")


def kind_of(name):
    return next(kind for kind, words in KINDS if re.search(words, name, re.IGNORECASE))


def read_work(events):
    """Returns all kernels, copies and fills of GPUs."""
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    return [
        Work(*span_of(e), kind_of(e["name"]), e["name"])
        for e in events
        if e.get("cat") in on_gpu and e.get("ph") == "X"
    ]


def covered(work):
    """Returns the microseconds in which at least one runs."""
    total, until = 0.0, float("-inf")
    for begin, end, *_ in sorted(work):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def report(work, steps):
    """Prints the table, and the largest names of OTHER."""
    span = max(w.end for w in work) - min(w.begin for w in work)

    def line(kind, count, us, added):
        texts = (f"{x / 1e3 / steps:.3f}" if x != "" else "" for x in (us, added))
        row(kind, count, *texts, f"{added / span:.1%}")

    head("kind", "kernels", "ms", "added", "of the step")
    above, known = [], 0.0
    for kind in ROWS:
        mine = [w for w in work if w.kind == kind]
        above += mine
        busy = covered(above)
        us = sum(w.end - w.begin for w in mine)
        line(kind, f"{len(mine) / steps:g}", us, busy - known)
        known = busy
    line("idle", "", "", span - known)
    line("the step", f"{len(work) / steps:g}", "", span)
    names = collections.defaultdict(list)
    for w in work:
        if w.kind == OTHER:
            names[w.name].append(w.end - w.begin)
    print(f"\nThe largest of {len(names)} {OTHER}, ms and kernels:")
    for name, each in sorted(names.items(), key=lambda item: -sum(item[1]))[:NAMES]:
        print(f"{sum(each) / 1e3 / steps:9.3f} {len(each) / steps:6g}  {name[:100]}")


def main():
    parser = Parser(__doc__).options(steps=1)
    parser.add_argument("trace", metavar="TRACE.json")
    args = parser.parse_args()
    work = read_work(events_of(args.trace))
    if not work:
        sys.exit(f"{args.trace}: expected kernels, found none; trace a step on a GPU")
    report(work, args.steps)


if __name__ == "__main__":
    main()
