"""Trains Llama shapes with PyTorch's FSDP2 and torch.compile, to compare Flatshard with.

torchrun --nproc-per-node 4 bench/fsdp2_llama.py --seq 8192

The same model, optimizer and precision as examples/llama3_8b.toml: bf16 compute and
reduction, float32 weights and AdamW states, no recompute, random tokens. Embedding,
blocks, and norm with head are the units. Prints one line of JSON on rank 0.

--library flatshard trains the same program with flatshard.fully_shard. On one rank,
--library unsharded trains the model without a library: weights, gradients and AdamW's
states are bfloat16. It is a lower bound of a step, and not the same training.

--trace FILE writes a trace of one more step for bench/kernel_kinds.py.

The counterpart of examples/llama3_8b_one_gpu.toml (`pip install torchao`):

torchrun --nproc-per-node 1 bench/fsdp2_llama.py --weights bfloat16 --states int8 --recompute
"""

import functools
import itertools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

from harness import hf_folder
from harness.command_line import Parser
from harness.marks import mark, parts
from harness.models import Llama, loss_of, rotary
from harness.peers import (
    MODULES,
    MuonAndAdamW,
    fully_shard_of,
    fused_attention,
    shard_decoder,
    shard_function,
)
from harness.ranks import join, say
from harness.steps import measure


def shard(model, keep=0, library="fsdp2", **options):
    tail = [model.norm, model.head]
    resharded = len(model.layers) - keep
    fully_shard = functools.partial(fully_shard_of(library), **options)
    shard_decoder(fully_shard, model, model.embed, model.layers, tail, resharded)


def use_float8(model, recipe):
    """Converts all layers except the head to torchao FP8. Call before `shard`."""
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
    """Finds the scales of all weights at once, for the FP8 all-gathers of tensorwise."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer.register_step_post_hook(
        lambda *_: precompute_float8_dynamic_scale_for_fsdp(model)
    )


def recompute_blocks(model):
    """Saves only the inputs of blocks for the backward. Call before `shard`."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer, preserve_rng_state=False)


def begin():
    """Joins the ranks, and returns this rank's GPU."""
    device = join(own_device=True)
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


def adamw(model, states="float32"):
    options = {"lr": 3e-4, "weight_decay": 0.1}
    if states == "int8":
        return adamw_8bit(model, options)
    return torch.optim.AdamW(model.parameters(), fused=True, **options)


def adamw_8bit(model, options):
    """Returns torchao's AdamW8bit over the local shards and in their memory.

    It rounds bfloat16 weights stochastically. torch 2.11 does not compile it for 8-bit
    states in DTensors.
    """
    from torchao.optim import AdamW8bit

    sharded = list(model.parameters())
    local = [nn.Parameter(p.detach().to_local()) for p in sharded]
    rounds = local[0].dtype == torch.bfloat16
    optimizer = AdamW8bit(local, bf16_stochastic_round=rounds, **options)

    def take_gradients(*_):
        for mine, p in zip(local, sharded):
            mine.grad, p.grad = p.grad.to_local(), None

    optimizer.register_step_pre_hook(take_gradients)
    return optimizer


def run(
    args, model, optimizer, device, head_dim, rope_base, microbatches=1, trace=None
):
    """Measures steps on random tokens, prints them on rank 0 and leaves the ranks.

    Gradients are reduced only with a step's last microbatch because FSDP2 is faster
    that way.
    """
    angles = rotary(args.seq, head_dim, rope_base, device)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (args.local_batch, args.seq + 1)
    calls = itertools.count(1)

    def forward():
        torch.compiler.cudagraph_mark_step_begin()  # for those that replay graphs
        if microbatches > 1:
            model.set_requires_gradient_sync(next(calls) % microbatches == 0)
        tokens = torch.randint(args.vocab, shape, device=device, generator=generator)
        with fused_attention():
            return model(tokens[:, :-1], tokens[:, 1:], *angles)

    found = measure(forward, optimizer, args, microbatches, trace=trace)
    say(json.dumps({**found, "start_s": parts()}))
    dist.destroy_process_group()


def main():
    parser = Parser(__doc__).options(
        "warmup", "steps", "trace", seq=8192, local_batch=1
    )
    parser.options(layers=32, dim=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
    compiled = ("none", "blocks", "blocks+loss")
    parser.add_argument(
        "--compile", choices=compiled, default=compiled[-1], help="what"
    )
    parser.add_argument(
        "--keep", type=int, default=0, help="blocks that stay unsharded until backward"
    )
    parser.add_argument("--gqa", action="store_true", help="heads are not repeated")
    parser.add_argument(
        "--reduce-overhead", action="store_true", help="blocks in torch's CUDA graphs"
    )
    parser.add_argument(
        "--float8", choices=("tensorwise", "rowwise"), help="by torchao, if installed"
    )
    parser.add_argument(
        "--weights", choices=("float32", "bfloat16"), default="float32", help="dtype"
    )
    parser.add_argument(
        "--states",
        choices=("float32", "int8"),
        default="float32",
        help="of AdamW; int8 by torchao, which rounds bfloat16 weights stochastically",
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: of the blocks' matrices, each all-gathered on every rank",
    )
    parser.add_argument(
        "--init-from", type=Path, help="a folder of harness.hf_folder to read [random]"
    )
    parser.add_argument("--recompute", action="store_true", help="all of the blocks")
    parser.add_argument(
        "--library",
        choices=(*MODULES, "unsharded"),
        default="fsdp2",
        help="whose fully_shard is called",
    )
    args = parser.parse_args()
    sharded = args.library != "unsharded"
    mark("imports")
    device = begin()
    mark("ranks")
    if sharded:
        shard_function(args.library)
    elif dist.get_world_size() > 1:
        raise SystemExit(f"unsharded: expected one rank, got {dist.get_world_size()}")
    mark("library")
    with torch.device("meta"):
        weights = getattr(torch, args.weights) if sharded else torch.bfloat16
        model = Llama(args).to(weights)
    if args.recompute:
        recompute_blocks(model)
    if args.float8:
        use_float8(model, args.float8)
    # hf_folder.load reads rows as torch.chunk splits them.
    chunks = args.init_from and args.library == "flatshard"
    options = {"granularity": "chunk"} if chunks else {}
    if sharded:
        shard(model, args.keep, args.library, **options)
    mark("model")
    if args.init_from:
        model.to_empty(device=device)
        hf_folder.load(args.init_from, model, dist.get_rank(), dist.get_world_size())
    else:
        materialize(model, device)
    if args.compile != "none":
        mode = "reduce-overhead" if args.reduce_overhead else None
        compile_parts(model, args.compile == "blocks+loss", mode)
    if args.optimizer == "muon":
        optimizer = MuonAndAdamW(model, model.layers)
    else:
        optimizer = adamw(model, args.states)
    if args.float8 == "tensorwise":
        find_scales_after_steps(model, optimizer)
    torch.cuda.synchronize()
    mark("weights")
    head_dim = args.dim // args.heads
    run(args, model, optimizer, device, head_dim, 500000.0, trace=args.trace)


if __name__ == "__main__":
    main()
