"""The parts of a layer of experts and PyTorch's, at the sizes of Qwen3-30B-A3B.

python3 bench/experts.py build/flatshard_experts --json figures.json

Prints microseconds of each part by `build/flatshard_experts` and by PyTorch on the same
GPU, and the ratio: rows gathered by a compiled index, rows added by a compiled index_add,
and forward and backward of `torch._grouped_mm` with the copy of its weights' gradients
into a flat one, eager and compiled, of which the faster counts. One GPU, a minute.
"""

import torch

from harness import kernels
from harness.kernels import microseconds
from harness.programs import rows_of

EXPERTS, PER_TOKEN, DIM, WIDTH = 128, 8, 2048, 768
COLUMNS = {
    "part": "part",
    "us": ("us", 0),
    "GB/s": "gb_per_s",
    "TFLOP/s": "tflops",
    "PyTorch us": ("pytorch_us", 0),
    "of PyTorch": ("of_pytorch", 2),
}


def routing(tokens):
    """Returns the token of each row, sorted by expert, [tokens * 8] int64, and the ends of
    the experts' rows, [128] int32."""
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    experts = logits.topk(PER_TOKEN, -1).indices.flatten()
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=EXPERTS)
    return order // PER_TOKEN, counts.cumsum(0).to(torch.int32)


def permute(x, source):
    return x[source]


def sum_rows(rows, source, first):
    return first.index_add(0, source, rows)


class Grouped:
    """Both products of a layer and all their gradients."""

    def __init__(self, rows, ends):
        def values(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.ends = ends
        self.x = values(rows, DIM).requires_grad_()
        self.act = values(rows, WIDTH).requires_grad_()
        self.up = values(EXPERTS, DIM, 2 * WIDTH).requires_grad_()
        self.down = values(EXPERTS, WIDTH, DIM).requires_grad_()
        self.dgate_up, self.dy = values(rows, 2 * WIDTH), values(rows, DIM)
        self.flat = torch.empty(
            self.up.numel() + self.down.numel(), device="cuda", dtype=torch.bfloat16
        )
        self.product = torch._grouped_mm

    def __call__(self):
        leaves = (self.x, self.up, self.act, self.down)
        outs = (
            self.product(self.x, self.up, offs=self.ends),
            self.product(self.act, self.down, offs=self.ends),
        )
        grads = torch.autograd.grad(outs, leaves, (self.dgate_up, self.dy))
        self.flat[: self.up.numel()].view_as(self.up).copy_(grads[1])
        self.flat[self.up.numel() :].view_as(self.down).copy_(grads[3])


def theirs(tokens):
    """Returns {part: microseconds}."""
    source, ends = routing(tokens)
    x = torch.randn(tokens, DIM, device="cuda", dtype=torch.bfloat16)
    rows = x[source]
    gather, add = (torch.compile(f, dynamic=False) for f in (permute, sum_rows))
    found = {}
    with torch.no_grad():
        found["permute rows"] = microseconds(gather, [(x, source)])
        found["sum rows of tokens"] = microseconds(add, [(rows, source, x)])
    grouped = Grouped(len(source), ends)
    eager = microseconds(grouped, [()])
    grouped.product = torch.compile(torch._grouped_mm, dynamic=False)
    found["forward and backward, dw in place"] = min(eager, microseconds(grouped, [()]))
    return found


def main():
    args = kernels.parse(__doc__, "flatshard_experts").parse_args()
    rows = rows_of(args.program, str(args.tokens))
    peers = theirs(args.tokens)
    for row in (row for row in rows if row["part"] in peers):
        us = peers[row["part"]]
        row |= {"pytorch_us": us, "of_pytorch": row["us"] / us}
    kernels.print_rows(rows, COLUMNS, args.json, left=(0,))


if __name__ == "__main__":
    main()
