"""transformers' Qwen3-MoE under Flatshard's and FSDP2's fully_shard, alternating.

PYTHONPATH=build/python torchrun --nproc-per-node 1 bench/python_moe.py

Shapes of Qwen3-30B-A3B with few layers, random weights and tokens, `grouped_mm` experts
of transformers 5, bf16 compute and reduction, float32 main weights, fused AdamW.
"compiled": blocks are compiled. "experts": flatshard.expert_parallel over --ep ranks.
With --microbatches, --no-sync reduces gradients only with the last one of a step.
"overlap": overlap_microbatches also runs the microbatches of a step. "own AdamW": AdamW
of flatshard.optim. "unsharded" is the model on one GPU without a library, with bfloat16
weights, gradients and AdamW states: a bound for each library. Each pair runs both ways,
the first one first in every other pair, each with a new model. Prints the median step of
each run, the ratio second / first of each pair and the median ratio; --out has all of it
as JSON. `--tiny` is for CPUs: it shows that the script works, and nothing about speed.
"""

import functools
import itertools
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import flatshard
from harness.command_line import Parser
from harness.peers import adamw, fully_shard_of, fused_attention, release, shard_decoder
from harness.programs import write_json
from harness.ranks import about, join_mesh, say
from harness.steps import measure
from harness.tables import by_turns, ratios

# Options of fully_shard. The library is the first word.
WAYS = {
    "unsharded eager": {},
    "unsharded compiled": {},
    "fsdp2 eager": {},
    "fsdp2 compiled": {},
    "flatshard eager": {},
    "flatshard compiled": {},
    "flatshard as tensors": {"grads_in_place": False},
    "flatshard experts eager": {},
    "flatshard experts compiled": {},
    "flatshard experts compiled, own AdamW": {},
    "flatshard overlap eager": {},
    "flatshard overlap compiled": {},
    "flatshard overlap compiled, own AdamW": {},
}
SIZES = {"layers": 4, "seq": 4096, "dim": 2048, "heads": 32, "kv_heads": 4}
SIZES |= {"head_dim": 128, "experts": 128, "top_k": 8, "ffn": 768, "vocab": 151936}
TINY = {"layers": 2, "seq": 16, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8}
TINY |= {"experts": 4, "top_k": 2, "ffn": 16, "vocab": 64, "warmup": 1, "steps": 2}


def spreads(way):
    return "experts" in way or "overlap" in way


def is_sharded(way):
    return not way.startswith("unsharded")


def build(way, args, mesh):
    config = Qwen3MoeConfig(
        hidden_size=args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        moe_intermediate_size=args.ffn,
        vocab_size=args.vocab,
        norm_topk_prob=True,
        use_cache=False,
        output_router_logits=False,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02) if p.ndim > 1 else p.fill_(1)
    if is_sharded(way):
        shard(model, way, args, mesh)
    else:
        model.bfloat16()
    if "compiled" in way:
        # Rows of an expert are counted in the block.
        torch._dynamo.config.capture_scalar_outputs = True
        for layer in model.model.layers:
            layer.compile()
    return model


def shard(model, way, args, mesh):
    fully_shard = fully_shard_of(way.split()[0])
    if spreads(way):
        meshes = flatshard.moe_meshes(mesh, ep=args.ep)
        flatshard.expert_parallel(model, meshes.ep, overlap="overlap" in way)
        mesh = meshes.dp
        for layer in model.model.layers if args.ep > 1 else ():
            fully_shard(layer.mlp.experts, mesh=meshes.experts)
    fully_shard = functools.partial(fully_shard, mesh=mesh, **WAYS[way])
    inner, tail = model.model, [model.model.norm, model.lm_head]
    if "overlap" in way:  # a unit of several modules cannot run in a schedule
        tail = model.lm_head
    shard_decoder(fully_shard, model, inner.embed_tokens, inner.layers, tail)


def train(way, args, mesh):
    model, device = build(way, args, mesh), mesh.device_type
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randint(args.vocab, (args.local_batch, args.seq), device=device)
    batch, n = {"input_ids": ids, "labels": ids}, args.microbatches
    optimizer = adamw(model, core="own AdamW" in way)
    if "overlap" not in way:
        calls = itertools.count(1)

        def forward():
            if args.no_sync and is_sharded(way):
                model.set_requires_gradient_sync(next(calls) % n == 0)
            with fused_attention(device):
                return model(**batch).loss / n

        return measure(forward, optimizer, args, n)

    def step():
        with fused_attention(device):
            return flatshard.overlap_microbatches(model, [batch] * n)[-1]

    return measure(step, optimizer, args, backward=lambda loss: None)


def parse():
    parser = Parser(__doc__).options("tiny", "warmup", **SIZES, local_batch=2, steps=10)
    parser.options(ep=1, microbatches=1, no_sync=False)
    parser.options(pairs=3, out=Path("outputs/python_moe.json"))
    usual = ["fsdp2 compiled", "flatshard compiled"]
    parser.add_argument(
        "--ways", nargs=2, choices=WAYS, default=usual, help="of running"
    )
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not all(map(is_sharded, args.ways)):
        parser.error(f"unsharded: expected one rank, got {world}")
    if int(transformers.__version__.split(".")[0]) < 5:
        parser.error(
            f"expected transformers 5, which has grouped_mm experts, found "
            f"{transformers.__version__}"
        )
    return args


def main():
    args = parse()
    mesh = join_mesh("cpu" if args.tiny else "cuda")
    say(f"{about(mesh)}, transformers {transformers.__version__}")

    def run(which, pair):
        result = train(args.ways[which], args, mesh)
        torch._dynamo.reset()
        release()
        return result

    runs = list(by_turns((0, 1), args.pairs, run).values())
    say(f"{'':20} {'ms of each run':30} {'host ms':>8} {'GiB':>6} {'loss':>8}")
    for way, results in zip(args.ways, runs):
        ms = ", ".join(f"{r['ms']:.1f}" for r in results)
        hosts = (sum(r["host_ms_forward_backward_step"]) for r in results)
        host, last = statistics.median(hosts), results[-1]
        say(f"{way:20} {ms:30} {host:8.1f} {last['peak_GiB']:6.1f} {last['loss']:8.3f}")
    each, median = ratios(*runs)
    say(f"second / first {', '.join(f'{r:.4f}' for r in each)}; median {median:.4f}")
    if dist.get_rank() == 0:
        shape = {k: v for k, v in vars(args).items() if k not in ("ways", "out")}
        found = {"shape": shape, "runs": dict(zip(args.ways, runs)), "ratios": each}
        write_json(args.out, {**found, "median": median})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
