"""Beside torchao: the same bytes, losses that go together, and its weights by name.

pip install --no-deps torchao==0.18.0
scripts/run_python_tests 2 tests/python/torchao_test.py
"""

import copy

import pytest
import torch
from torch import nn

from flatshard import float8
from tests.python.device import on_device
from tests.python.float8_models import BF16, DIM, HIDDEN, Mlp, policy, shard, train
from tests.python.options import fully_shard

torchao = pytest.importorskip("torchao", reason="wants torchao")

from torchao.float8 import (  # noqa: E402
    Float8LinearConfig,
    convert_to_float8_training,
)
from torchao.float8.config import ScalingGranularity  # noqa: E402
from torchao.float8.float8_scaling_utils import (  # noqa: E402
    hp_tensor_to_float8_dynamic,
)
from torchao.float8.float8_training_tensor import LinearMMConfig  # noqa: E402
from torchao.prototype.mx_formats import ScaleCalculationMode  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import to_mx  # noqa: E402
from torchao.quantization import Float8WeightOnlyConfig, quantize_  # noqa: E402


def weights():
    """Of models as they begin, of other sizes, with zeros and with outliers."""
    torch.manual_seed(0)
    found = [p.detach() for p in Mlp(blocks=4).parameters() if p.dim() == 2]
    found = [w for w in found if not any(n % 32 for n in w.shape)]
    spread = torch.randn(256, 512) * torch.logspace(-6, 3, 512)
    spread[3] = 0
    found += [on_device(spread), on_device(torch.zeros(32, 64))]
    return found + [w.bfloat16() for w in found]


def cast(weight, **options):
    return hp_tensor_to_float8_dynamic(
        weight, torch.float8_e4m3fn, LinearMMConfig(), **options
    )


def check_bytes(found, expected):
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_tensorwise_bytes():
    for weight in weights():
        if not weight.any():
            continue  # see test_zeros
        theirs = cast(weight)
        data, scale = float8.quantize(weight, "tensorwise")
        check_bytes(data, theirs._data)
        assert torch.equal(scale, theirs._scale.reciprocal())


def test_rowwise_bytes():
    for weight in weights():
        theirs = cast(
            weight,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=-1,
            round_scales_to_power_of_2=True,
        )
        data, scales = float8.quantize(weight, "rowwise")
        check_bytes(data, theirs._data)
        rows = weight.any(1)
        assert torch.equal(scales[rows], theirs._scale.reciprocal().flatten()[rows])


@pytest.mark.parametrize(
    "rounding, mode",
    [("up", ScaleCalculationMode.RCEIL), ("floor", ScaleCalculationMode.FLOOR)],
)
def test_mxfp8_bytes(rounding, mode):
    for weight in weights():
        scales, data = to_mx(weight, torch.float8_e4m3fn, 32, mode)
        ours = float8.quantize(weight, "mxfp8", rounding=rounding)
        filled = weight.unflatten(1, (-1, 32)).any(2)
        check_bytes(ours[0], data)
        check_bytes(ours[1][filled], scales.view_as(ours[1])[filled])


def test_zeros():
    """Scales of what holds nothing may differ; values do not."""
    weight = on_device(torch.zeros(32, 64))
    for recipe in ("tensorwise", "rowwise", "mxfp8"):
        data, scales = float8.quantize(weight, recipe)
        assert not float8.dequantize(data, scales, recipe).any()
    assert not cast(weight)._data.view(torch.uint8).any()


def with_layers_of_torchao(model, **options):
    for block in model.blocks:
        convert_to_float8_training(block, config=Float8LinearConfig(**options))
    return model


def test_losses_go_together(mesh, rank):
    """Its layers, which cast bfloat16 weights behind the gather, and FP8 weights."""
    torch.manual_seed(0)
    model = Mlp()
    theirs = with_layers_of_torchao(copy.deepcopy(model), emulate=True)
    assert type(theirs.blocks[0].up).__module__.startswith("torchao")
    found = []
    for m, fp8 in ((model, policy("tensorwise")), (theirs, None)):
        losses = train(shard(m, mesh, fp8), [rank], steps=30)
        of_ranks = [None] * mesh.size()
        torch.distributed.all_gather_object(of_ranks, losses)
        found.append([sum(step) / len(step) for step in zip(*of_ranks)])
    losses, expected = found
    assert losses == pytest.approx(expected, abs=0.01)
    assert losses[-1] < losses[0] - 0.5


def gathered_in_fp8():
    return with_layers_of_torchao(Mlp(), enable_fsdp_float8_all_gather=True)


def quantized_for_inference():
    model = Mlp()
    quantize_(model, Float8WeightOnlyConfig())
    return model


@pytest.mark.parametrize(
    "make, kind",
    [
        (gathered_in_fp8, "WeightWithDynamicFloat8CastTensor"),
        (quantized_for_inference, "Float8Tensor"),
    ],
)
@pytest.mark.parametrize("fp8", [None, policy("tensorwise")])
def test_its_weights_are_refused_by_name(make, kind, fp8, mesh):
    model = make()
    with pytest.raises(
        NotImplementedError,
        match=rf"parameter up.weight is a {kind}, .*give fp8=Float8Policy\(...\) and not "
        "torchao's",
    ):
        fully_shard(model.blocks[0], mesh=mesh, mp_policy=BF16, fp8=fp8)
    with pytest.raises(TypeError, match=f"tensor: expected a torch.Tensor, got {kind}"):
        float8.quantize(model.blocks[0].up.weight, "tensorwise")


def test_its_layers_keep_their_class(mesh):
    """And their casts: FP8 weights are not put below them."""
    layer = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM))
    convert_to_float8_training(layer, module_filter_fn=lambda m, name: name == "0")
    fully_shard(on_device(layer), mesh=mesh, mp_policy=BF16, fp8=policy("rowwise"))
    report = float8.describe(layer)
    assert set(report.float8) == {"1.weight"}
    assert report.others["0.weight"] == "Float8Linear is a subclass of nn.Linear"
