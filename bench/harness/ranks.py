"""The ranks of a benchmark that torchrun starts, one on each GPU."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def usual_device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def join(kind="cuda", own_device=False, **options):
    """Selects this rank's GPU and joins the process group over NCCL, or Gloo on CPUs.

    Args:
        own_device: passes the GPU to NCCL, so that it connects before the first
        collective.
        options: of init_process_group.

    Returns:
        the rank's device
    """
    device = torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.device(kind, torch.cuda.current_device())
    if own_device:
        options["device_id"] = device
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **options)
    return device


def join_mesh(kind="cuda", **options):
    """Joins, and returns the mesh of all ranks."""
    join(kind, **options)
    return init_device_mesh(kind, (dist.get_world_size(),))


def say(*values):
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(*values, flush=True)


def about(mesh):
    """Returns the number of ranks, what they run on, and torch's version."""
    name = torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU"
    return f"{mesh.size()}x {name}, torch {torch.__version__}"
