"""Reads a Chrome trace of a step that ran two microbatches at once: how much of the
token exchange ran in parallel with compute, and how long each node ran.

python3 bench/overlap_trace.py --at-least 0.8 TRACE.json

An exchange is counted where the schedule has compute of another microbatch to hide it:
forwards of all but the first microbatch, backwards of all but the last. A copy (or
kernel of a collective) is hidden when a compute kernel of the other microbatch runs at
some moment of it. Times are means per step of the plan: of compute the sum of its
kernels, of an exchange from its first copy to its last. Weight gradients that are not
delayed are counted in the backward.

A run of one rank has no exchanges, and its other nodes are the same at any degree.
Fails when fewer copies than SHARE, of 1, are hidden, or when there are none and SHARE
is above 0.
"""

import bisect
import collections
import re
import sys

from harness.command_line import Parser
from harness.traces import events_of, span_of

STEP = re.compile(r"([FRBW])(\d+)\.(\w+?)(?:\(\d+\))?")
EXCHANGES = ("dispatch", "combine")
Step = collections.namedtuple("Step", "begin end phase microbatch node")
Work = collections.namedtuple("Work", "begin end stream step is_copy")


def read_steps(events):
    """Returns the plan's steps on the host, in the order in which they were queued."""
    steps = []
    for e in events:
        name = STEP.fullmatch(e.get("name", ""))
        if name and e.get("cat") == "user_annotation":
            phase, microbatch, node = name.groups()
            steps.append(Step(*span_of(e), phase, int(microbatch), node))
    return sorted(steps)


def read_work(events, steps):
    """Returns what ran on the GPU, each with the step that queued it."""
    begins = [step.begin for step in steps]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in e.get("args", {})
    }
    work = []
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        ts = launched.get(e["args"].get("correlation"))
        at = bisect.bisect_right(begins, ts) - 1 if ts is not None else -1
        if at < 0 or ts > steps[at].end:
            continue
        is_copy = e["cat"] == "gpu_memcpy" or "nccl" in e["name"].lower()
        work.append(Work(*span_of(e), e["args"]["stream"], steps[at], is_copy))
    return work


def compute_of(work):
    """Returns the kernels of the stream that computes."""
    kernels = [w for w in work if w.step.node not in EXCHANGES and not w.is_copy]
    busy = collections.Counter()
    for w in kernels:
        busy[w.stream] += w.end - w.begin
    stream = busy.most_common(1)[0][0] if busy else None
    return [w for w in kernels if w.stream == stream]


def copies_of(work):
    return [w for w in work if w.step.node in EXCHANGES and w.is_copy]


def partner(step, last):
    """Returns the microbatch that computes at the same time, or None."""
    if step.phase == "F":
        return step.microbatch - 1 if step.microbatch > 0 else None
    return step.microbatch + 1 if step.microbatch < last else None


def hidden_copies(work, compute, last):
    """Returns the milliseconds of copies that meet compute of the other microbatch, and
    of all copies that could."""
    met, could = [], []
    for copy in copies_of(work):
        other = partner(copy.step, last)
        if other is None:
            continue
        could.append((copy.end - copy.begin) / 1e3)
        if any(
            k.begin < copy.end and copy.begin < k.end
            for k in compute
            if k.step.microbatch == other
        ):
            met.append(could[-1])
    return met, could


def node_times(work, compute):
    """Returns {(phase, node): mean milliseconds of a step}."""
    by_step = collections.defaultdict(list)
    for w in [*compute, *copies_of(work)]:
        by_step[w.step].append(w)
    times = collections.defaultdict(list)
    for step, those in by_step.items():
        if step.node in EXCHANGES:
            took = max(w.end for w in those) - min(w.begin for w in those)
        else:
            took = sum(w.end - w.begin for w in those)
        times[step.phase, step.node].append(took / 1e3)
    return {key: sum(each) / len(each) for key, each in sorted(times.items())}


def read(path):
    """Prints what a trace shows. Returns the fraction of hidden copies, or None."""
    events = events_of(path)
    steps = read_steps(events)
    if not steps:
        sys.exit(
            f"{path}: expected steps of a plan such as F1.attend(0), found none; trace a "
            "run with parallelism.overlap_expert_parallel"
        )
    work = read_work(events, steps)
    compute = compute_of(work)
    last = max(step.microbatch for step in steps)
    met, could = hidden_copies(work, compute, last)
    print(f"{len(steps)} steps of {last + 1} microbatches")
    share = len(met) / len(could) if could else None
    if could:
        print(
            f"copies in parallel with another microbatch: {len(could)} in {sum(could):.2f} ms, of "
            f"which {len(met)} ({100 * share:.0f} %, {sum(met):.2f} ms) meet its compute"
        )
    else:
        print(
            "no tokens are exchanged in parallel with another microbatch: all experts are on this rank"
        )
    times = node_times(work, compute)
    for (phase, node), ms in times.items():
        print(f"  {phase} {node:9} {ms:8.3f} ms")
    return share


def main():
    parser = Parser(__doc__)
    parser.add_argument("trace", metavar="TRACE.json")
    parser.add_argument(
        "--at-least", type=float, default=0.0, metavar="SHARE", help="of 1"
    )
    args = parser.parse_args()
    found = read(args.trace)
    if found is None and args.at_least > 0:
        sys.exit(
            f"{args.trace}: expected a token exchange on a GPU in parallel with "
            "another microbatch, found none; trace a run on GPUs with "
            "parallelism.expert_parallel_degree"
        )
    if found is not None and found < args.at_least:
        sys.exit(f"expected {args.at_least:.0%} of the copies hidden, got {found:.0%}")


if __name__ == "__main__":
    main()
