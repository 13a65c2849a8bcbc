"""Chrome traces of training steps: what ran on the GPU, by class of kernel."""

import json

CLASSES = {
    "all-gather": ("allgather",),
    "reduce-scatter": ("reducescatter",),
    "other nccl": ("nccl",),
    "peer copies": ("ptop",),
    "sums of gradients": ("sum_rows",),
    "attention": ("fmha", "flash", "sdpa", "attention"),
    "gemm": ("gemm", "nvjet", "cutlass", "splitk"),
    "rms_norm": ("rms_norm",),
    "rope": ("rope",),
    "swiglu": ("swiglu",),
    "cross_entropy": ("cross_entropy",),
    "optimizer": ("update_kernel",),
    "copy/set": ("memcpy", "memset", "copy", "cat"),
}
COLLECTIVES = ("all-gather", "reduce-scatter", "other nccl")
COPIES = ("peer copies",)


def class_of(name):
    """Returns the first class with a word that the kernel's name has."""
    lower = name.lower()
    found = (
        label for label, words in CLASSES.items() if any(w in lower for w in words)
    )
    return next(found, "other")


def events_of(path):
    """Returns all events of a trace."""
    with open(path) as file:
        return json.load(file)["traceEvents"]


def gpu_events(path):
    """Returns the kernels, copies and fills of a trace."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [event for event in events_of(path) if event.get("cat") in kinds]


def span_of(event):
    """Returns when an event begins and ends, in microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def union(spans):
    """Returns the length that pairs of a begin and an end cover together."""
    covered, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered
