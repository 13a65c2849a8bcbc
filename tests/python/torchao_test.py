"""Compared with torchao: the same bytes, losses that go together, and errors that name
its weights.

pip install --no-deps torchao==0.18.0
scripts/run_python_tests 2 tests/python/torchao_test.py
"""

import copy

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn

from flatshard import float8
from tests.python.device import on_device
from tests.python.float8_models import BF16, DIM, HIDDEN, Mlp, policy, shard, train
from bench.harness.options import fully_shard

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
from torchao.prototype.quantized_training import (  # noqa: E402
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)
from torchao.quantization import Float8WeightOnlyConfig, quantize_  # noqa: E402
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import (  # noqa: E402
    linear_nf4,
    to_nf4,
)


def weights():
    """Yields weights of models at initialization, of other sizes, with zeros and with
    outliers."""
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
    """Scales of all-zero blocks may differ; values do not."""
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
    """Compares torchao's layers with FP8 weights. Its layers cast bfloat16 weights
    after the all-gather."""
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


def quantized_for_inference():
    model = Mlp()
    quantize_(model, Float8WeightOnlyConfig())
    return model


def test_its_weights_are_refused_by_name(mesh):
    model = quantized_for_inference()
    with pytest.raises(
        NotImplementedError,
        match=r"parameter up.weight.* is a Float8Tensor.*without fsdp_pre_all_gather.*"
        r"fp8=Float8Policy\(...\)\) and not torchao's",
    ):
        fully_shard(model.blocks[0], mesh=mesh, mp_policy=BF16)
        model.blocks[0](on_device(torch.ones(16, DIM)))
    with pytest.raises(
        TypeError, match="tensor: expected a torch.Tensor, got Float8Tensor"
    ):
        float8.quantize(model.blocks[1].up.weight, "tensorwise")


class Adapted(nn.Module):
    """QLoRA: a frozen weight in NF4, and two small ones that are trained."""

    def __init__(self, dim=512):
        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.randn(dim, dim) / 20), False)
        self.down = nn.Linear(dim, 4, bias=False)
        self.up = nn.Linear(4, dim, bias=False)

    def forward(self, x):
        return linear_nf4(x, self.weight) + self.up(self.down(x))


def test_nf4_weights_with_adapters(mesh, rank, world):
    if world == 3:
        pytest.skip("NF4 is cut in blocks, which three ranks do not divide")
    torch.manual_seed(0)
    plain = on_device(nn.Sequential(*(Adapted() for _ in range(2))))
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)
        for m in (model, plain)
    ]
    for step in range(3):
        inputs = [
            on_device(
                torch.randn(
                    2, 512, generator=torch.Generator().manual_seed(9 * step + r)
                )
            )
            for r in range(world)
        ]
        loss = model(inputs[rank]).square().mean()
        losses = [plain(x).square().mean() for x in inputs]
        torch.testing.assert_close(loss, losses[rank])
        loss.backward()
        (sum(losses) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters()):
        if p.requires_grad:
            torch.testing.assert_close(p.full_tensor(), q.detach())


@pytest.mark.parametrize(
    "config",
    [int8_weight_only_quantized_training, int8_mixed_precision_training],
    ids=["weight_only", "mixed_precision"],
)
def test_int8_weights_train_as_with_fsdp2(config, mesh, rank, world):
    if world == 1:
        pytest.skip("FSDP2 cuts nothing")
    results = []
    for shard_module in (fully_shard, fsdp2.fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(60, 60, bias=False) for _ in range(3)))
        model = on_device(model)
        quantize_(model, config())
        for layer in model:
            shard_module(layer, mesh=mesh)
        shard_module(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(9 * step + rank)
            x = on_device(torch.randn(16, 60, generator=generator))
            loss = model(x).square().mean()
            loss.backward()
            found += [loss.detach(), model[0].weight.grad.to_local()]
            torch.manual_seed(step)  # rounding is stochastic
            optimizer.step()
            optimizer.zero_grad()
        results.append(found)
    for ours, theirs in zip(*results):
        assert ours.equal(theirs)


def test_weights_that_are_gathered_in_fp8(mesh, rank, world):
    """Compares one step's losses and gradients with the same unsharded layers."""
    options = {"enable_fsdp_float8_all_gather": True, "emulate": True}
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 48, bias=False), nn.Linear(48, 48, bias=False))
    model = copy.deepcopy(plain)
    convert_to_float8_training(model, config=Float8LinearConfig(**options))
    convert_to_float8_training(plain, config=Float8LinearConfig(emulate=True))
    for layer in on_device(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    on_device(plain)
    x = on_device(torch.randn(16, 48, generator=torch.Generator().manual_seed(3)))
    for m in (model, plain):
        m(x).square().mean().backward()
    assert model(x).equal(plain(x))
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_its_layers_keep_their_class(mesh):
    """And their casts: FP8 weights are not put below them."""
    layer = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM))
    convert_to_float8_training(layer, module_filter_fn=lambda m, name: name == "0")
    fully_shard(on_device(layer), mesh=mesh, mp_policy=BF16, fp8=policy("rowwise"))
    report = float8.describe(layer)
    assert set(report.float8) == {"1.weight"}
    assert report.others["0.weight"] == "Float8Linear is a subclass of nn.Linear"
