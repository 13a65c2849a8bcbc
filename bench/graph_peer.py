"""Measures what CUDA graphs give an unsharded Llama in PyTorch, forward and backward.

python3 bench/graph_peer.py --layers 64 --dim 1024 --ffn 3584 --heads 16

The model of bench/fsdp2_llama.py with bfloat16 weights on one GPU, random tokens, no
optimizer and no sharding, in several ways of launching the same work. Prints a row of
JSON for each way: the median ms with its range, until when the host is busy, and the peak
of allocated memory in GiB. A way that fails is a row with its error, and the exit status
is 1. Without a GPU only eager and compiled run: that tries the script.
"""

import json
import sys

import torch
from torch import nn

from harness.command_line import Parser
from harness.models import Llama, loss_of, rotary
from harness.peers import fused_attention, release
from harness.ranks import usual_device
from harness.steps import rounded, time_steps

DEVICE = usual_device()


class Step:
    """A model and one batch: forward and backward of it."""

    def __init__(self, args):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = Llama(args).to(torch.bfloat16)
        for name, parameter in self.model.named_parameters():
            if not name.endswith("norm.weight"):
                nn.init.normal_(parameter, std=0.02)
        self.angles = rotary(args.seq, args.dim // args.heads, 500000.0, DEVICE)
        tokens = torch.randint(args.vocab, (1, args.seq + 1), device=DEVICE)
        self.batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        self.hidden = (1, args.seq, args.dim)

    def __call__(self):
        self.model.zero_grad(set_to_none=True)
        with fused_attention(DEVICE):
            self.model(*self.batch, *self.angles).backward()

    def compile_loss(self):
        self.model.loss = torch.compile(loss_of)

    def compile_blocks(self, mode=None):
        for layer in self.model.layers:
            layer.forward = torch.compile(layer.forward, mode=mode)


def eager(step):
    return step


def compiled(step):
    step.compile_loss()
    step.compile_blocks()
    return step


def reduce_overhead(step):
    step.compile_loss()
    step.compile_blocks("reduce-overhead")

    def run():
        torch.compiler.cudagraph_mark_step_begin()
        step()

    return run


def graph_per_block(step):
    step.compile_loss()
    layers = tuple(step.model.layers)
    options = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    samples = tuple((torch.randn(step.hidden, **options), *step.angles) for _ in layers)
    with fused_attention(DEVICE):
        torch.cuda.make_graphed_callables(layers, samples)  # changes their forward
    return step


def graph_per_block_compiled(step):
    step.compile_blocks()
    return graph_per_block(step)


def one_graph(step):
    """Records forward and backward of the whole model."""
    step.compile_loss()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    step.model.zero_grad(set_to_none=True)  # gradients are of the graph's memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def one_graph_compiled(step):
    step.compile_blocks()
    return one_graph(step)


FUNCTIONS = (
    *(eager, compiled, reduce_overhead, graph_per_block, graph_per_block_compiled),
    *(one_graph, one_graph_compiled),
)
WAYS = {function.__name__.replace("_", "-"): function for function in FUNCTIONS}


def measure(run, args):
    found = rounded(time_steps(run, args))
    names = {
        "ms": "ms",
        "range": "ms_range",
        "host_ms": "host_ms",
        "peak_GiB": "peak_GiB",
    }
    return {name: found[key] for name, key in names.items()}


def main():
    parser = Parser(__doc__).options("seq", layers=64, dim=1024, ffn=3584, heads=16)
    parser.options(kv_heads=8, vocab=128256, warmup=5, steps=12)
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="[all]")
    args = parser.parse_args()
    args.gqa = True
    possible = list(WAYS) if DEVICE == "cuda" else ["eager", "compiled"]
    failed = False
    for way in args.ways or possible:
        torch._dynamo.reset()
        try:
            row = measure(WAYS[way](Step(args)), args)
        except Exception as error:  # the others are still of use
            failed = True
            row = {"error": str(error)[:300]}
        print(json.dumps({"way": way, **row}), flush=True)
        release()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
