"""Reads a Chrome trace of one training step and says where the GPU's time went.

usage: python3 bench/trace_summary.py TRACE.json

Prints milliseconds and kernel counts per class, how many collectives ran beside
a GEMM or attention kernel (counted by kernel, from their intervals), on which
streams, how long no compute kernel ran at all, and how much of that time something
travelled between GPUs: by collectives, or by copies.
"""

import collections
import json
import sys

CLASSES = [
    ("all-gather", ("allgather",)),
    ("reduce-scatter", ("reducescatter",)),
    ("other nccl", ("nccl",)),
    ("peer copies", ("ptop",)),
    ("sums of gradients", ("sum_rows",)),
    ("attention", ("fmha", "flash", "sdpa", "attention")),
    ("gemm", ("gemm", "nvjet", "cutlass", "splitk")),
    ("rms_norm", ("rms_norm",)),
    ("rope", ("rope",)),
    ("swiglu", ("swiglu",)),
    ("cross_entropy", ("cross_entropy",)),
    ("optimizer", ("update_kernel",)),
    ("copy/set", ("memcpy", "memset", "copy", "cat")),
]
COLLECTIVES = ("all-gather", "reduce-scatter", "other nccl")
COPIES = ("peer copies",)


def class_of(name):
    lower = name.lower()
    for label, words in CLASSES:
        if any(word in lower for word in words):
            return label
    return "other"


def union(events):
    """Total length covered by the intervals, in microseconds."""
    covered, end = 0.0, None
    for e in sorted(events, key=lambda e: e["ts"]):
        begin, stop = e["ts"], e["ts"] + e["dur"]
        if end is None or begin > end:
            covered += stop - begin
            end = stop
        elif stop > end:
            covered += stop - end
            end = stop
    return covered


def gpu_events(path):
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def main(path):
    gpu = gpu_events(path)
    time, count = collections.Counter(), collections.Counter()
    streams = collections.defaultdict(set)
    other = collections.Counter()
    for e in gpu:
        label = class_of(e["name"])
        time[label] += e["dur"]
        count[label] += 1
        streams[label].add(e["args"].get("stream"))
        if label in ("other", "copy/set"):
            other[e["name"][:80]] += e["dur"]
    compute = [e for e in gpu if class_of(e["name"]) not in COLLECTIVES + COPIES]
    heavy = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in gpu
        if class_of(e["name"]) in ("gemm", "attention")
    )
    span = max(e["ts"] + e["dur"] for e in gpu) - min(e["ts"] for e in gpu)
    print(f"span {span / 1e3:.1f} ms, compute busy {union(compute) / 1e3:.1f} ms")
    print(f"no compute kernel runs for {(span - union(compute)) / 1e3:.1f} ms")
    for what, classes in (("collectives", COLLECTIVES), ("peer copies", COPIES)):
        travel = [e for e in gpu if class_of(e["name"]) in classes]
        exposed = union(compute + travel) - union(compute)
        print(f"  of these beside {what}: {exposed / 1e3:.1f} ms")
    for label, total in time.most_common():
        print(
            f"  {label:16} {total / 1e3:8.1f} ms  n={count[label]:<5} "
            f"streams {sorted(streams[label])}"
        )
    for name, total in other.most_common(8):
        print(f"     {total / 1e3:7.2f} ms {name}")
    for label in COLLECTIVES[:2]:
        kernels = [e for e in gpu if class_of(e["name"]) == label]
        beside = sum(
            any(b < e["ts"] + e["dur"] and e["ts"] < f for b, f in heavy)
            for e in kernels
        )
        print(f"{label}: {beside} of {len(kernels)} run beside a GEMM")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
