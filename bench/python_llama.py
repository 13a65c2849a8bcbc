"""Flatshard's and FSDP2's fully_shard of one Llama-like PyTorch module, side by side.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/python_llama.py

Prints first whether a small model has the same losses and weights under both. Then, for
each way, the median step time (forward, backward, AdamW) in ms, the host's part of it,
and the peak of allocated memory. One call, so that the ratios are of one machine and
hour.
"""

import argparse
import copy
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness.command_line import Parser
from harness.models import Decoder, LlamaBlock
from harness.peers import adamw, fully_shard_of
from harness.ranks import join_mesh, say
from harness.steps import measure

SMALL = {"dim": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "layers": 3, "vocab": 512}
# The library is the first word; "its AdamW" is Flatshard's.
WAYS = (
    "flatshard, torch's AdamW",
    "fsdp2, torch's AdamW",
    "flatshard, its AdamW",
    "fsdp2 compiled",
    "flatshard compiled, its AdamW",
)


class Llama(Decoder):
    """Without positions, and with the loss of the next token."""

    def __init__(self, args):
        args.gqa = True
        super().__init__(args, LlamaBlock, 1e-5)

    def forward(self, ids):
        logits = self.logits(ids).float().flatten(0, 1)
        return F.cross_entropy(logits[:-1], ids.flatten()[1:])


def shard(model, name, mesh, **dtypes):
    fully_shard = fully_shard_of(name, **dtypes)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def parity(mesh, dtype):
    """Prints of five steps of a small model whether losses are equal, and how far the
    weights are apart."""
    results = []
    torch.manual_seed(0)
    first = Llama(argparse.Namespace(**SMALL)).cuda()
    for name in ("flatshard", "fsdp2"):
        dtypes = {"param_dtype": dtype, "reduce_dtype": torch.float32}
        model = shard(copy.deepcopy(first), name, mesh, **dtypes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for step in range(5):
            torch.manual_seed(1000 * step + dist.get_rank())
            loss = model(torch.randint(512, (1, 64), device="cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = [t.full_tensor() for t in model.state_dict().values()]
        results.append((losses, weights))
    (a, x), (b, y) = results
    apart = max((p - q).abs().max().item() for p, q in zip(x, y))
    say(f"parity {dtype}: equal losses {a == b}, weights apart by {apart}")


def run(way, mesh, args):
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = Llama(args)
        ids = torch.randint(args.vocab, (1, args.seq))
    shard(model, way.split()[0].strip(","), mesh)
    if "compiled" in way:
        for layer in model.layers:
            layer.compile()
    return measure(lambda: model(ids), adamw(model, "its AdamW" in way), args)


def main():
    parser = Parser(__doc__).options("steps", dim=2048, heads=32, kv_heads=8, layers=16)
    parser.options(vocab=32000, seq=4096, warmup=3)
    parser.add_argument(
        "--hidden", type=int, default=8192, dest="ffn", help="of the MLP"
    )
    args = parser.parse_args()
    mesh = join_mesh()
    for dtype in (torch.float32, torch.bfloat16):
        parity(mesh, dtype)
    for way in WAYS:
        say(f"{way:32}", json.dumps(run(way, mesh, args)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
