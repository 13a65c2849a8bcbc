"""Hugging Face's LlamaForCausalLM under Flatshard's and FSDP2's fully_shard.

PYTHONPATH=build/python torchrun --nproc-per-node 4 bench/python_hf.py --shape 8b

Random weights and tokens, sdpa attention, local batch 1, bf16 compute and reduction,
float32 main weights. Prints for each way the median step time in ms, the host's part and
the peak of allocated memory: one call, so that the ratios are of one machine and hour.
"""

import argparse
import gc
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp import register_fsdp_forward_method as fsdp2_forward
from transformers import LlamaConfig, LlamaForCausalLM

import flatshard
from flatshard import register_fsdp_forward_method as flatshard_forward
from python_steps import measure, say

# hidden, intermediate, layers, heads, kv heads
SHAPES = {
    "8b": (4096, 14336, 32, 32, 8),
    "3b": (3072, 8192, 28, 24, 8),
    "1b": (2048, 8192, 16, 32, 8),
    "tiny": (64, 128, 2, 4, 2),
}
DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
# The function, its policy, whether blocks are compiled, more of the function's options;
# "loss": the logits are linear_cross_entropy's and the embedding is a unit of its own.
OURS, THEIRS = flatshard.fully_shard, fsdp2
POLICY = flatshard.MixedPrecisionPolicy
WAYS = {
    "fsdp2 eager": (THEIRS, Fsdp2Policy, False, {}),
    "flatshard eager": (OURS, POLICY, False, {}),
    "flatshard in place": (OURS, POLICY, False, {"grads_in_place": True}),
    "flatshard copies": (OURS, POLICY, False, {"copy_engines": "all"}),
    "flatshard copies, in place": (
        OURS,
        POLICY,
        False,
        {"copy_engines": "all", "grads_in_place": True},
    ),
    "fsdp2 compiled": (THEIRS, Fsdp2Policy, True, {}),
    "flatshard compiled": (OURS, POLICY, True, {}),
    "flatshard compiled, copies": (OURS, POLICY, True, {"copy_engines": "all"}),
    "fsdp2 eager, loss": (THEIRS, Fsdp2Policy, False, {"loss": True}),
    "flatshard eager, loss": (OURS, POLICY, False, {"loss": True}),
    "flatshard copies, in place, loss": (
        OURS,
        POLICY,
        False,
        {"copy_engines": "all", "grads_in_place": True, "loss": True},
    ),
    "fsdp2 compiled, loss": (THEIRS, Fsdp2Policy, True, {"loss": True}),
    "flatshard compiled, loss": (OURS, POLICY, True, {"loss": True}),
}


class LlamaWithLoss(LlamaForCausalLM):
    def own_loss(self, ids):
        hidden = self.model(input_ids=ids).last_hidden_state[:, :-1]
        return flatshard.linear_cross_entropy(hidden, self.lm_head.weight, ids[:, 1:])


def loss_of(way, model, ids):
    if WAYS[way][3].get("loss"):
        return model.own_loss(ids)
    return model(input_ids=ids, labels=ids).loss


def draw(module):
    with torch.no_grad():
        for p in module.parameters(recurse=False):
            p.fill_(1.0) if p.ndim == 1 else p.normal_(0, 0.02)


def build(way, args, mesh):
    function, policy, compiled, more = WAYS[way]
    more = dict(more)
    own_loss = more.pop("loss", False)
    hidden, intermediate, layers, heads, kv_heads = SHAPES[args.shape]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=args.vocab,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaWithLoss(config)
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    options = {"mesh": mesh, "mp_policy": policy(**DTYPES), **more}
    for layer in model.model.layers:
        function(layer, **options)
    if own_loss:
        function(model.model.embed_tokens, **options)
    function(model, **options)
    if own_loss:
        (fsdp2_forward if function is fsdp2 else flatshard_forward)(model, "own_loss")
    torch.manual_seed(0)
    if function is fsdp2:
        model.to_empty(device="cuda")
        for module in model.modules():
            draw(module)
    else:
        flatshard.reset_parameters(model, init_fn=draw)
    rotary = model.model.rotary_emb
    dim = hidden // heads
    exponents = torch.arange(0, dim, 2, device="cuda").float() / dim
    rotary.inv_freq = rotary.original_inv_freq = 500000.0**-exponents
    return model


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--core-adamw", action="store_true", help="for Flatshard")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    say(f"{dist.get_world_size()}x {torch.cuda.get_device_name()}", vars(args))
    for way in args.ways:
        model = build(way, args, mesh)
        if args.core_adamw and way.startswith("flatshard"):
            optimizer = flatshard.optim.AdamW(model.parameters(), lr=1e-4)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(1 + dist.get_rank())
        ids = torch.randint(args.vocab, (1, args.seq), device="cuda")
        result = measure(
            lambda w=way, m=model, x=ids: loss_of(w, m, x), optimizer, args
        )
        say(f"{way:20}", json.dumps(result))
        del model, optimizer
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
