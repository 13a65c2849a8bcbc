"""Trains Llama shapes with PyTorch's FSDP2 and torch.compile: what Flatshard is compared with.

torchrun --nproc-per-node 4 bench/fsdp2_llama.py --seq 8192

The same model, optimizer and precision as examples/llama3_8b.toml: bf16 compute and
reduction, float32 weights and AdamW states, no recompute, random tokens. Embedding,
blocks, and norm with head are the units. Prints one line of JSON on rank 0.
"""

import argparse
import itertools
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from python_steps import measure, say


def rotate(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        dim, self.head_dim = args.dim, args.dim // args.heads
        self.heads, self.kv_heads, self.native_gqa = args.heads, args.kv_heads, args.gqa
        kv = args.kv_heads * self.head_dim
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv, bias=False)
        self.v = nn.Linear(dim, kv, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-5)
        self.gate = nn.Linear(dim, args.ffn, bias=False)
        self.up = nn.Linear(dim, args.ffn, bias=False)
        self.down = nn.Linear(args.ffn, dim, bias=False)

    def forward(self, x, cos, sin):
        batch, seq, dim = x.shape
        y = self.attention_norm(x)
        q = rotate(self.q(y).view(batch, seq, self.heads, -1), cos, sin)
        k = rotate(self.k(y).view(batch, seq, self.kv_heads, -1), cos, sin)
        v = self.v(y).view(batch, seq, self.kv_heads, -1)
        if not self.native_gqa:
            times = self.heads // self.kv_heads
            k, v = k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)
        attention = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.native_gqa,
        )
        x = x + self.o(attention.transpose(1, 2).reshape(batch, seq, dim))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def loss_of(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


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


def shard(model, keep):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )
    fully_shard(model.embed, mp_policy=policy)
    resharded = len(model.layers) - keep
    for i, layer in enumerate(model.layers):
        fully_shard(layer, mp_policy=policy, reshard_after_forward=i < resharded)
    # Used again at once, by the backward.
    last = [model.norm, model.head]
    fully_shard(last, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)


def use_float8(model, recipe):
    """torchao's layers everywhere but in the head. Before `shard`."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = (
        Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        if recipe == "tensorwise"
        else Float8LinearConfig.from_recipe_name(recipe)
    )
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "head"
    )


def find_scales_after_steps(model, optimizer):
    """Of all weights at once, for the FP8 gathers of tensorwise."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer.register_step_post_hook(
        lambda *_: precompute_float8_dynamic_scale_for_fsdp(model)
    )


def begin():
    """Returns this rank's GPU."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    return device


def materialize(model, device):
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)


def compile_parts(model, loss=True, mode=None):
    for layer in model.layers:
        layer.compile(mode=mode)
    if loss:
        model.loss = torch.compile(loss_of)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)


def run(args, model, optimizer, device, head_dim, rope_base, microbatches=1):
    """Measures steps on random tokens, prints them on rank 0 and ends.

    Gradients are reduced with a step's last microbatch, which is FSDP2's faster way.
    """
    half = head_dim // 2
    turns = rope_base ** -(torch.arange(half, device=device) / half)
    angles = torch.outer(torch.arange(args.seq, device=device), turns)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    calls = itertools.count(1)

    def forward():
        torch.compiler.cudagraph_mark_step_begin()  # for those that replay graphs
        if microbatches > 1:
            model.set_requires_gradient_sync(next(calls) % microbatches == 0)
        tokens = torch.randint(
            args.vocab,
            (args.local_batch, args.seq + 1),
            device=device,
            generator=generator,
        )
        with sdpa_kernel(
            [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True
        ):
            return model(tokens[:, :-1], tokens[:, 1:], cos, sin)

    say(json.dumps(measure(forward, optimizer, args, microbatches)))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--local-batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--compile", choices=("none", "blocks", "blocks+loss"), default="blocks+loss"
    )
    parser.add_argument(
        "--keep", type=int, default=0, help="blocks that stay gathered for backward"
    )
    parser.add_argument("--gqa", action="store_true", help="heads are not repeated")
    parser.add_argument(
        "--reduce-overhead", action="store_true", help="blocks in torch's CUDA graphs"
    )
    parser.add_argument(
        "--float8", choices=("tensorwise", "rowwise"), help="by torchao, if installed"
    )
    args = parser.parse_args()
    device = begin()
    with torch.device("meta"):
        model = Llama(args)
    if args.float8:
        use_float8(model, args.float8)
    shard(model, args.keep)
    materialize(model, device)
    if args.compile != "none":
        compile_parts(
            model,
            loss=args.compile == "blocks+loss",
            mode="reduce-overhead" if args.reduce_overhead else None,
        )
    optimizer = adamw(model)
    if args.float8 == "tensorwise":
        find_scales_after_steps(model, optimizer)
    run(args, model, optimizer, device, args.dim // args.heads, 500000.0)


if __name__ == "__main__":
    main()
