"""Measures the host's time in the hooks of one unit, us per forward and backward.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/python_hooks.py

A stack of units of small layers is bound by the host. The time of the same stack without
sharding is subtracted. FSDP2 is measured in the same way. The
variants of a group alternate step by step, since a host's speed changes by the second. On
CPUs (--device cpu) collectives run on the host too, and the figures mean little.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from harness.command_line import Parser
from harness.peers import shard_function
from harness.ranks import join_mesh, say
from harness.steps import synchronize

COLLECTIVES = {"copy_engines": "none", "grads_in_place": False}
COPIES = {"copy_engines": "all", "grads_in_place": False}
# {variant: options of fully_shard}. The library is the name's first word. The copies'
# memory serves all models of a mesh, so they come last.
GROUPS = (
    {"plain": {}, "flatshard": COLLECTIVES, "fsdp2": {}},
    {
        "plain": {},
        "flatshard, copies": COPIES,
        "flatshard, copies, in place": {"copy_engines": "all"},
    },
)


def step_us(model, x):
    """Returns the host's time in forward and in backward."""
    synchronize()
    dist.barrier()
    begin = time.perf_counter()
    loss = model(x).sum()
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    model.zero_grad()
    return 1e6 * (middle - begin), 1e6 * (end - middle)


def alternate(models, x, args):
    """Returns for each model the least and the median of its forwards, and backwards."""
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


def stack(args, mesh, name, options):
    torch.manual_seed(0)

    def linear():
        return nn.Linear(args.dim, args.dim, bias=False)

    units = [
        nn.Sequential(*(linear() for _ in range(args.layers)))
        for _ in range(args.units)
    ]
    model = nn.Sequential(*units).to(args.device)
    if name != "plain":
        fully_shard = shard_function(name.split(",")[0])
        for module in (*units, model):
            fully_shard(module, mesh=mesh, **options)
    return model


def main():
    parser = Parser(__doc__).options(units=64, dim=256, warmup=5, steps=60)
    parser.add_argument("--layers", type=int, default=1, help="nn.Linear in a unit")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="of all"
    )
    args = parser.parse_args()
    mesh = join_mesh(args.device)
    x = torch.ones(8, args.dim, device=args.device)
    for group in GROUPS:
        models = {name: stack(args, mesh, name, group[name]) for name in group}
        times = alternate(models, x, args)
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
