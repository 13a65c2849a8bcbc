"""flatshard.float8: quantizers, and what they refuse."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from flatshard import float8
from tests.python.device import on_device

RECIPES = ["tensorwise", "rowwise", "blockwise", "blockwise_1x128", "mxfp8"]
BLOCKS = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "blockwise": (128, 128),
    "blockwise_1x128": (1, 128),
    "mxfp8": (1, 32),
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def values(rows=256, columns=384, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator)
    return on_device((x * torch.rand(rows, 1, generator=generator)).to(dtype))


def expected_scales(x, recipe, rounding, format):
    """Returns the scales computed by torch's operations, from the table of the
    documentation."""
    outer, inner = BLOCKS[recipe]
    outer, inner = outer or x.shape[0], inner or x.shape[1]
    blocks = x.float().unflatten(0, (-1, outer)).unflatten(2, (-1, inner))
    amax = blocks.abs().amax((1, 3)).double().cpu()  # where log2 is exact
    if recipe in ("rowwise", "mxfp8"):
        if rounding == "up":
            exponent = (amax / LARGEST[format]).log2().ceil()
        else:
            exponent = amax.log2().floor() - (8 if format == "e4m3" else 15)
        scales = exponent.exp2().float()
    else:
        scales = (LARGEST[format] / amax.float()).reciprocal()
    return scales.to(x.device), (outer, inner)


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_and_data(recipe, format, rounding):
    if rounding == "floor" and recipe not in ("rowwise", "mxfp8"):
        with pytest.raises(
            ValueError, match=f"rounding = .floor. does not fit {recipe}, "
        ):
            float8.quantize(values(), recipe, rounding=rounding)
        return
    for dtype in (torch.float32, torch.bfloat16):
        x = values(dtype=dtype)
        for axis in ("row", "column"):
            plain = x if axis == "row" else x.t()
            data, scales = float8.quantize(
                x, recipe, axis=axis, rounding=rounding, format=format
            )
            assert data.shape == plain.shape and data.is_contiguous()
            assert data.device == scales.device == x.device
            want, (outer, inner) = expected_scales(plain, recipe, rounding, format)
            got = scales.float()
            torch.testing.assert_close(got.reshape(want.shape), want, rtol=2e-7, atol=0)
            back = float8.dequantize(data, scales, recipe, axis=axis)
            whole = want.repeat_interleave(outer, 0).repeat_interleave(inner, 1)
            step = whole * LARGEST[format] * (2**-4 if format == "e4m3" else 2**-3)
            error = (back - plain.float()).abs()
            saturated = plain.float().abs() > whole * LARGEST[format] * 1.0001
            assert bool((error <= step)[~saturated].all())
            assert rounding == "floor" or not bool(saturated.any())
            half = float8.dequantize(
                data, scales, recipe, axis=axis, dtype=torch.bfloat16
            )
            assert torch.equal(half, back.bfloat16())


def test_equals_the_cast_of_torch_where_that_is_defined():
    """float8_e4m3fn of torch is right below 464; scales as torchao makes them."""
    x = values(dtype=torch.bfloat16)
    data, scale = float8.quantize(x, "tensorwise")
    by_torch = (448.0 / x.abs().max().double()).float()
    assert torch.equal(scale, by_torch.reciprocal())
    cast = (x.float() * by_torch).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(data.view(torch.uint8), cast.view(torch.uint8))
    rows, scales = float8.quantize(x, "rowwise")
    cast = (x.float() / scales[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(rows.view(torch.uint8), cast.view(torch.uint8))


def test_one_scale_over_all_ranks(rank, world):
    """Shards quantized with the largest amax equal the shards of the full tensor."""
    whole = values(16 * world, 64)
    mine = whole[16 * rank : 16 * (rank + 1)]
    largest = float8.amax(mine).view(torch.int32)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    data, scale = float8.quantize(mine, "tensorwise", amax=largest.view(torch.float32))
    want, want_scale = float8.quantize(whole, "tensorwise")
    assert torch.equal(scale, want_scale)
    mine = want[16 * rank : 16 * (rank + 1)]
    assert torch.equal(data.view(torch.uint8), mine.view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
def test_nonfinite_values(recipe):
    x = torch.ones(128, 128)
    x[3, 7] = float("nan")
    x = on_device(x)
    back = float8.dequantize(*float8.quantize(x, recipe), recipe)
    assert bool(back[3, 7].isnan())
    with pytest.raises(ValueError, match="tensor: expected finite numbers, got nan"):
        float8.quantize(x, recipe, nonfinite="raise")
    x[3, 7] = 1
    float8.quantize(x, recipe, nonfinite="raise")
    with pytest.raises(ValueError, match="amax: expected finite numbers, got inf"):
        float8.quantize(
            x,
            "tensorwise",
            amax=on_device(torch.tensor(float("inf"))),
            nonfinite="raise",
        )


def test_transpose_and_swizzle():
    data, scales = float8.quantize(values(), "mxfp8")
    turned = float8.transpose(data)
    assert turned.dtype == torch.float8_e4m3fn
    assert torch.equal(turned.view(torch.uint8), data.view(torch.uint8).t())
    tiles = float8.swizzle_mx_scales(scales).view(2, 3, 32, 4, 4)
    plain = scales.view(torch.uint8).view(2, 4, 32, 3, 4).permute(0, 3, 2, 1, 4)
    assert torch.equal(tiles.view(torch.uint8), plain)


def test_a_short_last_block():
    data, scales = float8.quantize(values(100), "mxfp8", axis="column", multiple=16)
    assert data.shape == (384, 112) and scales.shape == (384, 4)
    assert not data[:, 100:].view(torch.uint8).any()


@pytest.mark.parametrize(
    "tensor, arguments, problem",
    [
        (torch.ones(2, 2, dtype=torch.float64), {}, "float32 or bfloat16 .*got Double"),
        (torch.ones(2, 2, dtype=torch.float16), {}, "float32 or bfloat16 .*got Half"),
        (torch.ones(2), {}, r"\[rows, columns\], got \[2\]"),
        (torch.ones(2, 2, device="meta"), {}, "the CPU or on CUDA, got meta"),
        (torch.ones(2, 2), {"recipe": "tensorwize"}, "did you mean 'tensorwise'"),
        (torch.ones(2, 2), {"axis": "rows"}, "axis: .*'row' or 'column', got 'rows'"),
        (torch.ones(2, 2), {"rounding": "down"}, "rounding: .* got 'down'"),
        (torch.ones(2, 2), {"format": "e3m4"}, "format: .* got 'e3m4'"),
        (torch.ones(2, 2), {"nonfinite": "drop"}, "nonfinite: .* got 'drop'"),
        (torch.ones(2, 2), {"multiple": 16}, "multiple: expected 1"),
        (torch.ones(2, 2), {"amax": torch.ones(2)}, "amax: expected Float"),
        (torch.ones(2, 2), {"scales": torch.ones(2)}, "scales: expected none"),
        (
            torch.ones(128, 96),
            {"recipe": "blockwise"},
            "blockwise: expected columns divisible by 128, got 96",
        ),
        (
            torch.ones(48, 96),
            {"recipe": "mxfp8", "axis": "column"},
            "mxfp8: expected rows divisible by 32, got 48",
        ),
    ],
)
def test_bad_input(tensor, arguments, problem):
    arguments = {"recipe": "tensorwise", **arguments}
    with pytest.raises(ValueError, match=problem):
        float8.quantize(tensor, **arguments)


def test_what_is_no_plain_tensor(mesh):
    with pytest.raises(TypeError, match="tensor: expected a torch.Tensor, got list"):
        float8.quantize([[1.0]], "tensorwise")
    sharded = DTensor.from_local(values(2, 2), mesh, [Replicate()])
    with pytest.raises(TypeError, match="got DTensor; of a DTensor give to_local"):
        float8.quantize(sharded, "tensorwise")
    data, scales = float8.quantize(values(), "mxfp8")
    with pytest.raises(ValueError, match="scales: expected rowwise"):
        float8.dequantize(data, scales, "rowwise")
