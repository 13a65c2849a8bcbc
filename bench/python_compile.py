"""torch.compile under Flatshard's and FSDP2's fully_shard: Linear, CNN, Transformer.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/python_compile.py

Each case is a stack of equal blocks, a unit each, and runs four ways: Flatshard and
FSDP2, eager and with `block.compile()`. --graphs adds Flatshard with `ShardOptions(cuda_graph=True)`,
eager and with what its forward calls compiled. --reduce-overhead adds both with
`block.compile(mode="reduce-overhead")`, Flatshard in its arena, and how many CUDA graphs
torch recorded in the warm-up and again after it.

Prints one table, then the ratios: the median step (forward, backward, AdamW) in ms, its
range, the host's part, what one more step's kernels took the GPU (profiled), the peak of
allocated memory and the last loss. Writes all of it as JSON. A way that fails is a row
with its error, and the exit status is 1. Without a GPU the sizes are tiny: that tries the
script and measures nothing.
"""

import functools
import sys
import time
import traceback
from datetime import timedelta
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
from harness.steps import counted_recordings, time_steps
from harness.traces import union


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
    """Blocks, and a head: parameters of the root, which is a unit, too."""

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
GRAPHS = "flatshard graphs"  # a library of the ways, as those of LIBRARIES
# {name: (numerator, denominator)} of step times.
RATIOS = {
    "flatshard compiled / eager": ("flatshard compiled", "flatshard eager"),
    "fsdp2 compiled / eager": ("fsdp2 compiled", "fsdp2 eager"),
    "eager: flatshard / fsdp2": ("flatshard eager", "fsdp2 eager"),
    "compiled: flatshard / fsdp2": ("flatshard compiled", "fsdp2 compiled"),
    "flatshard graphs / eager": (f"{GRAPHS} eager", "flatshard eager"),
    "flatshard graphs / compiled": (f"{GRAPHS} eager", "flatshard compiled"),
    "compiled: graphs / none": (f"{GRAPHS} compiled", "flatshard compiled"),
    "reduce-overhead / compiled": ("flatshard reduce-overhead", "flatshard compiled"),
    "reduce-overhead: flatshard / fsdp2": (
        "flatshard reduce-overhead",
        "fsdp2 reduce-overhead",
    ),
}


def gpu_ms(step):
    """Returns how long kernels and copies of step() run on this GPU. Those that run at the
    same time count once."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    kernels = (
        event.time_range
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return union((kernel.start, kernel.end) for kernel in kernels) / 1e3


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

    cuda = mesh.device_type == "cuda"
    with counted_recordings() as recordings:
        found = time_steps(train_step, args)
        keys = ("ms", "ms_range", "host_ms", "peak_GiB", "warmup_s")
        result = {key: found[key] for key in keys}
        result |= {"loss": found["last"].item(), "gpu_ms": None}
        if cuda:
            result["gpu_ms"] = gpu_ms(train_step)
        else:
            result["peak_GiB"] = None
    if overhead:
        recorded = found["graphs_recorded"][0]
        result["recorded"] = recorded
        result["recorded_again"] = len(recordings) - recorded
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


def over_budget(begin, args):
    """Returns whether the budget is spent, by the clock of rank 0 for all."""
    late = [time.perf_counter() - begin > args.budget_s]
    dist.broadcast_object_list(late)
    return late[0]


def ratios(ways):
    return {
        name: ways[a]["ms"] / ways[b]["ms"]
        for name, (a, b) in RATIOS.items()
        if "ms" in ways.get(a, {}) and "ms" in ways.get(b, {})
    }


def print_table(results):
    say(
        f"\n{'case':12} {'way':25} {'ms':>8} {'range':>17} {'host ms':>8} "
        f"{'GPU ms':>8} {'peak GiB':>9} {'loss':>9} {'warm-up s':>9}"
    )
    rows = [(case, way, ways[way]) for case, ways in results.items() for way in ways]
    for case, way, r in rows:
        if "error" in r:
            say(f"{case:12} {way:25} FAILED: {r['error'].splitlines()[-1]}")
            continue
        low, high = r["ms_range"]
        peak = "-" if r["peak_GiB"] is None else f"{r['peak_GiB']:.2f}"
        gpu = "-" if r["gpu_ms"] is None else f"{r['gpu_ms']:.2f}"
        say(
            f"{case:12} {way:25} {r['ms']:8.2f} {f'{low:.2f} to {high:.2f}':>17} "
            f"{r['host_ms']:8.2f} {gpu:>8} {peak:>9} {r['loss']:9.5f} "
            f"{r['warmup_s']:9.1f}"
        )
    for case, way, r in rows:
        if "recorded" in r:
            say(
                f"{case}, {way}: torch recorded {r['recorded']} CUDA graphs in the "
                f"warm-up, {r['recorded_again']} after it"
            )
    say(f"\n{'ratio of step times':35}" + "".join(f"{case:>13}" for case in results))
    for name in RATIOS:
        values = [ratios(ways).get(name) for ways in results.values()]
        texts = ["-" if v is None else f"{v:.3f}" for v in values]
        say(f"{name:35}" + "".join(f"{text:>13}" for text in texts))


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
    parser.add_argument("--budget-s", type=float, default=100, help="start none later")
    parser.options(out=Path("outputs/python_compile.json"))
    args = parser.parse_args()
    args.tiny = args.tiny or usual_device() == "cpu"
    return args


def main():
    args = parse()
    mesh = join_mesh(usual_device(), timeout=timedelta(seconds=args.budget_s))
    begin = time.perf_counter()
    results = {}
    for case in args.cases:
        results[case] = {}
        for library, kind in ways_of(args):
            way = f"{library} {kind}"
            if over_budget(begin, args):
                result = {"error": f"not started within {args.budget_s:g} s"}
            else:
                result = attempt(case, library, kind, mesh, args)
            results[case][way] = result
            say(f"{case}, {way}:", result.get("error", f"{result.get('ms')} ms"))
    say(f"\n{about(mesh)}" + (", tiny sizes" if args.tiny else ""))
    print_table(results)
    if dist.get_rank() == 0:
        options = {**vars(args), "out": str(args.out)}
        document = {"machine": about(mesh), "options": options, "results": results}
        document["ratios"] = {case: ratios(ways) for case, ways in results.items()}
        write_json(args.out, document)
    dist.destroy_process_group()
    return any("error" in r for ways in results.values() for r in ways.values())


if __name__ == "__main__":
    sys.exit(main())
