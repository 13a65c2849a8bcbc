"""transformers' Qwen3-MoE under Flatshard's and FSDP2's fully_shard, by turns.

PYTHONPATH=build/python torchrun --nproc-per-node 1 bench/python_moe.py

Shapes of Qwen3-30B-A3B with few layers, random weights and tokens, `grouped_mm` experts of
transformers 5, bf16 compute and reduction, float32 main weights, fused AdamW, blocks
compiled. Each pair runs both ways, the first one first in every other pair, each from a
model of its own. Prints the median step of each run, the ratio second / first of each
pair and the median ratio; --out has all of it as JSON. `--tiny` is for CPUs: it says that
the script works, and nothing of speed.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import flatshard
from python_steps import measure, say

DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
OURS = flatshard.fully_shard, flatshard.MixedPrecisionPolicy
THEIRS = fsdp2, Fsdp2Policy
# The function and its policy, whether blocks are compiled, more of its options.
WAYS = {
    "fsdp2 eager": (THEIRS, False, {}),
    "fsdp2 compiled": (THEIRS, True, {}),
    "flatshard eager": (OURS, False, {}),
    "flatshard compiled": (OURS, True, {}),
    "flatshard in place": (OURS, False, {"grads_in_place": True}),
}
TINY = {
    "layers": 2,
    "seq": 16,
    "dim": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "experts": 4,
    "top_k": 2,
    "ffn": 16,
    "vocab": 64,
    "warmup": 1,
    "steps": 2,
}


def build(way, args, mesh):
    (function, policy), compiled, more = WAYS[way]
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
    options = {"mesh": mesh, "mp_policy": policy(**DTYPES), **more}
    function(model.model.embed_tokens, **options)
    for layer in model.model.layers:
        function(layer, **options)
    tail = [model.model.norm, model.lm_head]
    function(tail, reshard_after_forward=False, **options)
    function(model, **options)
    if compiled:
        # Rows of an expert are counted in the block.
        torch._dynamo.config.capture_scalar_outputs = True
        for layer in model.model.layers:
            layer.compile()
    return model


def run(way, args, mesh):
    result = train(build(way, args, mesh), args, mesh)
    torch._dynamo.reset()
    gc.collect()
    if mesh.device_type == "cuda":
        torch.cuda.empty_cache()
    return result


def train(model, args, mesh):
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=mesh.device_type == "cuda"
    )
    torch.manual_seed(1 + dist.get_rank())
    shape = args.local_batch, args.seq
    ids = torch.randint(args.vocab, shape, device=mesh.device_type)

    def forward():
        with attention(mesh.device_type):
            return model(input_ids=ids, labels=ids).loss

    return measure(forward, optimizer, args)


def attention(device):
    if device != "cuda":
        return contextlib.nullcontext()
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    return sdpa_kernel(kernels, set_priority=True)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ways",
        nargs=2,
        choices=WAYS,
        default=["fsdp2 compiled", "flatshard compiled"],
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--local-batch", type=int, default=2)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="sizes for CPUs")
    parser.add_argument("--out", type=Path, default=Path("outputs/python_moe.json"))
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    if int(transformers.__version__.split(".")[0]) < 5:
        parser.error(
            f"expected transformers 5, which has grouped_mm experts, found "
            f"{transformers.__version__}"
        )
    return args


def start(args):
    """The mesh of all ranks, on GPUs unless args.tiny."""
    device = "cpu" if args.tiny else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("gloo" if args.tiny else "nccl")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    name = "CPU" if args.tiny else torch.cuda.get_device_name()
    say(
        f"{dist.get_world_size()}x {name}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    return mesh


def main():
    args = parse()
    mesh = start(args)
    runs = [[], []]
    for pair in range(args.pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            runs[which].append(run(args.ways[which], args, mesh))
    say(f"{'':20} {'ms of each run':30} {'host ms':>8} {'GiB':>6} {'loss':>8}")
    for way, results in zip(args.ways, runs):
        ms = ", ".join(f"{r['ms']:.1f}" for r in results)
        host = statistics.median(
            sum(r["host_ms_forward_backward_step"]) for r in results
        )
        last = results[-1]
        say(f"{way:20} {ms:30} {host:8.1f} {last['peak_GiB']:6.1f} {last['loss']:8.3f}")
    ratios = [b["ms"] / a["ms"] for a, b in zip(*runs)]
    median = statistics.median(ratios)
    say(f"second / first {', '.join(f'{r:.4f}' for r in ratios)}; median {median:.4f}")
    if dist.get_rank() == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        shape = {k: v for k, v in vars(args).items() if k not in ("ways", "out")}
        found = {
            "shape": shape,
            "runs": dict(zip(args.ways, runs)),
            "ratios": ratios,
            "median": median,
        }
        args.out.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
