"""Hugging Face's LlamaForCausalLM under Flatshard's and FSDP2's fully_shard.

PYTHONPATH=build/python torchrun --nproc-per-node 4 bench/python_hf.py --shape 8b

Random weights and tokens, sdpa attention, local batch 1, bf16 compute and reduction,
float32 main weights. Prints for each way the median step time in ms, the host's part and
the peak of allocated memory: one call, so that the ratios are of one machine and hour.
"""

import json

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import flatshard
from harness.command_line import Parser
from harness.peers import (
    LLAMA_SIZES,
    adamw,
    fully_shard_of,
    library,
    llama_config,
    release,
    restore_rotary,
)
from harness.ranks import join_mesh, say
from harness.steps import measure

COLLECTIVES, AS_TENSORS = {"copy_engines": "none"}, {"grads_in_place": False}
# Options of fully_shard. The library is the first word. "compiled": blocks are
# compiled. "loss": linear_cross_entropy computes the loss, and the embedding is a
# separate unit.
WAYS = {
    "fsdp2 eager": {},
    "flatshard eager": {},
    "flatshard eager, collectives": COLLECTIVES,
    "flatshard eager, gradients as tensors": AS_TENSORS,
    "flatshard eager, collectives, as tensors": {**COLLECTIVES, **AS_TENSORS},
    "fsdp2 compiled": {},
    "flatshard compiled": {},
    "flatshard compiled, collectives": COLLECTIVES,
    "fsdp2 eager, loss": {},
    "flatshard eager, loss": {},
    "fsdp2 compiled, loss": {},
    "flatshard compiled, loss": {},
}


class LlamaWithLoss(LlamaForCausalLM):
    def own_loss(self, ids):
        hidden = self.model(input_ids=ids).last_hidden_state[:, :-1]
        return flatshard.linear_cross_entropy(hidden, self.lm_head.weight, ids[:, 1:])


def draw(module):
    with torch.no_grad():
        for p in module.parameters(recurse=False):
            p.fill_(1.0) if p.ndim == 1 else p.normal_(0, 0.02)


def build(way, args, mesh):
    name, own_loss = way.split()[0], "loss" in way
    sizes = LLAMA_SIZES[args.shape]
    options = {"attn_implementation": "sdpa", "use_cache": False}
    config = llama_config(sizes, vocab_size=args.vocab, **options)
    with torch.device("meta"):
        model = LlamaWithLoss(config)
    if "compiled" in way:
        for layer in model.model.layers:
            layer.compile()
    embedding = [model.model.embed_tokens] if own_loss else []
    fully_shard = fully_shard_of(name)
    for module in (*model.model.layers, *embedding, model):
        fully_shard(module, mesh=mesh, **WAYS[way])
    if own_loss:
        library(name).register_fsdp_forward_method(model, "own_loss")
    torch.manual_seed(0)
    if name == "fsdp2":
        model.to_empty(device="cuda")
        for module in model.modules():
            draw(module)
    else:
        flatshard.reset_parameters(model, init_fn=draw)
    restore_rotary(model, "cuda")
    return model


def run(way, args, mesh):
    model = build(way, args, mesh)
    optimizer = adamw(model, args.core_adamw and way.startswith("flatshard"))
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randint(args.vocab, (1, args.seq), device="cuda")

    def forward():
        if "loss" in way:
            return model.own_loss(ids)
        return model(input_ids=ids, labels=ids).loss

    return measure(forward, optimizer, args)


def main():
    parser = Parser(__doc__).options("warmup", "steps", vocab=128256, seq=4096)
    parser.add_argument(
        "--shape", choices=LLAMA_SIZES, default="8b", help="of the model"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--core-adamw", action="store_true", help="for Flatshard")
    args = parser.parse_args()
    mesh = join_mesh()
    say(f"{mesh.size()}x {torch.cuda.get_device_name()}", vars(args))
    for way in args.ways:
        say(f"{way:20}", json.dumps(run(way, args, mesh)))
        release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
