"""Do copies between two GPUs stay with copy engines when a CUDA graph holds them?

python3 bench/graph_copies.py

Four copies of 256 MiB from the second GPU run in parallel with three matrix products of
8192 on the first, launched one by one and as one graph. Prints how the profiler names
each, how often it ran and its mean. Copies that a copy engine makes are `gpu_memcpy`.
Others would be kernels, and hold the products back.
"""

import collections
import statistics
import sys
from ctypes import c_size_t, c_void_p
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from harness.command_line import Parser
from harness.cuda import check, library
from harness.traces import gpu_events

NBYTES = 256 << 20
COPY_DEFAULT = 4  # cudaMemcpyDefault


class Work:
    """One step: copies on one stream, products on another."""

    def __init__(self):
        torch.cuda.init()
        self.runtime = library("libcudart.so")
        self.runtime.cudaDeviceEnablePeerAccess(1, 0)
        self.here = torch.ones(NBYTES, dtype=torch.uint8, device="cuda:0")
        self.there = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:1")
        self.x = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.x)
        self.side = torch.cuda.Stream()

    def copy(self):
        to, source = c_void_p(self.here.data_ptr()), c_void_p(self.there.data_ptr())
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        nbytes = c_size_t(NBYTES)
        check(self.runtime.cudaMemcpyAsync(to, source, nbytes, COPY_DEFAULT, stream))

    def __call__(self):
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for _ in range(4):
                self.copy()
        for _ in range(3):
            torch.mm(self.x, self.x, out=self.out)
        torch.cuda.current_stream().wait_stream(self.side)


def profiled(run, trace):
    """Returns {(kind, name): microseconds of each}."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    times = collections.defaultdict(list)
    for event in gpu_events(trace):
        times[event["cat"], event["name"]].append(event["dur"])
    return times


def main():
    args = Parser(__doc__).options(out=Path("outputs/graph_copies")).parse_args()
    if torch.cuda.device_count() < 2:
        sys.exit(f"expected two GPUs, found {torch.cuda.device_count()}")
    args.out.mkdir(parents=True, exist_ok=True)
    work = Work()
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for name, run in (("one by one", work), ("as a graph", graph.replay)):
        times = profiled(run, args.out / f"{name.replace(' ', '_')}.json")
        for (kind, what), us in times.items():
            mean = statistics.mean(us)
            rate = f", {NBYTES / mean / 1e3:.0f} GB/s" if kind == "gpu_memcpy" else ""
            print(f"{name}: {kind} {what[:60]}: {len(us)} x {mean:.0f} us{rate}")


if __name__ == "__main__":
    main()
