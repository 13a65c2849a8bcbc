"""Flatshard's and FSDP2's fully_shard of one Llama-like PyTorch module, side by side.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/python_llama.py

Prints, for each way, the median step time (forward, backward, AdamW) in ms, the host's
part of it, and the peak of allocated memory; and first whether a small model has the
same losses and weights under both. One call, so that the ratios are of one machine and
hour.
"""

import argparse
import copy
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard as fsdp2

import flatshard
from python_steps import measure, say


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self, dim, hidden, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        kv = kv_heads * self.head_dim
        self.attention_norm = Norm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv, bias=False)
        self.v = nn.Linear(dim, kv, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = Norm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        batch, seq, dim = x.shape

        def split(t, heads):
            return t.view(batch, seq, heads, self.head_dim).transpose(1, 2)

        y = self.attention_norm(x)
        attention = F.scaled_dot_product_attention(
            split(self.q(y), self.heads),
            split(self.k(y), self.kv_heads),
            split(self.v(y), self.kv_heads),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.o(attention.transpose(1, 2).reshape(batch, seq, dim))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, dim, hidden, heads, kv_heads, layers, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            Block(dim, hidden, heads, kv_heads) for _ in range(layers)
        )
        self.norm = Norm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        return F.cross_entropy(logits[:-1], ids.flatten()[1:])


def wrap(model, function, mesh, policy):
    for layer in model.layers:
        function(layer, mesh=mesh, mp_policy=policy)
    return function(model, mesh=mesh, mp_policy=policy)


def parity(mesh, dtype):
    """Five steps of a small model: equal losses, and how far the weights are apart."""
    results = []
    dtypes = {"param_dtype": dtype, "reduce_dtype": torch.float32}
    torch.manual_seed(0)
    first = Llama(128, 256, 4, 2, 3, 512).cuda()
    for function, policy in (
        (flatshard.fully_shard, flatshard.MixedPrecisionPolicy(**dtypes)),
        (fsdp2, Fsdp2Policy(**dtypes)),
    ):
        model = wrap(copy.deepcopy(first), function, mesh, policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for step in range(5):
            torch.manual_seed(1000 * step + dist.get_rank())
            loss = model(torch.randint(512, (1, 64), device="cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = [t.full_tensor() for t in model.state_dict().values()]
        results.append((losses, weights))
    (a, x), (b, y) = results
    apart = max((p - q).abs().max().item() for p, q in zip(x, y))
    say(f"parity {dtype}: equal losses {a == b}, weights apart by {apart}")


def bench(name, function, policy, mesh, args, core_adamw=False, compiled=False):
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        shape = (args.dim, args.hidden, args.heads, args.kv_heads)
        model = Llama(*shape, args.layers, args.vocab)
        ids = torch.randint(args.vocab, (1, args.seq))
    wrap(model, function, mesh, policy)
    if compiled:
        for layer in model.layers:
            layer.compile()
    kind = flatshard.optim.AdamW if core_adamw else torch.optim.AdamW
    options = {} if core_adamw else {"fused": True}
    optimizer = kind(model.parameters(), lr=1e-4, **options)
    say(f"{name:32}", json.dumps(measure(lambda: model(ids), optimizer, args)))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for dtype in (torch.float32, torch.bfloat16):
        parity(mesh, dtype)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    ours = (flatshard.fully_shard, flatshard.MixedPrecisionPolicy(**dtypes))
    theirs = (fsdp2, Fsdp2Policy(**dtypes))
    bench("flatshard, torch's AdamW", *ours, mesh, args)
    bench("fsdp2, torch's AdamW", *theirs, mesh, args)
    bench("flatshard, its AdamW", *ours, mesh, args, core_adamw=True)
    bench("fsdp2 compiled", *theirs, mesh, args, compiled=True)
    bench("flatshard compiled, its AdamW", *ours, mesh, args, True, True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
