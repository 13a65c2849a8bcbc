"""Flatshard's FP8 kernels beside torch.compile's, on the shapes of an 8B Llama.

python3 bench/float8_kernels.py build/flatshard_float8_kernels --json figures.json

Prints a table: microseconds of each, the GB/s that Flatshard's reaches with the bytes
that the operation has to move at least, that over a copy's GB/s on the same card, and
with --compile its time over torch.compile's. One GPU, 8192 tokens, below a minute.
"""

import argparse

import torch

from kernel_time import microseconds, rows_of, write_json

WORKING_SET = 1 << 30
SIZES = (4096, 14336)
LARGEST = 448.0
E4M3 = torch.float8_e4m3fn


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


def blocks(x, outer, inner, rule):
    split = x.unflatten(0, (-1, outer)).unflatten(2, (-1, inner))
    quantize = rule(split.abs().amax((1, 3), keepdim=True).float())
    return cast(split, quantize).reshape(x.shape), quantize.reciprocal()


def blockwise(x, outer=128, inner=128):
    return blocks(x, outer, inner, lambda largest: LARGEST / largest)


def blockwise_columns(x):
    return blockwise(x.t().contiguous())


def blockwise_both(x):
    data, scales = blockwise(x)
    return data, scales, data.t().contiguous()


def blockwise_1x128(x):
    return blockwise(x, 1, 128)


def blockwise_1x128_columns(x):
    data, scales = blockwise(x, 128, 1)
    return data.t().contiguous(), scales


def mxfp8(x, outer=1, inner=32):
    return blocks(x, outer, inner, power_of_two)


def mxfp8_columns(x):
    data, scales = mxfp8(x, 32, 1)
    return data.t().contiguous(), scales


def both(rows, columns):
    return lambda x: (*rows(x), *columns(x))


def byte_transpose(x):
    return x.t().contiguous()


def cases(tokens, columns):
    """op -> (function, function that makes its arguments)."""
    largest = torch.full((), 4.0, device="cuda")

    def values(dtype=torch.bfloat16, *others):
        return lambda: (
            torch.randn(tokens, columns, device="cuda", dtype=dtype),
            *others,
        )

    def codes():
        size = (tokens, columns)
        return (torch.randint(256, size, device="cuda", dtype=torch.uint8),)

    x = values()
    given = values(torch.bfloat16, largest)
    yield "amax", amax, x
    yield "cast tensorwise", cast_tensorwise, given
    yield "cast and transpose tensorwise", cast_and_transpose, given
    yield "rowwise rows", rowwise, x
    yield "rowwise both", rowwise_both, x
    yield "blockwise rows", blockwise, x
    yield "blockwise columns", blockwise_columns, x
    yield "blockwise both", blockwise_both, x
    yield "blockwise_1x128 rows", blockwise_1x128, x
    yield "blockwise_1x128 columns", blockwise_1x128_columns, x
    pair = both(blockwise_1x128, blockwise_1x128_columns)
    yield "blockwise_1x128 both", pair, x
    yield "mxfp8 rows", mxfp8, x
    yield "mxfp8 columns", mxfp8_columns, x
    yield "mxfp8 both", both(mxfp8, mxfp8_columns), x
    wide = values(torch.float32, largest)
    yield "cast tensorwise from float32", cast_tensorwise, wide
    wide = values(torch.float32)
    yield "mxfp8 both from float32", both(mxfp8, mxfp8_columns), wide
    yield "byte transpose", byte_transpose, codes


def compiled_us(function, make, nbytes):
    sets = [make() for _ in range(min(16, max(1, WORKING_SET // nbytes)))]
    torch._dynamo.reset()
    with torch.no_grad():
        return microseconds(torch.compile(function, dynamic=False), sets)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", help="build/flatshard_float8_kernels")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument(
        "--compile", action="store_true", help="time torch.compile's too: minutes"
    )
    options = parser.parse_args()
    rows = rows_of(options.program, "--json", str(options.tokens))
    theirs = {}
    if options.compile:
        for columns in SIZES:
            for op, function, make in cases(options.tokens, columns):
                theirs[op, f"{options.tokens}x{columns}"] = function, make
    print("| kernel | shape | us | GB/s | of a copy | compiled us | of compiled |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        compiled = of_compiled = ""
        found = theirs.get((row["op"], row["shape"]))
        if found:
            row["compiled_us"] = compiled_us(*found, row["bytes"])
            compiled = f"{row['compiled_us']:.1f}"
            of_compiled = f"{row['us'] / row['compiled_us']:.2f}"
        print(
            f"| {row['op']} | {row['shape']} | {row['us']:.1f} | "
            f"{row['gb_per_s']:.0f} | {row['of_copy']:.2f} | {compiled} | "
            f"{of_compiled} |",
            flush=True,
        )
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
