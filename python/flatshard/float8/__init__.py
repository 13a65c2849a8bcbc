"""Tensors in FP8, with scales in the layout that the matmuls of a GPU read.

    data, scales = flatshard.float8.quantize(weight, "blockwise")
    back = flatshard.float8.dequantize(data, scales, "blockwise")

The CPU and CUDA give the same bytes. docs/guides/fp8.md has the recipes.
"""

import torch

from flatshard import _C
from flatshard.float8.report import Float8Report, describe

__all__ = [
    "Float8Report",
    "amax",
    "dequantize",
    "describe",
    "quantize",
    "swizzle_mx_scales",
    "transpose",
]


def quantize(
    tensor: torch.Tensor,
    recipe: str,
    *,
    axis: str = "row",
    rounding: str = "up",
    format: str = "e4m3",
    transpose: bool = True,
    multiple: int = 1,
    amax: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    nonfinite: str = "propagate",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a plane of `tensor`: FP8 data, and the scales that it is multiplied by.

    `data` is `tensor / scale` rounded to nearest, ties to even. A larger value becomes
    the format's largest number. Given [outer, inner], the tensor's shape for axis "row"
    and its transpose's for axis "column":

    | recipe | a scale for | scales | their strides |
    |---|---|---|---|
    | "tensorwise" | the tensor | [] | |
    | "rowwise" | a row | [outer], powers of two | 1 |
    | "blockwise" | 128 x 128 | [outer/128, inner/128] | up4(inner/128), 1 |
    | "blockwise_1x128" | 128 of inner | [outer, inner/128] | 1, up4(outer) |
    | "mxfp8" | 32 of inner | [outer, inner/32] | inner/32, 1 |

    up4 is the next multiple of 4. Scales are float32, and float8_e8m0fnu for "mxfp8".
    cuBLASLt and `torch.nn.functional.scaled_mm` accept these strides.

    Args:
        tensor: [rows, columns] float32 or bfloat16, on the CPU or a GPU.
        recipe: one of the table.
        axis: the dimension that a matmul will sum over. "row": the elements of a row, as
            the forward pass does with a weight [out, in]. "column": the elements of a
            column, as the gradient of the input does.
        rounding: of scales that are powers of two. "up": none of a block's values
            saturates (arXiv:2506.08027). "floor": OCP MX 1.0, section 6.3.
        format: "e4m3", or "e5m2" for gradients.
        transpose: for axis "column". True: data is [columns, rows]. False: data stays
            [rows, columns], and scales of adjacent columns are adjacent.
        multiple: a divisor of 128; transposed data gets rows of a multiple of this
            length, filled up with zeros. Its last block may then be short.
        amax: tensorwise [] and rowwise [outer] float32: largest magnitudes if they are
            known, such as over all ranks.
        scales: the other recipes: scales to use instead of the tensor's own, laid
            out as above.
        nonfinite: "propagate": a block with Inf or NaN has a NaN scale and NaN data.
            "raise": an error instead; the host waits for the GPU.

    Returns:
        (data, scales); data is float8_e4m3fn or float8_e5m2.

    Raises:
        ValueError: an argument that cannot work, naming it: another dtype, a shape
            that the recipe's blocks do not divide, "raise" with Inf or NaN.
        TypeError: not a plain tensor.

    Source: OCP OFP8 1.0 and MX 1.0; DeepSeek-V3 (arXiv:2412.19437) for the blocks.
    """
    _check_plain("tensor", tensor)
    if nonfinite not in ("propagate", "raise"):
        raise ValueError(
            f"nonfinite: expected 'propagate' or 'raise', got {nonfinite!r}"
        )
    for name, value in (("amax", amax), ("scales", scales)):
        if value is not None:
            _check_plain(name, value)
            if nonfinite == "raise":
                _check_finite(name, value)
    if nonfinite == "raise" and tensor.dtype in (torch.float32, torch.bfloat16):
        _check_finite("tensor", tensor, _C.float8_amax(tensor))
    quantizer = _C.Float8Quantizer(recipe=recipe, format=format, rounding=rounding)
    options = _C.Float8PlaneOptions(
        axis=axis, transpose=transpose, multiple=multiple, amax=amax, scales=scales
    )
    return _C.float8_quantize(tensor, quantizer, options)


def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    recipe: str,
    *,
    axis: str = "row",
    transpose: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Returns the result of `quantize`, decoded and multiplied by its scales.

    Args:
        data, scales: from `quantize` with this recipe, axis and transpose.
        dtype: float32 or bfloat16.

    Returns:
        A tensor of data's shape: the transpose of what was quantized for axis
        "column" with `transpose`.

    Raises:
        ValueError: scales that do not belong to such data, or another dtype.
    """
    _check_plain("data", data)
    _check_plain("scales", scales)
    options = _C.Float8DequantizeOptions(axis=axis, transpose=transpose, dtype=dtype)
    return _C.float8_dequantize(data, scales, recipe, options)


def amax(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude of a float32 or bfloat16 tensor: float32 [].

    NaN when there is one. Over ranks reduce `amax(t).view(torch.int32)` with MAX:
    bits of magnitudes order as magnitudes do, and NaN comes last.
    """
    _check_plain("tensor", tensor)
    return _C.float8_amax(tensor)


def swizzle_mx_scales(scales: torch.Tensor) -> torch.Tensor:
    """Returns E8M0 scales [outer, blocks] in the order of cuBLASLt on sm_100: tiles of
    128 x 4, padded with zeros. Shape [tiles * 512]."""
    _check_plain("scales", scales)
    return _C.float8_swizzle_mx_scales(scales)


def transpose(data: torch.Tensor) -> torch.Tensor:
    """Returns the contiguous transpose of a tensor [rows, columns] whose elements are
    bytes."""
    _check_plain("data", data)
    return _C.float8_transpose(data)


def _check_plain(name, value):
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{name}: expected a torch.Tensor, got {type(value).__name__}; of a "
            "DTensor give to_local() or full_tensor(), of another subclass the plain "
            "tensor inside it"
        )


def _check_finite(name, value, largest=None):
    if largest is None:
        largest = value.float().abs().max()
    if not bool(torch.isfinite(largest)):
        raise ValueError(
            f"{name}: expected finite numbers, got {largest.item()}; "
            "nonfinite='propagate' makes NaN of their blocks"
        )
