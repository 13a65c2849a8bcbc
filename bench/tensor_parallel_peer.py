"""Trains Llama shapes with PyTorch's tensor parallelism, to compare Flatshard with.

torchrun --nproc-per-node 2 bench/tensor_parallel_peer.py --seq 8192 --tp 2

`parallelize_module` with SequenceParallel splits embedding, blocks, norms, head and
loss as torchtitan does, and FSDP2 shards them over the other ranks. The model,
optimizer and precision are the same as in bench/fsdp2_llama.py. `--library flatshard`
shards the same module with Flatshard's `fully_shard`. Rank 0 prints one line of JSON.
"""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from harness.command_line import Parser
from harness.models import loss_of, rotary, rotate
from harness.peers import adamw, fully_shard_of, fused_attention, shard_decoder
from harness.ranks import join, say
from harness.steps import measure


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.head_dim = args.dim // args.heads
        kv = args.kv_heads * self.head_dim
        self.q = nn.Linear(args.dim, args.dim, bias=False)
        self.k = nn.Linear(args.dim, kv, bias=False)
        self.v = nn.Linear(args.dim, kv, bias=False)
        self.o = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim))
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin).transpose(1, 2),
            rotate(k, cos, sin).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.gate = nn.Linear(args.dim, args.ffn, bias=False)
        self.up = nn.Linear(args.dim, args.ffn, bias=False)
        self.down = nn.Linear(args.ffn, args.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.attention = Attention(args)
        self.mlp_norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.mlp = FeedForward(args)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)
        self.loss = loss_of

    def forward(self, tokens, targets, cos, sin):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.loss(self.head(self.norm(x)), targets)


def cut(model, mesh):
    """Splits the model over `mesh`, and activations between layers by tokens."""
    tokens = Shard(1)
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, outer)
    inner = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(tokens, None, None),
            desired_input_layouts=(Replicate(), None, None),
        ),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(
            input_layouts=(tokens,), desired_input_layouts=(Replicate(),)
        ),
    }
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        inner[name] = ColwiseParallel()
    for name in ("attention.o", "mlp.down"):
        inner[name] = RowwiseParallel(output_layouts=tokens)
    for layer in model.layers:
        parallelize_module(layer, mesh, inner)


def initialize(model, device):
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02)


def main():
    parser = Parser(__doc__).options("warmup", "steps", "tiny", seq=8192, local_batch=1)
    parser.options(layers=12, dim=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
    parser.options(tp=2)
    parser.add_argument(
        "--micro-pipeline",
        action="store_true",
        help="torch.compile overlaps products with collectives (async tensor parallelism)",
    )
    parser.add_argument("--eager", action="store_true", help="nothing is compiled")
    parser.add_argument(
        "--library",
        choices=("fsdp2", "flatshard"),
        default="fsdp2",
        help="whose fully_shard shards the modules over the other ranks",
    )
    parser.add_argument(
        "--own-adamw", action="store_true", help="flatshard.optim.AdamW, not torch's"
    )
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.dim, args.ffn, args.heads, args.kv_heads = 2, 64, 128, 4, 2
        args.vocab, args.seq, args.eager = 256, 32, True
    kind = "cpu" if args.tiny else "cuda"
    device = join(kind, own_device=kind == "cuda")
    torch.manual_seed(0)
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))
    if args.micro_pipeline:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
    with torch.device("meta"):
        model = Llama(args)
    cut(model, mesh["tp"])
    fully_shard = fully_shard_of(args.library)
    shard_decoder(
        lambda *modules, **options: fully_shard(*modules, mesh=mesh["dp"], **options),
        model,
        model.embed,
        model.layers,
        [model.norm, model.head],
    )
    initialize(model, device)
    if not args.eager:
        for layer in model.layers:
            layer.compile()
        model.loss = torch.compile(loss_of)
    optimizer = adamw(model, core=args.own_adamw)
    angles = rotary(args.seq, args.dim // args.heads, 500000.0, device)
    generator = torch.Generator(device).manual_seed(mesh["dp"].get_local_rank())
    samples = (args.local_batch, args.seq + 1)

    def forward():
        tokens = torch.randint(args.vocab, samples, device=device, generator=generator)
        with fused_attention(kind):
            return model(tokens[:, :-1], tokens[:, 1:], *angles)

    with loss_parallel():
        found = measure(forward, optimizer, args)
    say(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
