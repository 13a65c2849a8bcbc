"""Trains Qwen3-MoE shapes with PyTorch's FSDP2, torch.compile and torch._grouped_mm.

torchrun --nproc-per-node 1 bench/fsdp2_moe.py --layers 4 --seq 4096 --local-batch 2

Its counterpart is `flatshard train` with model.preset = "qwen3_30b_a3b": the same model,
optimizer and precision, written plainly, every expert on every rank. bf16 compute and
reduction, float32 weights and AdamW states, no recompute, random tokens. Prints one line
of JSON on rank 0.
"""

import torch
import torch.nn.functional as F
from torch import nn

from fsdp2_llama import adamw, begin, compile_parts, materialize, run, shard
from harness.command_line import Parser
from harness.models import Attention, Decoder


class Experts(nn.Module):
    """Brings tokens to the experts that a softmax over all of them ranks first, and back."""

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


class Block(Attention):
    def __init__(self, args):
        super().__init__(args, args.head_dim, 1e-6, norm_heads=True)
        self.experts_norm = nn.RMSNorm(args.dim, eps=1e-6)
        self.experts = Experts(args)

    def forward(self, x, *angles):
        x = self.attend(x, *angles)
        return x + self.experts(self.experts_norm(x))


def main():
    parser = Parser(__doc__).options("warmup", seq=4096, local_batch=2, microbatches=1)
    parser.options(layers=4, dim=2048, heads=32, kv_heads=4, head_dim=128, experts=128)
    parser.options(top_k=8, ffn=768, vocab=151936, steps=10)
    parser.add_argument(
        "--compile", choices=("none", "all"), default="all", help="what"
    )
    args = parser.parse_args()
    args.gqa = True
    device = begin()
    with torch.device("meta"):
        model = Decoder(args, Block, 1e-6)
    shard(model)
    materialize(model, device)
    if args.compile == "all":
        torch._dynamo.config.capture_scalar_outputs = True
        compile_parts(model)
    run(args, model, adamw(model), device, args.head_dim, 1e6, args.microbatches)


if __name__ == "__main__":
    main()
