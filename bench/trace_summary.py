"""Reads a Chrome trace of one training step and prints where the GPU's time went.

python3 bench/trace_summary.py TRACE.json

Prints milliseconds and kernel counts per class, the streams, and how long no compute
kernel ran, with the part of that in which collectives or copies between GPUs ran. Then
how many collectives ran in parallel with a GEMM or attention kernel (counted by kernel,
from their intervals).
"""

import collections

from harness.command_line import Parser
from harness.traces import COLLECTIVES, COPIES, class_of, gpu_events, span_of, union


def main():
    parser = Parser(__doc__)
    parser.add_argument("trace", metavar="TRACE.json")
    path = parser.parse_args().trace
    spans, streams = collections.defaultdict(list), collections.defaultdict(set)
    other = collections.Counter()
    for e in gpu_events(path):
        label = class_of(e["name"])
        spans[label].append(span_of(e))
        streams[label].add(e["args"].get("stream"))
        if label in ("other", "copy/set"):
            other[e["name"][:80]] += e["dur"]

    def of(labels):
        return [span for label in labels for span in spans.get(label, ())]

    everything = of(list(spans))
    compute = of(set(spans).difference(COLLECTIVES + COPIES))
    begin, end = min(b for b, _ in everything), max(e for _, e in everything)
    busy, span = union(compute), end - begin
    print(f"span {span / 1e3:.1f} ms, compute busy {busy / 1e3:.1f} ms")
    print(f"no compute kernel runs for {(span - busy) / 1e3:.1f} ms")
    for what, labels in (("collectives", COLLECTIVES), ("peer copies", COPIES)):
        exposed = union(compute + of(labels)) - busy
        print(f"  of these beside {what}: {exposed / 1e3:.1f} ms")
    totals = {label: sum(e - b for b, e in each) for label, each in spans.items()}
    for label, total in collections.Counter(totals).most_common():
        print(
            f"  {label:16} {total / 1e3:8.1f} ms  n={len(spans[label]):<5} "
            f"streams {sorted(streams[label])}"
        )
    for name, total in other.most_common(8):
        print(f"     {total / 1e3:7.2f} ms {name}")
    heavy = of(("gemm", "attention"))
    for label in COLLECTIVES[:2]:
        kernels = of([label])
        beside = sum(
            any(b < end and begin < e for b, e in heavy) for begin, end in kernels
        )
        print(f"{label}: {beside} of {len(kernels)} run beside a GEMM")


if __name__ == "__main__":
    main()
