"""What CUDA graphs give an unsharded Llama in PyTorch: forward and backward, in ms.

python3 bench/graph_peer.py --layers 64 --dim 1024 --ffn 3584 --heads 16

The model of bench/fsdp2_llama.py with bfloat16 weights on one GPU, random tokens, no
optimizer and no sharding, in several ways of launching the same work. A row of JSON for
each way: the median ms with its range, until when the host is busy, the peak of
allocated memory in GiB. A way that fails is a row that says so, and the exit status
is 1. Without a GPU only eager and compiled run: that tries the script.
"""

import argparse
import gc
import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp2_llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


class Step:
    """A model and one batch: forward and backward of it."""

    def __init__(self, args):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = fsdp2_llama.Llama(args).to(torch.bfloat16)
        for name, parameter in self.model.named_parameters():
            if not name.endswith("norm.weight"):
                nn.init.normal_(parameter, std=0.02)
        half = args.dim // args.heads // 2
        turns = 500000.0 ** -(torch.arange(half, device=DEVICE) / half)
        positions = torch.arange(args.seq, device=DEVICE)
        angles = torch.outer(positions, turns)[:, None, :]
        self.rotary = (angles.cos(), angles.sin())
        tokens = torch.randint(args.vocab, (1, args.seq + 1), device=DEVICE)
        self.batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        self.hidden = (1, args.seq, args.dim)

    def __call__(self):
        self.model.zero_grad(set_to_none=True)
        with sdpa_kernel(ATTENTION, set_priority=True):
            self.model(*self.batch, *self.rotary).backward()

    def compile_loss(self):
        self.model.loss = torch.compile(fsdp2_llama.loss_of)

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
    samples = tuple(
        (
            torch.randn(
                step.hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True
            ),
            *step.rotary,
        )
        for _ in layers
    )
    with sdpa_kernel(ATTENTION, set_priority=True):
        torch.cuda.make_graphed_callables(layers, samples)  # changes their forward
    return step


def graph_per_compiled_block(step):
    step.compile_blocks()
    return graph_per_block(step)


def one_graph(step):
    """Forward and backward of the whole model."""
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


WAYS = {
    "eager": eager,
    "compiled": compiled,
    "reduce-overhead": reduce_overhead,
    "graph-per-block": graph_per_block,
    "graph-per-block-compiled": graph_per_compiled_block,
    "one-graph": one_graph,
    "one-graph-compiled": one_graph_compiled,
}


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(run, args):
    for _ in range(args.warmup):
        run()
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    for _ in range(args.steps):
        begin = time.perf_counter()
        run()
        host.append(1e3 * (time.perf_counter() - begin))
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {
        "ms": round(statistics.median(times), 1),
        "range": [round(min(times), 1), round(max(times), 1)],
        "host_ms": round(statistics.median(host), 1),
        "peak_GiB": round(peak / 2**30, 1),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=3584)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--warmup", type=int, default=5, help="steps [5]")
    parser.add_argument("--steps", type=int, default=12, help="measured [12]")
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
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
