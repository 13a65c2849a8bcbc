"""`python -m flatshard.doctor`: what this installation has, and what would not work.

Ends with 0 when training works on what this machine has, a CPU or GPUs, else with 1.
"""

import platform
import sys

import torch
import torch.distributed as dist

import flatshard
from flatshard import _C


def findings():
    """(name, value) of everything that matters."""
    yield "flatshard", flatshard.__version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "torch", f"{torch.__version__} (flatshard was built for {_C.torch_version})"
    yield "extension", _C.__file__
    yield "CUDA in flatshard", "yes" if _C.with_cuda else "no"
    yield "CUDA in torch", torch.version.cuda or "no"
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield (
            f"GPU {i}",
            f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}",
        )
    yield "gloo", "yes" if dist.is_gloo_available() else "no"
    yield "nccl", "yes" if dist.is_nccl_available() else "no"


def problems():
    """What would not work here, and what to do about it."""
    if torch.cuda.is_available() and not _C.with_cuda:
        yield (
            "training on this machine's GPUs: flatshard was built without CUDA; install "
            "the toolkit of torch's CUDA version and rebuild with FLATSHARD_CUDA=on"
        )
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield "training on several GPUs: this torch has no NCCL"
    if not dist.is_gloo_available():
        yield "training on CPUs: this torch has no Gloo"


def notes():
    """What this machine does not have, as far as torch sees."""
    if _C.with_cuda and not torch.cuda.is_available():
        yield "torch sees no GPU, so training is on the CPU (look at nvidia-smi)"


def try_out():
    """One step of a tiny model on one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        mesh = init_device_mesh("cpu", (1,))
        flatshard.fully_shard(model[0], mesh=mesh)
        flatshard.fully_shard(model, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
        return model[0].weight.grad is not None
    finally:
        dist.destroy_process_group()


def main():
    for name, value in findings():
        print(f"{name:18} {value}")
    for note in notes():
        print(f"{'note':18} {note}")
    works = dist.is_gloo_available() and try_out()
    print(f"{'one step on a CPU':18} {'works' if works else 'FAILED'}")
    found = list(problems())
    for problem in found:
        print(f"would not work: {problem}")
    return 0 if works and not found else 1


if __name__ == "__main__":
    sys.exit(main())
