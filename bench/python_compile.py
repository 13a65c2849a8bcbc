"""torch.compile under Flatshard's and FSDP2's fully_shard: Linear, CNN, Transformer.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/python_compile.py

Each case is a stack of equal blocks, a unit each, and runs four ways: Flatshard and
FSDP2, eager and with `block.compile()`. --graphs adds Flatshard with `ShardOptions(cuda_graph=True)`,
eager and with what its forward calls compiled. --reduce-overhead adds both with
`block.compile(mode="reduce-overhead")`, Flatshard in its arena, and how many CUDA graphs
torch recorded in the warm-up and again after it.

Prints a table: the median step (forward, backward, AdamW) in ms, its range, the host's
part, the peak of allocated memory and the last loss. Writes all of it as JSON. A case
that fails is a row with its error, and the exit status is 1. Without a GPU the sizes
are tiny: the script runs, and its times mean nothing.
"""

import functools
import sys
import traceback
from pathlib import Path

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import flatshard
from harness.command_line import Parser
from harness.peers import fully_shard_of, release
from harness.programs import write_json
from harness.ranks import about, join_mesh, say, usual_device
from harness.steps import time_steps
from harness.tables import head, ms_and_range, row


class LinearBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return x + F.gelu(self.linear(x))


class ConvBlock(nn.Module):
    def __init__(self, channels, groups):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


class TransformerBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, seq, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Blocks and a head. The root is a unit, too, with the head's parameters."""

    def __init__(self, block, num_blocks, channels):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(channels, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if x.dim() == 4:
            x = x.mean((2, 3))
        return self.head(x).float().square().mean()


# Case: (block, its arguments, number of blocks, shape of the input), for a GPU and to try
# the script. The number of channels is the first argument.
CASES = {
    "linear": (
        (LinearBlock, (4096,), 16, (16384, 4096)),
        (LinearBlock, (32,), 3, (8, 32)),
    ),
    "cnn": (
        (ConvBlock, (256, 32), 8, (256, 256, 32, 32)),
        (ConvBlock, (8, 2), 3, (2, 8, 6, 6)),
    ),
    "transformer": (
        (TransformerBlock, (2048, 16), 8, (4, 4096, 2048)),
        (TransformerBlock, (32, 2), 3, (2, 16, 32)),
    ),
}
LIBRARIES = ("flatshard", "fsdp2")
GRAPHS = "flatshard graphs"  # a library of the ways, as in LIBRARIES


@functools.cache
def compiled_inside(kind, backend):
    """Returns a class whose forward calls compiled code, the same for all blocks."""
    compiled = torch.compile(kind.forward, backend=backend)
    inside = {"forward": lambda self, x: compiled(self, x)}
    return type(f"Compiled{kind.__name__}", (kind,), inside)


def build(case, library, kind, mesh, args):
    """Returns the sharded model and its input."""
    block, sizes, num_blocks, shape = CASES[case][args.tiny]
    shape = (max(1, shape[0] // args.rows_divisor), *shape[1:])
    graphs = library == GRAPHS
    overhead = kind == "reduce-overhead"
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = Stack(lambda: block(*sizes), num_blocks, sizes[0])
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(shape).bfloat16()
    # On CPUs GroupNorm's backward crashes (torch 2.11).
    if x.dim() == 4 and mesh.device_type == "cuda":
        x = x.to(memory_format=torch.channels_last)
    fully_shard = fully_shard_of("flatshard" if graphs else library)
    if overhead and library == "flatshard":
        flatshard.configure(model, flatshard.ModelOptions(buffers_on_demand=False))
    for block in model.blocks:
        if overhead:
            block.compile(mode="reduce-overhead")
        elif kind == "compiled" and graphs:
            # The block is captured.
            block.__class__ = compiled_inside(type(block), args.backend)
        elif kind == "compiled":
            block.compile(backend=args.backend)
        fully_shard(block, mesh=mesh, **({"cuda_graph": True} if graphs else {}))
    fully_shard(model, mesh=mesh)
    return model, x


def measure(case, library, kind, mesh, args):
    graphs, overhead = library == GRAPHS, kind == "reduce-overhead"
    # Saved tensors keep their places in a graph, so compiled code gives none away.
    torch._functorch.config.donated_buffer = not graphs
    model, x = build(case, library, kind, mesh, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train_step():
        if overhead:
            torch.compiler.cudagraph_mark_step_begin()
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = time_steps(train_step, args)
    keys = ("ms", "host_ms", "peak_GiB", "warmup_s", "graphs_recorded")
    result = {key: found[key] for key in keys}
    result |= {"range": found["ms_range"], "loss": found["last"].item()}
    if graphs:
        result["cuda_graph"] = flatshard.cuda_graph_stats(model)
    return result


def attempt(*what):
    """Returns measure(*what), or the first error of any rank, so that all continue."""
    error = None
    try:
        result = measure(*what)
    except Exception:
        error = traceback.format_exc()  # a text: the frames would keep the model
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    failed = [f"rank {r}: {e}" for r, e in enumerate(errors) if e is not None]
    if failed:
        result = {"error": failed[0].strip()}
    release()
    torch._dynamo.reset()
    return result


def ways_of(args):
    """Returns pairs of a library and a kind."""
    libraries = [*LIBRARIES, *([GRAPHS] if args.graphs else [])]
    pairs = [(library, kind) for kind in ("eager", "compiled") for library in libraries]
    if args.reduce_overhead:
        pairs += [(library, "reduce-overhead") for library in LIBRARIES]
    return pairs


def parse():
    parser = Parser(__doc__).options("tiny", warmup=5, steps=12)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs as well")
    parser.add_argument(
        "--reduce-overhead", action="store_true", help="torch's own graphs as well"
    )
    parser.add_argument(
        "--rows-divisor",
        type=int,
        default=1,
        help="4: a quarter of the batch, with which the host is what takes time",
    )
    parser.options(out=Path("outputs/python_compile.json"))
    args = parser.parse_args()
    args.tiny = args.tiny or usual_device() == "cpu"
    return args


def print_row(case, way, r):
    if "error" in r:
        return row(case, way, r["error"].splitlines()[-1], "", "", "", "")
    recorded = "{}, {} later".format(*r["graphs_recorded"])
    figures = (f"{r[key]:.2f}" for key in ("host_ms", "peak_GiB"))
    return row(case, way, ms_and_range(r), *figures, f"{r['loss']:.5f}", recorded)


def main():
    args = parse()
    mesh = join_mesh(usual_device())
    say(f"{about(mesh)}" + (", tiny sizes" if args.tiny else "") + "\n")
    first = dist.get_rank() == 0
    if first:
        columns = ("ms per step (range)", "host ms", "peak GiB", "loss")
        head("case", "way", *columns, "torch's graphs", left=(0, 1))
    results = {}
    for case in args.cases:
        for library, kind in ways_of(args):
            result = attempt(case, library, kind, mesh, args)
            results.setdefault(case, {})[f"{library} {kind}"] = result
            if first:
                print_row(case, f"{library} {kind}", result)
    if first:
        options = {**vars(args), "out": str(args.out)}
        write_json(args.out, {"machine": about(mesh), "options": options} | results)
    dist.destroy_process_group()
    return any("error" in r for ways in results.values() for r in ways.values())


if __name__ == "__main__":
    sys.exit(main())
