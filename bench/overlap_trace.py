"""Reads a Chrome trace of a step that ran two microbatches at once, and says how
much of the tokens' travel ran beside compute, and what each node took.

usage: python3 bench/overlap_trace.py [--at-least SHARE] TRACE.json

An exchange is counted where the schedule has compute of another microbatch to hide
it: forwards of all but the first microbatch, backwards of all but the last. A copy
(or kernel of a collective) is hidden when a compute kernel of the other microbatch
runs at some moment of it. Times are means per step of the plan: of compute the sum
of its kernels, of an exchange from its first copy to its last. They are what
build/flatshard_overlap_price takes, as the last line has them; weight gradients that
are not late are in the backward's.

A run of one rank has no exchanges; its other nodes are those of any degree. Fails
when fewer copies than SHARE, of 1, are hidden, or there are none and SHARE is above 0.
"""

import argparse
import bisect
import collections
import json
import re
import sys

STEP = re.compile(r"([FRBW])(\d+)\.(\w+?)(?:\(\d+\))?")
EXCHANGES = ("dispatch", "combine")
Step = collections.namedtuple("Step", "begin end phase microbatch node")
Work = collections.namedtuple("Work", "begin end stream step is_copy")


def read_steps(events):
    """The plan's steps on the host, in the order in which they were queued."""
    steps = []
    for e in events:
        name = STEP.fullmatch(e.get("name", ""))
        if name and e.get("cat") == "user_annotation":
            phase, microbatch, node = name.groups()
            steps.append(
                Step(e["ts"], e["ts"] + e["dur"], phase, int(microbatch), node)
            )
    return sorted(steps)


def read_work(events, steps):
    """What ran on the GPU, each with the step that queued it."""
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
        work.append(
            Work(e["ts"], e["ts"] + e["dur"], e["args"]["stream"], steps[at], is_copy)
        )
    return work


def compute_of(work):
    """Kernels of the stream that computes."""
    kernels = [w for w in work if w.step.node not in EXCHANGES and not w.is_copy]
    busy = collections.Counter()
    for w in kernels:
        busy[w.stream] += w.end - w.begin
    stream = busy.most_common(1)[0][0] if busy else None
    return [w for w in kernels if w.stream == stream]


def partner(step, last):
    """The microbatch that computes beside it, or None."""
    if step.phase == "F":
        return step.microbatch - 1 if step.microbatch > 0 else None
    return step.microbatch + 1 if step.microbatch < last else None


def hidden_copies(work, compute, last):
    """(those that meet compute of the other microbatch, all that could), each the
    number of copies and their milliseconds."""
    met, all_of_them = [0, 0.0], [0, 0.0]
    for copy in work:
        beside = partner(copy.step, last)
        if copy.step.node not in EXCHANGES or not copy.is_copy or beside is None:
            continue
        meets = any(
            k.begin < copy.end and copy.begin < k.end
            for k in compute
            if k.step.microbatch == beside
        )
        for counts in (met, all_of_them) if meets else (all_of_them,):
            counts[0] += 1
            counts[1] += (copy.end - copy.begin) / 1e3
    return met, all_of_them


def node_times(work, compute):
    """{(phase, node): mean milliseconds of a step}"""
    by_step = collections.defaultdict(list)
    for w in compute:
        by_step[w.step].append(w)
    for w in work:
        if w.step.node in EXCHANGES and w.is_copy:
            by_step[w.step].append(w)
    times = collections.defaultdict(list)
    for step, those in by_step.items():
        if step.node in EXCHANGES:
            took = max(w.end for w in those) - min(w.begin for w in those)
        else:
            took = sum(w.end - w.begin for w in those)
        times[step.phase, step.node].append(took / 1e3)
    return {key: sum(all_of) / len(all_of) for key, all_of in times.items()}


def main(path):
    with open(path) as file:
        events = json.load(file)["traceEvents"]
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
    share = met[0] / could[0] if could[0] else None
    if could[0]:
        print(
            f"copies beside another microbatch: {could[0]} in {could[1]:.2f} ms, of which "
            f"{met[0]} ({100 * share:.0f} %, {met[1]:.2f} ms) meet its compute"
        )
    else:
        print("no tokens travel beside another microbatch: all experts are on this rank")
    times = sorted(node_times(work, compute).items())
    for (phase, node), ms in times:
        print(f"  {phase} {node:9} {ms:8.3f} ms")
    print(" ".join(f"{phase}.{node}={ms:.3f}" for (phase, node), ms in times))
    return share


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", metavar="TRACE.json")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args()
    found = main(options.trace)
    if found is None and options.at_least > 0:
        sys.exit(
            f"{options.trace}: expected tokens that travel on a GPU beside another "
            "microbatch, found none; trace a run on GPUs with "
            "parallelism.expert_parallel_degree"
        )
    if found is not None and found < options.at_least:
        sys.exit(f"expected {options.at_least:.0%} of the copies hidden, got {found:.0%}")
