"""The loop that the Python benchmarks measure."""

import statistics
import time

import torch
import torch.distributed as dist


def say(*values):
    if dist.get_rank() == 0:
        print(*values, flush=True)


def measure(forward, optimizer, args):
    """Medians over args.steps steps after args.warmup of forward, backward and update.

    Args:
        forward: returns the loss.

    Returns:
        ms of a step with their range, the host's ms in each part, the peak of
        allocated memory and of what the allocator took in GiB (0 without a GPU), and
        the last loss.
    """
    on_gpu = torch.cuda.is_available()
    steps, host = [], []
    for step in range(args.warmup + args.steps):
        if step == args.warmup and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        times = [time.perf_counter()]
        loss = forward()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        if on_gpu:
            torch.cuda.synchronize()
        end = time.perf_counter()
        if step >= args.warmup:
            steps.append(1e3 * (end - times[0]))
            host.append([1e3 * (b - a) for a, b in zip(times, times[1:])])
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
    }
