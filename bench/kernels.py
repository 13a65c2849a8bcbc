"""Flatshard's CUDA kernels and PyTorch's, eager and compiled, on Llama's shapes.

python3 bench/kernels.py build/flatshard_kernels --json kernels.json

Prints a table: microseconds of each, and the GB/s that Flatshard's reaches with the
bytes that the operation has to move at least. One GPU, bfloat16, 8192 tokens.
"""

import torch
import torch.nn.functional as F

from harness import kernels
from harness.models import rotate
from harness.programs import rows_of

SHAPES = {
    "1B": (2048, 8192, 32, 64),
    "8B": (4096, 14336, 32, 128),
    "70B": (8192, 28672, 64, 128),
}
VOCAB, LOSS_ROWS, SHARD, RANKS = 128256, 2048, 1 << 26, 8
COLUMNS = {
    "kernel": "op",
    "shapes": "model",
    "us": ("us", 1),
    "GB/s": ("gb_per_s", 0),
    "eager us": ("eager_us", 1),
    "compiled us": ("compiled_us", 1),
    "of the best": ("of_best", 2),
}


def add_and_norm(x, delta, weight):
    total = x + delta
    return total, F.rms_norm(total, weight.shape, weight, 1e-5)


def norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def norm_backward(dy, dsum, x, weight, rstd):
    normed = x.float() * rstd[:, None]
    g = dy.float() * weight.float()
    dx = rstd[:, None] * (g - normed * (g * normed).mean(-1, keepdim=True))
    dx = dx if dsum is None else dx + dsum.float()
    return dx.to(x.dtype), (dy.float() * normed).sum(0)


def lone_norm_backward(dy, x, weight, rstd):
    return norm_backward(dy, None, x, weight, rstd)


def swiglu(gate, up):
    return F.silu(gate) * up


def swiglu_backward(dy, gate, up):
    s = torch.sigmoid(gate.float())
    silu = gate.float() * s
    dgate = dy.float() * up.float() * s * (1 + gate.float() * (1 - s))
    return dgate.to(gate.dtype), (dy.float() * silu).to(up.dtype)


def loss(logits, targets):
    wide = logits.float()
    lse = wide.logsumexp(-1, keepdim=True)
    gradient = (wide - lse).exp()
    gradient = gradient - F.one_hot(targets, wide.shape[-1])
    return (gradient / targets.numel()).to(logits.dtype), lse


def adamw(main, grad, first, second):
    grad = grad.float()
    main = main * (1 - 1e-5)
    first = 0.9 * first + 0.1 * grad
    second = 0.95 * second + 0.05 * grad * grad
    main = main - 1e-4 * (first / 0.5) / ((second / 0.5).sqrt() + 1e-8)
    return main, first, second, main.bfloat16()


def sum_of_rows(rows):
    return (rows.float().sum(0) / RANKS).to(rows.dtype)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def given(make, *shape):
    return make(*shape, device="cuda")


def cases(tokens):
    """Yields operation, model, function, and a function that makes its arguments."""
    for model, (dim, ffn, heads, head_dim) in SHAPES.items():
        rows = tokens * heads
        weight, head_weight = (given(torch.ones, n).bfloat16() for n in (dim, head_dim))
        rstd, head_rstd = (given(torch.ones, n) for n in (tokens, rows))
        cos = normal(tokens, 1, head_dim // 2, dtype=torch.float32)
        turns = (tokens, heads, head_dim)
        # (function, how many tensors, their shape, further arguments)
        of_model = {
            "add and rms_norm": (add_and_norm, 2, (tokens, dim), weight),
            "rms_norm backward and add": (
                norm_backward,
                3,
                (tokens, dim),
                weight,
                rstd,
            ),
            "rms_norm of heads": (norm, 1, (rows, head_dim), head_weight),
            "rms_norm of heads, backward": (
                lone_norm_backward,
                2,
                (rows, head_dim),
                head_weight,
                head_rstd,
            ),
            "rope": (rotate, 1, turns, cos, cos),
            "swiglu": (swiglu, 2, (tokens, ffn)),
            "swiglu backward": (swiglu_backward, 3, (tokens, ffn)),
        }
        for op, (function, count, shape, *more) in of_model.items():

            def make(count=count, shape=shape, more=more):
                return (*(normal(*shape) for _ in range(count)), *more)

            yield op, model, function, make
    targets = torch.randint(VOCAB, (LOSS_ROWS,), device="cuda")
    op = "cross-entropy and its gradient"
    yield op, "all", loss, lambda: (normal(LOSS_ROWS, VOCAB), targets)

    def states():
        main = normal(SHARD, dtype=torch.float32)
        return main, normal(SHARD), *(given(torch.zeros, SHARD) for _ in range(2))

    yield "AdamW and cast", "shard", adamw, states
    op = "sum of copied gradients"
    yield op, "shard", sum_of_rows, lambda: (normal(RANKS, SHARD // RANKS),)


def compare(rows, tokens):
    rows = {(row["op"], row["model"]): row for row in rows}
    for op, model, function, make in cases(tokens):
        row = rows[op, model]
        sets = [make() for _ in range(max(1, kernels.WORKING_SET // row["bytes"]))]
        with torch.no_grad():
            row["eager_us"] = kernels.microseconds(function, sets)
            row["compiled_us"] = kernels.compiled_microseconds(function, sets)
        del sets
        row["gb_per_s"] = row["bytes"] / row["us"] * 1e-3
        row["of_best"] = row["us"] / min(row["eager_us"], row["compiled_us"])
        yield row


def main():
    args = kernels.parse(__doc__, "flatshard_kernels").parse_args()
    rows = compare(rows_of(args.program, str(args.tokens)), args.tokens)
    kernels.print_rows(rows, COLUMNS, args.json, left=(0, 1))


if __name__ == "__main__":
    main()
