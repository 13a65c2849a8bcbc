"""Times CUDA kernels of Flatshard and PyTorch (eager and compiled) on model shapes.

python3 bench/kernels.py build/flatshard_kernels --json kernels.json

Prints a table with the microseconds of each kernel and of PyTorch. It also has the
bandwidth that Flatshard's kernel reaches, as a fraction of the bandwidth of a copy. The
bandwidth counts the bytes that the operation has to move at least. One GPU, bfloat16,
8192 tokens, minutes. `--only swiglu` measures only the copy and operations with this word
in their name. `flatshard plan --calibrate` measures matmuls.
"""

import functools
import statistics

import torch
import torch.nn.functional as F

from harness.command_line import Parser
from harness.models import rotate
from harness.programs import rows_of, write_json
from harness.tables import head, row

SHAPES = {
    "1B": (2048, 8192, 32, 64),
    "8B": (4096, 14336, 32, 128),
    "70B": (8192, 28672, 64, 128),
}
VOCAB, LOSS_ROWS, SHARD, RANKS = 128256, 2048, 1 << 26, 8
EXPERTS, PER_TOKEN, DIM, WIDTH = 128, 8, 2048, 768
FLOAT8_COLUMNS = (4096, 14336)
# Bytes of arguments, so that none is still in a cache when its turn comes.
WORKING_SET = 1 << 30
LARGEST = 448.0
E4M3 = torch.float8_e4m3fn
# {title: (name, format)} of a row's figures
COLUMNS = {
    "kernel": ("op", ""),
    "shapes": ("shape", ""),
    "us": ("us", ".1f"),
    "GB/s": ("gb_per_s", ".0f"),
    "of a copy": ("of_copy", ".2f"),
    "eager us": ("eager_us", ".1f"),
    "compiled us": ("compiled_us", ".1f"),
    "of the best": ("of_best", ".2f"),
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


def cast(x, quantize):
    return (x.float() * quantize).clamp(-LARGEST, LARGEST).to(E4M3)


def amax(x):
    return x.abs().max().float()


def cast_tensorwise(x, largest):
    quantize = LARGEST / largest
    return cast(x, quantize), quantize.reciprocal()


def cast_and_transpose(x, largest):
    data, scale = cast_tensorwise(x, largest)
    return data, data.t().contiguous(), scale


def power_of_two(largest):
    return (LARGEST / largest.float()).log2().floor().exp2()


def rowwise(x):
    quantize = power_of_two(x.abs().amax(1, keepdim=True))
    return cast(x, quantize), quantize.reciprocal()


def rowwise_both(x):
    columns = power_of_two(x.abs().amax(0, keepdim=True))
    turned = cast(x, columns).t().contiguous()
    return *rowwise(x), turned, columns.reciprocal()


def exact(largest):
    return LARGEST / largest


def blocks(outer, inner, rule=exact, transposed=False):
    """Returns a function that quantizes with a scale for each block."""

    def quantized(x):
        split = x.unflatten(0, (-1, outer)).unflatten(2, (-1, inner))
        quantize = rule(split.abs().amax((1, 3), keepdim=True).float())
        data = cast(split, quantize).reshape(x.shape)
        return data.t().contiguous() if transposed else data, quantize.reciprocal()

    return quantized


blockwise = blocks(128, 128)
blockwise_1x128, blockwise_1x128_columns = blocks(1, 128), blocks(128, 1, exact, True)
mxfp8, mxfp8_columns = blocks(1, 32, power_of_two), blocks(32, 1, power_of_two, True)


def blockwise_columns(x):
    return blockwise(byte_transpose(x))


def blockwise_both(x):
    data, scales = blockwise(x)
    return data, scales, byte_transpose(data)


def both(rows, columns):
    return lambda x: (*rows(x), *columns(x))


def byte_transpose(x):
    return x.t().contiguous()


# The function that torch.compile gets for each operation of the program.
FLOAT8 = {
    "amax": amax,
    "cast tensorwise": cast_tensorwise,
    "cast and transpose tensorwise": cast_and_transpose,
    "rowwise rows": rowwise,
    "rowwise both": rowwise_both,
    "blockwise rows": blockwise,
    "blockwise columns": blockwise_columns,
    "blockwise both": blockwise_both,
    "blockwise_1x128 rows": blockwise_1x128,
    "blockwise_1x128 columns": blockwise_1x128_columns,
    "blockwise_1x128 both": both(blockwise_1x128, blockwise_1x128_columns),
    "mxfp8 rows": mxfp8,
    "mxfp8 columns": mxfp8_columns,
    "mxfp8 both": both(mxfp8, mxfp8_columns),
    "cast tensorwise from float32": cast_tensorwise,
    "mxfp8 both from float32": both(mxfp8, mxfp8_columns),
    "byte transpose": byte_transpose,
}


def permute(x, source):
    return x[source]


def sum_rows(rows, source, first):
    return first.index_add(0, source, rows)


def expert_products(x, act, up, down, dgate_up, dy, ends):
    """Runs both matmuls of a layer of experts and all their gradients."""
    product = functools.partial(torch._grouped_mm, offs=ends)
    return (
        *(product(x, up), product(act, down)),
        *(product(dgate_up, up.mT), product(dy, down.mT)),
        *(product(x.t(), dgate_up), product(act.t(), dy)),
    )


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def given(make, *shape):
    return make(*shape, device="cuda")


def cases(tokens):
    """Yields operation, shape, function, and a function that makes its arguments."""
    for name, (dim, ffn, heads, head_dim) in SHAPES.items():
        rows = tokens * heads
        weight, head_weight = (given(torch.ones, n).bfloat16() for n in (dim, head_dim))
        rstd, head_rstd = (given(torch.ones, n) for n in (tokens, rows))
        cos = normal(tokens, 1, head_dim // 2, dtype=torch.float32)
        turns = (tokens, heads, head_dim)
        # (function, how many tensors, their shape, further arguments)
        of_shape = {
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
        for op, (function, count, shape, *more) in of_shape.items():

            def make(count=count, shape=shape, more=more):
                return (*(normal(*shape) for _ in range(count)), *more)

            yield op, name, function, make
    targets = torch.randint(VOCAB, (LOSS_ROWS,), device="cuda")
    op = "cross-entropy and its gradient"
    yield op, "all", loss, lambda: (normal(LOSS_ROWS, VOCAB), targets)

    def states():
        main = normal(SHARD, dtype=torch.float32)
        return main, normal(SHARD), *(given(torch.zeros, SHARD) for _ in range(2))

    yield "AdamW and cast", "shard", adamw, states
    op = "sum of copied gradients"
    yield op, "shard", sum_of_rows, lambda: (normal(RANKS, SHARD // RANKS),)
    yield from float8_cases(tokens)
    yield from expert_cases(tokens)


def float8_cases(tokens):
    for columns in FLOAT8_COLUMNS:
        for op, function in FLOAT8.items():
            dtype = torch.float32 if op.endswith("float32") else torch.bfloat16

            def make(function=function, columns=columns, dtype=dtype):
                if function is byte_transpose:
                    size = (tokens, columns)
                    return (torch.randint(256, size, device="cuda", dtype=torch.uint8),)
                x = normal(tokens, columns, dtype=dtype)
                largest = function in (cast_tensorwise, cast_and_transpose)
                return (x, given(torch.ones, ())) if largest else (x,)

            yield op, f"{tokens}x{columns}", function, make


def expert_cases(tokens):
    """Returns the parts of a layer of experts, with `torch._grouped_mm`."""
    logits = normal(tokens, EXPERTS, dtype=torch.float32)
    experts = logits.topk(PER_TOKEN, -1).indices.flatten()
    source = experts.argsort(stable=True) // PER_TOKEN
    ends = torch.bincount(experts, minlength=EXPERTS).cumsum(0).to(torch.int32)
    rows = len(source)
    yield "permute rows", "experts", permute, lambda: (normal(tokens, DIM), source)
    yield (
        "sum rows of tokens",
        "experts",
        sum_rows,
        lambda: (normal(rows, DIM), source, normal(tokens, DIM)),
    )

    def operands():
        shapes = [(rows, DIM), (rows, WIDTH), (EXPERTS, DIM, 2 * WIDTH)]
        shapes += [(EXPERTS, WIDTH, DIM), (rows, 2 * WIDTH), (rows, DIM)]
        return (*(normal(*shape) for shape in shapes), ends)

    op = "products of experts, forward and backward"
    yield op, "experts", expert_products, operands


def microseconds(function, sets, calls=20, rounds=7):
    """Returns the GPU time of one call: the median over rounds of 20 calls.

    A first round warms up and compiles.

    Args:
        sets: tuples of arguments, used in turn from call to call.
    """

    def once():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(calls):
            function(*sets[i % len(sets)])
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    once()
    return statistics.median(once() for _ in range(rounds))


def compare(rows, tokens, only):
    """Adds PyTorch's times to the rows, and yields the rows in their order."""
    peers = {(op, shape): of for op, shape, *of in cases(tokens)}
    copy = next(r["bytes"] / r["us"] for r in rows if r["op"] == "copy")
    for r in rows:
        rate = r["bytes"] / r["us"]
        r |= {"gb_per_s": rate * 1e-3, "of_copy": rate / copy}
        function, make = peers.get((r["op"], r["shape"]), (None, None))
        if function is not None and only in r["op"]:
            count = min(16, max(1, WORKING_SET // r["bytes"]))
            sets = [make() for _ in range(count)]
            torch._dynamo.reset()
            compiled = torch.compile(function, dynamic=False)
            with torch.no_grad():
                r["eager_us"] = microseconds(function, sets)
                r["compiled_us"] = microseconds(compiled, sets)
            del sets
            r["of_best"] = r["us"] / min(r["eager_us"], r["compiled_us"])
        yield r


def main():
    parser = Parser(__doc__).options("json", tokens=8192)
    parser.add_argument("program", help="build/flatshard_kernels")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only operations with it"
    )
    args = parser.parse_args()
    head(*COLUMNS, left=(0, 1))
    done = []
    for found in compare(
        rows_of(args.program, str(args.tokens), args.only), args.tokens, args.only
    ):
        done.append(found)
        row(
            *(
                f"{found[key]:{form}}" if key in found else ""
                for key, form in COLUMNS.values()
            )
        )
    write_json(args.json, done)


if __name__ == "__main__":
    main()
