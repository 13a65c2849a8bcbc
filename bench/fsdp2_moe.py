"""Trains Qwen3-MoE shapes with PyTorch's FSDP2, torch.compile and torch._grouped_mm.

torchrun --nproc-per-node 1 bench/fsdp2_moe.py --layers 4 --seq 4096 --local-batch 2

What `flatshard train` with model.preset = "qwen3_30b_a3b" is compared with: the same
model, optimizer and precision, written plainly, every expert on every rank. bf16 compute
and reduction, float32 weights and AdamW states, no recompute, random tokens. Prints one
line of JSON on rank 0.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from fsdp2_llama import (
    adamw,
    begin,
    compile_parts,
    loss_of,
    materialize,
    rotate,
    run,
    shard,
)


class Experts(nn.Module):
    """Tokens to the experts that a softmax over all of them ranks first, and back."""

    def __init__(self, args):
        super().__init__()
        self.top_k, self.num_experts = args.top_k, args.experts
        self.router = nn.Linear(args.dim, args.experts, bias=False)
        self.gate_and_up = nn.Parameter(
            torch.empty(args.experts, args.dim, 2 * args.ffn)
        )
        self.down = nn.Parameter(torch.empty(args.experts, args.ffn, args.dim))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).float().softmax(-1)
        weights, experts = scores.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = torch.histc(
            experts.flatten().float(),
            bins=self.num_experts,
            min=0,
            max=self.num_experts - 1,
        )
        ends = counts.cumsum(0).to(torch.int32)
        source = order // self.top_k
        hidden = torch._grouped_mm(
            tokens[source], self.gate_and_up.to(x.dtype), offs=ends
        )
        gate, up = hidden.chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, self.down.to(x.dtype), offs=ends)
        rows = rows * weights.flatten()[order][:, None].to(x.dtype)
        return torch.zeros_like(tokens).index_add_(0, source, rows).view_as(x)


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads, self.kv_heads = args.heads, args.kv_heads
        wide, narrow = args.heads * args.head_dim, args.kv_heads * args.head_dim
        self.attention_norm = nn.RMSNorm(args.dim, eps=1e-6)
        self.q = nn.Linear(args.dim, wide, bias=False)
        self.k = nn.Linear(args.dim, narrow, bias=False)
        self.v = nn.Linear(args.dim, narrow, bias=False)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=1e-6)
        self.o = nn.Linear(wide, args.dim, bias=False)
        self.experts_norm = nn.RMSNorm(args.dim, eps=1e-6)
        self.experts = Experts(args)

    def forward(self, x, cos, sin):
        batch, seq, _ = x.shape
        y = self.attention_norm(x)
        q = self.q_norm(self.q(y).view(batch, seq, self.heads, -1))
        k = self.k_norm(self.k(y).view(batch, seq, self.kv_heads, -1))
        v = self.v(y).view(batch, seq, self.kv_heads, -1)
        attention = F.scaled_dot_product_attention(
            rotate(q, cos, sin).transpose(1, 2),
            rotate(k, cos, sin).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.o(attention.transpose(1, 2).reshape(batch, seq, -1))
        return x + self.experts(self.experts_norm(x))


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim, eps=1e-6)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)
        self.loss = loss_of

    def forward(self, tokens, targets, cos, sin):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.loss(self.head(self.norm(x)), targets)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "seq": 4096,
        "local-batch": 2,
        "microbatches": 1,
        "layers": 4,
        "dim": 2048,
        "heads": 32,
        "kv-heads": 4,
        "head-dim": 128,
        "experts": 128,
        "top-k": 8,
        "ffn": 768,
        "vocab": 151936,
        "warmup": 4,
        "steps": 10,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", choices=("none", "all"), default="all")
    args = parser.parse_args()
    device = begin()
    with torch.device("meta"):
        model = Model(args)
    shard(model, keep=0)
    materialize(model, device)
    if args.compile == "all":
        torch._dynamo.config.capture_scalar_outputs = True
        compile_parts(model)
    run(
        args,
        model,
        adamw(model),
        device,
        args.head_dim,
        1e6,
        args.microbatches,
    )


if __name__ == "__main__":
    main()
