"""torch.compile under Flatshard's and FSDP2's fully_shard: Linear, CNN, Transformer.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/python_compile.py

Each case is a stack of equal blocks, a unit each, and runs four ways: Flatshard and
FSDP2, eager and with `block.compile()`; with --graphs also Flatshard with
`cuda_graph=True`, eager and with what its forward calls compiled; with
--reduce-overhead both with `block.compile(mode="reduce-overhead")`, Flatshard in its
arena, and how many CUDA graphs torch recorded in the warm-up and again behind it.
Prints one table: the median step (forward, backward, AdamW) in ms, its range, the
host's part, what one more step's kernels took the GPU (profiled), the peak of allocated
memory and the last loss, then the ratios; writes all of it as JSON. A way that fails is
a row that says so, and the exit status is 1. Without a GPU the sizes are tiny: that
tries the script and measures nothing.
"""

import argparse
import functools
import gc
import json
import os
import statistics
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard as fsdp2

import flatshard
from python_steps import counted_recordings


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
    """Blocks, and a head that makes the root a unit with parameters of its own."""

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


# Case: (model, input shape), for a GPU and to try the script.
CASES = {
    "linear": lambda tiny: (
        (lambda: Stack(lambda: LinearBlock(32), 3, 32), (8, 32))
        if tiny
        else (lambda: Stack(lambda: LinearBlock(4096), 16, 4096), (16384, 4096))
    ),
    "cnn": lambda tiny: (
        (lambda: Stack(lambda: ConvBlock(8, 2), 3, 8), (2, 8, 6, 6))
        if tiny
        else (lambda: Stack(lambda: ConvBlock(256, 32), 8, 256), (256, 256, 32, 32))
    ),
    "transformer": lambda tiny: (
        (lambda: Stack(lambda: TransformerBlock(32, 2), 3, 32), (2, 16, 32))
        if tiny
        else (
            lambda: Stack(lambda: TransformerBlock(2048, 16), 8, 2048),
            (4, 4096, 2048),
        )
    ),
}
DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
LIBRARIES = {
    "flatshard": (flatshard.fully_shard, flatshard.MixedPrecisionPolicy(**DTYPES)),
    "fsdp2": (fsdp2, Fsdp2Policy(**DTYPES)),
}
GRAPHS = "flatshard graphs"  # a library of the ways, as those of LIBRARIES
# (name, numerator, denominator) of step times.
RATIOS = (
    ("flatshard compiled / eager", "flatshard compiled", "flatshard eager"),
    ("fsdp2 compiled / eager", "fsdp2 compiled", "fsdp2 eager"),
    ("eager: flatshard / fsdp2", "flatshard eager", "fsdp2 eager"),
    ("compiled: flatshard / fsdp2", "flatshard compiled", "fsdp2 compiled"),
    ("flatshard graphs / eager", f"{GRAPHS} eager", "flatshard eager"),
    ("flatshard graphs / compiled", f"{GRAPHS} eager", "flatshard compiled"),
    ("compiled: graphs / none", f"{GRAPHS} compiled", "flatshard compiled"),
    ("reduce-overhead / compiled", "flatshard reduce-overhead", "flatshard compiled"),
    (
        "reduce-overhead: flatshard / fsdp2",
        "flatshard reduce-overhead",
        "fsdp2 reduce-overhead",
    ),
)


def say(*values):
    if dist.get_rank() == 0:
        print(*values, flush=True)


def synchronize(mesh):
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()


