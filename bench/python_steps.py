"""The loop that the Python benchmarks measure."""

import contextlib
import statistics
import time

import torch
import torch.distributed as dist


def say(*values):
    if dist.get_rank() == 0:
        print(*values, flush=True)


@contextlib.contextmanager
def counted_recordings():
    """A list that grows by one for each CUDA graph that torch records."""
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


def run_step(forward, optimizer, microbatches):
    """The step's ms, the host's in forwards, backwards and update, and a loss."""
    synchronize()
    dist.barrier()
    begin = time.perf_counter()
    parts = [0.0, 0.0, 0.0]
    for _ in range(microbatches):
        times = [time.perf_counter()]
        loss = forward()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        parts[0] += times[1] - times[0]
        parts[1] += times[2] - times[1]
    updating = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    parts[2] = time.perf_counter() - updating
    synchronize()
    return 1e3 * (time.perf_counter() - begin), [1e3 * part for part in parts], loss


def measure(forward, optimizer, args, microbatches=1):
    """Medians over args.steps steps after args.warmup of forward, backward and update.

    Args:
        forward: returns the loss.
        microbatches: how many forwards and backwards a step has.

    Returns:
        ms of a step with their range, the host's ms in each part, the peak of
        allocated memory and of what the allocator took in GiB (0 without a GPU), the
        last loss, and how many CUDA graphs torch recorded in the warm-up and behind it.
    """
    on_gpu = torch.cuda.is_available()
    steps, host = [], []
    with counted_recordings() as recordings:
        for _ in range(args.warmup):
            run_step(forward, optimizer, microbatches)
        recorded = len(recordings)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(args.steps):
            ms, parts, loss = run_step(forward, optimizer, microbatches)
            steps.append(ms)
            host.append(parts)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
    return {
        "ms": round(statistics.median(steps), 1),
        "ms_range": [round(min(steps), 1), round(max(steps), 1)],
        "host_ms_forward_backward_step": [
            round(statistics.median(part), 1) for part in zip(*host)
        ],
        "peak_GiB": round(peak / 2**30, 1),
        "reserved_GiB": round(reserved / 2**30, 1),
        "loss": round(loss.item(), 3),
        "graphs_recorded": [recorded, len(recordings) - recorded],
    }
