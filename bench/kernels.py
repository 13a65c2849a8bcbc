"""Flatshard's CUDA kernels beside PyTorch's, eager and compiled, on Llama's shapes.

python3 bench/kernels.py build/flatshard_kernels --json kernels.json

Prints a table: microseconds of each, and the GB/s that Flatshard's reaches with the
bytes that the operation has to move at least. One GPU, bfloat16, 8192 tokens.
"""

import argparse

import torch
import torch.nn.functional as F

from kernel_time import microseconds, rows_of, write_json

SHAPES = {
    "1B": (2048, 8192, 32, 64),
    "8B": (4096, 14336, 32, 128),
    "70B": (8192, 28672, 64, 128),
}
VOCAB, LOSS_ROWS, SHARD, RANKS = 128256, 2048, 1 << 26, 8
WORKING_SET = 1 << 30


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


def rope(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


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


def cases(tokens):
    """(op, model) -> (function, function that makes its arguments)."""

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    for model, (dim, ffn, heads, head_dim) in SHAPES.items():
        weight = torch.ones(dim, device="cuda", dtype=torch.bfloat16)
        rstd = torch.ones(tokens, device="cuda")
        cos = normal(tokens, 1, head_dim // 2, dtype=torch.float32)

        def hidden(count, width, *others):
            return lambda: (*(normal(tokens, width) for _ in range(count)), *others)

        yield "add and rms_norm", model, add_and_norm, hidden(2, dim, weight)
        yield (
            "rms_norm backward and add",
            model,
            norm_backward,
            hidden(3, dim, weight, rstd),
        )
        heads_weight = torch.ones(head_dim, device="cuda", dtype=torch.bfloat16)
        head_rstd = torch.ones(tokens * heads, device="cuda")

        def head(count, *others, rows=tokens * heads, width=head_dim):
            return lambda: (*(normal(rows, width) for _ in range(count)), *others)

        yield "rms_norm of heads", model, norm, head(1, heads_weight)
        yield (
            "rms_norm of heads, backward",
            model,
            lone_norm_backward,
            head(2, heads_weight, head_rstd),
        )
        yield (
            "rope",
            model,
            rope,
            lambda h=heads, d=head_dim, c=cos: (normal(tokens, h, d), c, c),
        )
        yield "swiglu", model, swiglu, hidden(2, ffn)
        yield "swiglu backward", model, swiglu_backward, hidden(3, ffn)
    targets = torch.randint(VOCAB, (LOSS_ROWS,), device="cuda")
    yield (
        "cross-entropy and its gradient",
        "all",
        loss,
        lambda: (normal(LOSS_ROWS, VOCAB), targets),
    )
    yield (
        "AdamW and cast",
        "shard",
        adamw,
        lambda: (
            normal(SHARD, dtype=torch.float32),
            normal(SHARD),
            *(torch.zeros(SHARD, device="cuda") for _ in range(2)),
        ),
    )
    yield (
        "sum of copied gradients",
        "shard",
        sum_of_rows,
        lambda: (normal(RANKS, SHARD // RANKS),),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", help="build/flatshard_kernels")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    ours = rows_of(options.program, str(options.tokens))
    rows = {(row["op"], row["model"]): row for row in ours}
    print("| kernel | shapes | us | GB/s | eager us | compiled us | of the best |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for op, model, function, make in cases(options.tokens):
        row = rows[op, model]
        sets = [make() for _ in range(max(1, WORKING_SET // row["bytes"]))]
        with torch.no_grad():
            row["eager_us"] = microseconds(function, sets)
            torch._dynamo.reset()
            compiled = torch.compile(function, dynamic=False)
            row["compiled_us"] = microseconds(compiled, sets)
        row["gb_per_s"] = row["bytes"] / row["us"] * 1e-3
        row["of_best"] = row["us"] / min(row["eager_us"], row["compiled_us"])
        print(
            f"| {op} | {model} | {row['us']:.1f} | {row['gb_per_s']:.0f} | "
            f"{row['eager_us']:.1f} | {row['compiled_us']:.1f} | "
            f"{row['of_best']:.2f} |",
            flush=True,
        )
        del sets
    write_json(options.json, ours)


if __name__ == "__main__":
    main()
