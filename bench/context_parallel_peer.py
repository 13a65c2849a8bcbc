"""Trains Llama shapes with sequences split over all ranks, in PyTorch, to compare Flatshard.

torchrun --nproc-per-node 2 bench/context_parallel_peer.py --way heads --seq 131072

--way heads: an all-to-all gives each rank all tokens of some heads, and another one gives
them back (Ulysses). --way keys: torch's context_parallel all-gathers keys and values and
balances the load. FSDP2 shards over the same ranks. Blocks and loss are
compiled and blocks recomputed, except attention (--recompute-attention: it too). The loss
is computed in chunks. Settings that fail are followed by the next of SETTINGS. Rank 0
prints one line of JSON for each --seq, with the mean loss of all ranks. --trace FILE writes a
trace of one more step of the last --seq for bench/kernel_kinds.py.
"""

import contextlib
import functools
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from harness.command_line import Parser
from harness.long_context import chunked_loss, loss_of_chunk
from harness.models import LlamaBlock, rotary
from harness.peers import adamw, fully_shard_of, fused_attention, release, shard_decoder
from harness.ranks import join_mesh, say, usual_device
from harness.steps import measure

ATTENTION = [
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
# Tried one after the other until one runs.
SETTINGS = [
    {"gqa": True, "eager": False},
    {"gqa": False, "eager": False},
    {"gqa": True, "eager": True},
    {"gqa": False, "eager": True},
]


def exchange(x):
    """Sends part i of the first dimension to rank i."""
    return all_to_all_single_autograd(x.contiguous(), None, None, dist.group.WORLD)


def to_heads(x, ranks):
    """[1, own tokens, all heads, size] -> [1, all tokens, own heads, size]"""
    parts = x.squeeze(0).unflatten(1, (ranks, -1)).transpose(0, 1)
    return exchange(parts).flatten(0, 1).unsqueeze(0)


def to_tokens(x, ranks):
    """[1, all tokens, own heads, size] -> [1, own tokens, all heads, size]"""
    parts = exchange(x.squeeze(0).unflatten(0, (ranks, -1)))
    return parts.transpose(0, 1).flatten(1, 2).unsqueeze(0)


class HeadsBlock(LlamaBlock):
    def attention(self, q, k, v):
        ranks = dist.get_world_size()
        if ranks == 1:
            return super().attention(q, k, v)
        # One exchange for all three: a rank receives its heads of each.
        shares = [x.unflatten(2, (ranks, -1)) for x in (q, k, v)]
        sizes = [share.shape[3] for share in shares]
        joined = to_heads(torch.cat(shares, 3).flatten(2, 3), ranks)
        return to_tokens(super().attention(*joined.split(sizes, 2)), ranks)


class Tail(nn.Module):
    """The last norm, the head and the loss."""

    def __init__(self, args):
        super().__init__()
        self.norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)
        self.chunk, self.loss = args.loss_chunk, loss_of_chunk

    def forward(self, x, targets):
        hidden, targets = self.norm(x).flatten(0, 1), targets.flatten()
        total = chunked_loss(hidden, self.head.weight, targets, self.chunk, self.loss)
        return total / targets.numel()


class Llama(nn.Module):
    def __init__(self, args):
        super().__init__()
        block = HeadsBlock if args.way == "heads" else LlamaBlock
        self.embed = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(block(args) for _ in range(args.layers))
        self.tail = Tail(args)

    def forward(self, tokens, targets, *angles):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, *angles)
        return self.tail(x, targets)


def keep_attention(ctx, op, *args, **kwargs):
    if op in ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def build(args, mesh, device):
    """Returns the sharded model; its weights do not depend on the number of ranks."""
    with torch.device("cpu" if args.tiny else "meta"):
        torch.manual_seed(0)
        model = Llama(args)
    options = {"preserve_rng_state": False}
    if not args.recompute_attention:
        contexts = functools.partial(
            create_selective_checkpoint_contexts, keep_attention
        )
        options["context_fn"] = contexts
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer, **options)
        if not args.eager:
            model.layers[i].compile(dynamic=False)
    if not args.eager:
        model.tail.loss = torch.compile(loss_of_chunk, dynamic=False)
    exact = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    shard = fully_shard_of("fsdp2", **(exact if args.tiny else {}))
    fully_shard = functools.partial(shard, mesh=mesh)
    shard_decoder(fully_shard, model, model.embed, model.layers, model.tail)
    if not args.tiny:
        model.to_empty(device=device)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.fill_(1) if name.endswith("norm.weight") else p.normal_(std=0.02)
    return model


def run(args, seq, mesh, device):
    """Measures steps of one length, and returns them with the last loss."""
    angles = rotary(seq, args.dim // args.heads, 500000.0, device)
    places = torch.arange(seq, device=device)
    split = contextlib.nullcontext()
    if args.way == "keys" and mesh.size() > 1:
        buffers = [places, *angles]
        split = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0, 0, 0])
    else:
        own = slice(mesh.get_local_rank() * seq // mesh.size(), None)
        own = slice(own.start, own.start + seq // mesh.size())
        places, *angles = (x[own] for x in (places, *angles))
    model = build(args, mesh, device)
    optimizer = adamw(model)
    generator = torch.Generator(device).manual_seed(1)
    last = torch.zeros((), device=device)

    def forward():
        shape = (1, seq + 1)
        tokens = torch.randint(args.vocab, shape, device=device, generator=generator)
        loss = model(tokens[:, places], tokens[:, places + 1], *angles)
        last.copy_(loss.detach())
        return loss

    with split, fused_attention(mesh.device_type):
        found = measure(forward, optimizer, args, trace=args.trace)
    dist.all_reduce(last)
    return {**found, "loss": round(last.item() / mesh.size(), 5)}


def run_first(args, seq, mesh, device):
    """Runs with the first of SETTINGS that does not fail, and prints what it measured."""
    for settings in SETTINGS[2 * args.eager :]:
        vars(args).update(settings)
        try:
            say(json.dumps({"seq": seq, **settings, **run(args, seq, mesh, device)}))
            return
        except Exception as error:  # torch.compile and cuDNN raise many kinds
            say(f"{settings}: {type(error).__name__}: {str(error)[:400]}")
        finally:
            torch._dynamo.reset()
            release()
    raise SystemExit("none of SETTINGS runs")


def main():
    parser = Parser(__doc__).options("tiny", "trace", warmup=2, steps=3, seq=[32768])
    parser.options(layers=12, dim=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
    parser.options(loss_chunk=8192, recompute_attention=False, eager=False)
    parser.add_argument("--way", choices=("heads", "keys"), required=True)
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.dim, args.ffn, args.heads, args.kv_heads = 2, 64, 128, 8, 4
        args.vocab, args.seq, args.loss_chunk = 256, [64], 16
    kind = "cpu" if args.tiny else usual_device()
    mesh = join_mesh(kind)
    for seq in args.seq:
        run_first(args, seq, mesh, torch.device(kind))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