def gpu_ms(step):
    """What the kernels and copies of step() take on this GPU; beside each other, once."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    busy, end = 0.0, 0.0
    spans = [
        (e.time_range.start, e.time_range.end)
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    for first, last in sorted(spans):
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / 1e3


@functools.cache
def compiled_inside(kind, backend):
    """The same block, whose forward calls compiled code; one class for all of them."""
    compiled = torch.compile(kind.forward, backend=backend)
    inside = {"forward": lambda self, x: compiled(self, x)}
    return type(f"Compiled{kind.__name__}", (kind,), inside)


def measure(case, library, kind, mesh, args):
    with counted_recordings() as recordings:
        return measure_counted(case, library, kind, mesh, args, recordings)


def measure_counted(case, library, kind, mesh, args, recordings):
    make, shape = CASES[case](args.tiny)
    shape = (max(1, shape[0] // args.rows_divisor), *shape[1:])
    graphs = library == GRAPHS
    function, policy = LIBRARIES["flatshard" if graphs else library]
    options = {"cuda_graph": True} if graphs else {}
    overhead = kind == "reduce-overhead"
    arena = {"slots_on_demand": False} if overhead and library == "flatshard" else {}
    # Saved tensors keep their places in a graph, so compiled code gives none away.
    torch._functorch.config.donated_buffer = not graphs
    cuda = mesh.device_type == "cuda"
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = make()
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(shape).bfloat16()
    if x.dim() == 4 and cuda:  # on CPUs GroupNorm's backward crashes (torch 2.11)
        x = x.to(memory_format=torch.channels_last)
    for block in model.blocks:
        if overhead:
            block.compile(mode="reduce-overhead")
        elif kind == "compiled" and graphs:
            # What is captured is the block.
            block.__class__ = compiled_inside(type(block), args.backend)
        elif kind == "compiled":
            block.compile(backend=args.backend)
        function(block, mesh=mesh, mp_policy=policy, **options)
    function(model, mesh=mesh, mp_policy=policy, **arena)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train_step():
        if overhead:
            torch.compiler.cudagraph_mark_step_begin()
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    steps, host = [], []
    begin = time.perf_counter()
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            synchronize(mesh)
            warmup_s = time.perf_counter() - begin
            recorded = len(recordings)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
        synchronize(mesh)
        start = time.perf_counter()
        loss = train_step()
        queued = time.perf_counter()
        synchronize(mesh)
        end = time.perf_counter()
        if step >= args.warmup:
            steps.append(1e3 * (end - start))
            host.append(1e3 * (queued - start))
    result = {
        "ms": statistics.median(steps),
        "ms_range": [min(steps), max(steps)],
        "host_ms": statistics.median(host),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "loss": loss.item(),
        "warmup_s": warmup_s,
    }
    result["gpu_ms"] = gpu_ms(train_step) if cuda else None
    if overhead:
        result["recorded"] = recorded
        result["recorded_again"] = len(recordings) - recorded
    if graphs:
        result["cuda_graph"] = flatshard.cuda_graph_stats(model)
    return result


def attempt(*what):
    """measure(*what), or why it failed: on any rank, so that all go on alike."""
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
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    torch._dynamo.reset()
    return result


def ways_of(args):
    """Pairs of a library and a kind."""
    libraries = [*LIBRARIES, *([GRAPHS] if args.graphs else [])]
    pairs = [(library, kind) for kind in ("eager", "compiled") for library in libraries]
    if args.reduce_overhead:
        pairs += [(library, "reduce-overhead") for library in LIBRARIES]
    return pairs


def over_budget(begin, args):
    """Rank 0's clock decides for all."""
    late = [time.perf_counter() - begin > args.budget_s]
    dist.broadcast_object_list(late)
    return late[0]


def ratios(ways):
    return {
        name: ways[a]["ms"] / ways[b]["ms"]
        for name, a, b in RATIOS
        if "ms" in ways.get(a, {}) and "ms" in ways.get(b, {})
    }


def print_table(results):
    say(
        f"\n{'case':12} {'way':25} {'ms':>8} {'range':>17} {'host ms':>8} "
        f"{'GPU ms':>8} {'peak GiB':>9} {'loss':>9} {'warm-up s':>9}"
    )
    for case, ways in results.items():
        for way, r in ways.items():
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
    for case, ways in results.items():
        for way, r in ways.items():
            if "recorded" in r:
                say(
                    f"{case}, {way}: torch recorded {r['recorded']} CUDA graphs in the "
                    f"warm-up, {r['recorded_again']} behind it"
                )
    say(f"\n{'ratio of step times':35}" + "".join(f"{case:>13}" for case in results))
    for name, _, _ in RATIOS:
        values = [ratios(ways).get(name) for ways in results.values()]
        texts = ["-" if v is None else f"{v:.3f}" for v in values]
        say(f"{name:35}" + "".join(f"{text:>13}" for text in texts))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
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
    parser.add_argument("--tiny", action="store_true", help="sizes to try the script")
    parser.add_argument("--budget-s", type=float, default=100, help="start none later")
    parser.add_argument("--out", default="outputs/python_compile.json")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    args.tiny = args.tiny or not cuda
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(seconds=args.budget_s)
    )
    mesh = init_device_mesh("cuda" if cuda else "cpu", (dist.get_world_size(),))
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
    device = torch.cuda.get_device_name() if cuda else "CPU"
    about = f"{dist.get_world_size()}x {device}, torch {torch.__version__}"
    say(f"\n{about}" + (", tiny sizes" if args.tiny else ""))
    print_table(results)
    if dist.get_rank() == 0:
        out = Path(args.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        summary = {case: ratios(ways) for case, ways in results.items()}
        document = {"machine": about, "options": vars(args)}
        document |= {"results": results, "ratios": summary}
        out.write_text(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()
    return any("error" in r for ways in results.values() for r in ways.values())


if __name__ == "__main__":
    sys.exit(main())
