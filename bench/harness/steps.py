"""Times of training steps, each waited for by the host."""

import contextlib
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist


@contextlib.contextmanager
def counted_recordings():
    """Gives a list that grows by one for each CUDA graph that torch records."""
    begin = torch.cuda.CUDAGraph.capture_begin
    seen = []

    def counted(self, *args, **kwargs):
        seen.append(1)
        return begin(self, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = counted
    try:
        yield seen
    finally:
        torch.cuda.CUDAGraph.capture_begin = begin


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_steps(step, args, together=False):
    """Calls `step` args.warmup + args.steps times.

    Args:
        together: ranks wait for each other before each step.

    Returns:
        a dict of the steps after the warm-up: `ms`, the median, `ms_range`, the least
        and the most, `host_ms`, the median until the call returned, and
        `host_ms_least`. It has the peaks of allocated and of reserved memory in GiB (0
        without a GPU), and `last`, the result of the last step. It also has the number
        of CUDA graphs that torch recorded in the warm-up and after it, and the seconds
        of the warm-up.
    """
    ms, host = [], []
    with counted_recordings() as recordings:
        began = time.perf_counter()
        for number in range(args.warmup + args.steps):
            synchronize()
            if number == args.warmup:
                warmup_s, recorded = time.perf_counter() - began, len(recordings)
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
            if together:
                dist.barrier()
            begin = time.perf_counter()
            last = step()
            queued = time.perf_counter()
            synchronize()
            if number >= args.warmup:
                ms.append(1e3 * (time.perf_counter() - begin))
                host.append(1e3 * (queued - begin))
    on_gpu = torch.cuda.is_available()
    return {
        "ms": statistics.median(ms),
        "ms_range": [min(ms), max(ms)],
        "host_ms": statistics.median(host),
        "host_ms_least": min(host),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0,
        "graphs_recorded": [recorded, len(recordings) - recorded],
        "warmup_s": warmup_s,
        "last": last,
    }


def rounded(found, digits=1):
    """Returns a dict with all numbers, also in lists, rounded to `digits` digits."""
    if isinstance(found, dict):
        return {key: rounded(value, digits) for key, value in found.items()}
    if isinstance(found, list):
        return [rounded(value, digits) for value in found]
    return round(found, digits) if isinstance(found, float) else found


def trace_step(step, path):
    """Calls `step`, and writes a Chrome trace of it on rank 0."""
    with torch.profiler.profile() as profile:
        step()
        synchronize()
    if dist.get_rank() == 0:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))


def measure(
    forward,
    optimizer,
    args,
    microbatches=1,
    backward=torch.Tensor.backward,
    trace=None,
):
    """Measures steps of forward, backward and update.

    Args:
        forward: returns the loss.
        microbatches: how many forwards and backwards a step has.
        backward: called with the loss.
        trace: a file for the trace of one more step.

    Returns:
        what `time_steps` returns in JSON's types, with the host's median ms in forwards,
        backwards and the update, and the last loss.
    """
    host = []

    def step():
        parts = [0.0, 0.0, 0.0]
        for _ in range(microbatches):
            begin = time.perf_counter()
            loss = forward()
            middle = time.perf_counter()
            backward(loss)
            parts[0] += middle - begin
            parts[1] += time.perf_counter() - middle
        updating = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        parts[2] = time.perf_counter() - updating
        host.append([1e3 * part for part in parts])
        return loss

    found = time_steps(step, args, together=True)
    parts = [statistics.median(part) for part in zip(*host[args.warmup :])]
    if trace:
        trace_step(step, trace)
    keys = ("peak_GiB", "reserved_GiB")
    return {
        **rounded({"ms": found["ms"], "ms_range": found["ms_range"]}),
        "host_ms_forward_backward_step": rounded(parts),
        **rounded({key: found[key] for key in keys}),
        "loss": round(found["last"].item(), 3),
        "graphs_recorded": found["graphs_recorded"],
    }
