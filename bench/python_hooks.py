"""Host time of the hooks of one unit, in microseconds per forward and backward.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/python_hooks.py

A stack of units of small layers, so that the host is what takes time; what the same
stack takes without sharding is subtracted. Beside it FSDP2. On CPUs (--device cpu)
collectives run on the host too, and the figures say little.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

import flatshard
from python_steps import say


def host_us(model, x, args):
    """Medians of what forward and backward take until the host is through."""
    forward, backward = [], []
    for step in range(args.warmup + args.steps):
        if x.is_cuda:
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        loss = model(x).sum()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        model.zero_grad()
        if step >= args.warmup:
            forward.append(1e6 * (middle - begin))
            backward.append(1e6 * (end - middle))
    return statistics.median(forward), statistics.median(backward)


def stack(args):
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(*(linear(args) for _ in range(args.layers)))
            for _ in range(args.units)
        )
    ).to(args.device)


def linear(args):
    return nn.Linear(args.dim, args.dim, bias=False)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1, help="nn.Linear in a unit [1]")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    x = torch.ones(8, args.dim, device=args.device)
    plain = host_us(stack(args), x, args)
    say(f"plain: forward {plain[0]:.0f} us, backward {plain[1]:.0f} us")
    ours = flatshard.fully_shard
    copies = {"copy_engines": "all"}
    for name, function, options in (
        ("flatshard", ours, {}),
        ("flatshard, copies", ours, copies),
        ("flatshard, copies, in place", ours, {**copies, "grads_in_place": True}),
        ("fsdp2", fsdp2, {}),
    ):
        model = stack(args)
        for unit in model:
            function(unit, mesh=mesh, **options)
        function(model, mesh=mesh, **options)
        forward, backward = host_us(model, x, args)
        per_unit = [(a - b) / args.units for a, b in zip((forward, backward), plain)]
        say(f"{name}: {per_unit[0]:.1f} us a unit forward, {per_unit[1]:.1f} backward")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
