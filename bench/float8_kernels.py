"""Flatshard's FP8 kernels and torch.compile's, on the shapes of an 8B Llama.

python3 bench/float8_kernels.py build/flatshard_float8_kernels --json figures.json

Prints a table: microseconds of each, the GB/s that Flatshard's reaches with the bytes
that the operation has to move at least, their part of a copy's GB/s on the same card, and
with --compile its time over torch.compile's. One GPU, 8192 tokens, below a minute.
"""

import torch

from harness import kernels
from harness.programs import rows_of

SIZES = (4096, 14336)
LARGEST = 448.0
E4M3 = torch.float8_e4m3fn
COLUMNS = {
    "kernel": "op",
    "shape": "shape",
    "us": ("us", 1),
    "GB/s": ("gb_per_s", 0),
    "of a copy": ("of_copy", 2),
    "compiled us": ("compiled_us", 1),
    "of compiled": ("of_compiled", 2),
}


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
CASES = {
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
WITH_LARGEST = (cast_tensorwise, cast_and_transpose)


def arguments(op, tokens, columns):
    """Returns new arguments of CASES[op]."""
    if op == "byte transpose":
        size = (tokens, columns)
        return (torch.randint(256, size, device="cuda", dtype=torch.uint8),)
    dtype = torch.float32 if op.endswith("float32") else torch.bfloat16
    x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
    return (
        (x, torch.full((), 4.0, device="cuda")) if CASES[op] in WITH_LARGEST else (x,)
    )


def compiled_us(op, tokens, columns, nbytes):
    count = min(16, max(1, kernels.WORKING_SET // nbytes))
    sets = [arguments(op, tokens, columns) for _ in range(count)]
    with torch.no_grad():
        return kernels.compiled_microseconds(CASES[op], sets)


def compile_too(rows, tokens):
    shapes = {f"{tokens}x{columns}": columns for columns in SIZES}
    for row in rows:
        if row["op"] in CASES and row["shape"] in shapes:
            us = compiled_us(row["op"], tokens, shapes[row["shape"]], row["bytes"])
            row |= {"compiled_us": us, "of_compiled": row["us"] / us}
        yield row


def main():
    parser = kernels.parse(__doc__, "flatshard_float8_kernels")
    parser.add_argument(
        "--compile", action="store_true", help="also torch.compile's: minutes"
    )
    args = parser.parse_args()
    rows = rows_of(args.program, "--json", str(args.tokens))
    rows = compile_too(rows, args.tokens) if args.compile else rows
    kernels.print_rows(rows, COLUMNS, args.json, left=(0, 1))


if __name__ == "__main__":
    main()
