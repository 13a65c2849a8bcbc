"""Host time of the hooks of one unit, in microseconds per forward and backward.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/python_hooks.py

A stack of units of small layers, so that the host is what takes time; what the same
stack takes without sharding is subtracted. Beside it FSDP2. The variants of a group run
by turns, a step each, since a host's speed changes by the second. On CPUs (--device cpu)
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


COPIES = {"copy_engines": "all"}
# The copies' memory serves all models of a mesh, so they come last.
GROUPS = (
    {
        "plain": None,
        "flatshard": (flatshard.fully_shard, {}),
        "fsdp2": (fsdp2, {}),
    },
    {
        "plain": None,
        "flatshard, copies": (flatshard.fully_shard, COPIES),
        "flatshard, copies, in place": (
            flatshard.fully_shard,
            {**COPIES, "grads_in_place": True},
        ),
    },
)


def step_us(model, x):
    """What forward and backward take until the host is through."""
    if x.is_cuda:
        torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    loss = model(x).sum()
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    model.zero_grad()
    return 1e6 * (middle - begin), 1e6 * (end - middle)


def by_turns(models, x, args):
    """For each model the least and the median of its forwards, and of its backwards."""
    times = {name: [] for name in models}
    for step in range(args.warmup + args.steps):
        for name, model in models.items():
            taken = step_us(model, x)
            if step >= args.warmup:
                times[name].append(taken)
    return {
        name: [(min(part), statistics.median(part)) for part in zip(*taken)]
        for name, taken in times.items()
    }


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
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    x = torch.ones(8, args.dim, device=args.device)
    for group in GROUPS:
        models = {}
        for name, chosen in group.items():
            models[name] = stack(args)
            if chosen is not None:
                function, options = chosen
                for unit in models[name]:
                    function(unit, mesh=mesh, **options)
                function(models[name], mesh=mesh, **options)
        times = by_turns(models, x, args)
        plain = times.pop("plain")
        say("plain: {:.0f} us forward, {:.0f} backward".format(*(m for _, m in plain)))
        for name, parts in times.items():
            forward, backward = (
                [(a - b) / args.units for a, b in zip(part, without)]
                for part, without in zip(parts, plain)
            )
            say(
                f"{name}: us a unit, at least and in the median: "
                f"forward {forward[0]:.1f}, {forward[1]:.1f}; "
                f"backward {backward[0]:.1f}, {backward[1]:.1f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
