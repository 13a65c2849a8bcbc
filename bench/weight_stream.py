"""Times all weights of a sharded model as full tensors, once, and their changes.

PYTHONPATH=build/python torchrun --nproc-per-node 1 bench/weight_stream.py

The peer is a loop of full_tensor() over the parameters of the same model under FSDP2, with
the same names. Both models are in memory, and the rounds alternate. "Extra memory" is the
most that is allocated during a round. The models have the shapes of Llama-3-8B, and of 12
layers of Qwen3-30B-A3B with a tensor for each expert: in bfloat16, with random values. The
rows of float32 main weights compare flatshard.weights.changed with stream, in bfloat16
after a step of the size --step. With several ranks, another peer is one all-gather of the
same bytes for each unit. On CPUs (--device cpu) the models are small.
"""

import gc
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import flatshard
from harness.command_line import Parser
from harness.peers import shard_function
from harness.programs import write_json
from harness.ranks import about, join_mesh, say, usual_device
from harness.steps import synchronize

BF16, MIB = torch.bfloat16, 1 << 20
# hidden, width, layers, query and key/value heads, head size, vocabulary, experts
CASES = {
    "Llama-3-8B": (4096, 14336, 32, 32, 8, 128, 128256, 0),
    "12 layers of Qwen3-30B-A3B": (2048, 768, 12, 32, 4, 128, 151936, 128),
}
SMALL = {
    "dense, 200 MB": (1024, 2816, 7, 16, 8, 64, 4096, 0),
    "experts": (256, 128, 4, 8, 4, 32, 4096, 16),
}


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def mlp(hidden, width):
    part = nn.Module()
    part.gate_proj, part.up_proj = linear(hidden, width), linear(hidden, width)
    part.down_proj = linear(width, hidden)
    return part


def block(hidden, width, query, key, size, experts):
    layer = nn.Module()
    layer.self_attn = attention = nn.Module()
    attention.q_proj = linear(hidden, query * size)
    attention.k_proj, attention.v_proj = (linear(hidden, key * size) for _ in range(2))
    attention.o_proj = linear(query * size, hidden)
    layer.input_layernorm, layer.post_attention_layernorm = (
        nn.RMSNorm(hidden) for _ in range(2)
    )
    if not experts:
        layer.mlp = mlp(hidden, width)
        return layer
    layer.mlp = nn.Module()
    layer.mlp.gate = linear(hidden, experts)
    layer.mlp.experts = nn.ModuleList(mlp(hidden, width) for _ in range(experts))
    return layer


class Decoder(nn.Module):
    """The parameters of a decoder, without a forward."""

    def __init__(self, case):
        super().__init__()
        hidden, width, layers, query, key, size, words, experts = case
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(words, hidden)
        self.model.layers = nn.ModuleList(
            block(hidden, width, query, key, size, experts) for _ in range(layers)
        )
        self.model.norm = nn.RMSNorm(hidden)
        self.lm_head = linear(hidden, words)


def make(case, library, mesh, dtype):
    """Returns the model, sharded; its values are random."""
    shard = shard_function(library)
    with torch.device("meta"):
        model = Decoder(case).to(dtype)
    for unit in (model.model.embed_tokens, *model.model.layers, model.lm_head, model):
        shard(unit, mesh=mesh)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            local = p.to_local()
            local.normal_(std=0.02)
    return model


def whole_tensors(model, dtype):
    for name, p in model.named_parameters():
        yield name, p.full_tensor().to(dtype)


def timed(take, prepare):
    """Returns seconds, extra bytes, and the bytes that `take` yields."""
    if prepare:
        prepare()
    gc.collect()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    dist.barrier()
    begin = time.perf_counter()
    nbytes = sum(take())
    synchronize()
    seconds = time.perf_counter() - begin
    extra = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return seconds, extra, nbytes


def rounds_of(name, ways, args, prepare=None):
    """Calls prepare[way](), if there is one, before each round of a way.

    Returns:
        a row for each way: the median of its seconds, and the most of extra memory
    """
    found = {way: [] for way in ways}
    for number in range(args.warmup + args.rounds):
        for way, take in ways.items():
            measured = timed(take, (prepare or {}).get(way))
            if number >= args.warmup:
                found[way].append(measured)
    return [
        {
            "case": name,
            "way": way,
            "s": statistics.median(seconds for seconds, _, _ in rounds),
            "extra_mib": max(extra for _, extra, _ in rounds) / MIB,
            "nbytes": rounds[-1][2],
        }
        for way, rounds in found.items()
    ]


def sizes(stream):
    return (tensor.nbytes for _, tensor in stream)


def all_gathers(model, mesh):
    """Yields the bytes of one all-gather for each unit."""
    units, device = {}, mesh.device_type
    for name, p in model.named_parameters():
        layer = name.split(".")[2] if ".layers." in name else name
        units[layer] = units.get(layer, 0) + p.numel()
    for numel in units.values():
        shard = torch.empty(-(-numel // mesh.size()), dtype=BF16, device=device)
        out = torch.empty(shard.numel() * mesh.size(), dtype=BF16, device=device)
        dist.all_gather_into_tensor(out, shard)
        yield out.nbytes


def compare(name, case, mesh, args):
    ours = make(case, "flatshard", mesh, BF16)
    theirs = make(case, "fsdp2", mesh, BF16)
    ways = {
        "flatshard": lambda: sizes(flatshard.weights.stream(ours)),
        "fsdp2": lambda: sizes(whole_tensors(theirs, BF16)),
    }
    if mesh.size() > 1:
        ways["all-gathers"] = lambda: all_gathers(ours, mesh)
    return rounds_of(name, ways, args)


def changes(name, case, mesh, args):
    model = make(case, "flatshard", mesh, torch.float32)
    changed = flatshard.weights.changed(model, dtype=BF16)

    def step():
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().add_(args.step)

    def patches():
        for patch in changed:
            yield patch.indices.nbytes + patch.values.nbytes

    ways = {
        "stream": lambda: sizes(flatshard.weights.stream(model, dtype=BF16)),
        "changed": patches,
    }
    return rounds_of(f"{name}, float32", ways, args, {"changed": step})


def main():
    parser = Parser(__doc__).options(
        "json", warmup=1, rounds=5, device=usual_device(), step=1e-6
    )
    args = parser.parse_args()
    mesh = join_mesh(args.device)
    say(about(mesh))
    cases = CASES if args.device == "cuda" else SMALL
    done = []
    say("| model | way | ms | of the first | extra MiB | MB |")
    say("|---|---|---:|---:|---:|---:|")
    for name, case in cases.items():
        for measure in (compare, changes):
            if measure is changes and case[-1]:
                continue
            found = measure(name, case, mesh, args)
            for one in found:
                say(
                    f"| {one['case']} | {one['way']} | {1e3 * one['s']:.1f} | "
                    f"{one['s'] / found[0]['s']:.2f} | {one['extra_mib']:.0f} | "
                    f"{one['nbytes'] / 1e6:.1f} |"
                )
            done += found
            gc.collect()
    if dist.get_rank() == 0:
        write_json(args.json, done)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
