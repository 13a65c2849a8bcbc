"""requires_grad and dtypes that change after fully_shard: before the first forward, and
between steps."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import flatshard
from flatshard import MixedPrecisionPolicy
from flatshard._fsdp import root

from bench.harness.options import fully_shard
from tests.python.training import assert_same_weights, backward_both, inputs_of

STRATEGIES = ["zero3", "zero2", "zero1", "zero0"]


def three_layers():
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 9), nn.Linear(9, 3))


def wrap(model, units="layers", **options):
    if units == "layers":
        for layer in model:
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def freeze_first(model):
    model[0].requires_grad_(False)


def swap(model):
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)


def unfreeze_all(model):
    model.requires_grad_(True)


def freeze_biases(model):
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("weight"))


@pytest.mark.parametrize("change", [freeze_first, swap, unfreeze_all, freeze_biases])
@pytest.mark.parametrize("units", ["root", "layers"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requires_grad_before_the_first_forward(
    change, units, strategy, mesh, rank, world
):
    plain = three_layers().to(mesh.device_type)
    plain[1].requires_grad_(False)
    model = copy.deepcopy(plain)
    wrap(model, units, mesh=mesh, strategy=strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    kept = list(model.parameters())
    change(model)
    change(plain)
    inputs = inputs_of(world, 2, 5)
    for _ in range(3):
        backward_both(model, plain, inputs, rank)
        for (name, p), q in zip(plain.named_parameters(), model.parameters()):
            assert (p.grad is None) == (q.grad is None), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for old, p, q in zip(kept, plain.parameters(), model.parameters()):
        assert old is q
        assert q.requires_grad == p.requires_grad
    assert_same_weights(model, plain)


# The trained parameters in each of four steps, as in progressive unfreezing and with
# adapters.
PLANS = {
    "freeze": [(0, 1, 2), (1, 2), (2,), ()],
    "unfreeze": [(2,), (1, 2), (0, 1, 2), (0, 1)],
    "in_turns": [(0,), (1,), (0,), (1, 2)],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("units", ["root", "layers"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requires_grad_between_steps(plan, units, strategy, mesh, rank, world):
    plain = three_layers().to(mesh.device_type)

    def train(model, layers):
        for i, layer in enumerate(model):
            layer.requires_grad_(i in layers)

    train(plain, PLANS[plan][0])
    model = copy.deepcopy(plain)
    wrap(model, units, mesh=mesh, strategy=strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    kept = list(model.parameters())
    inputs = inputs_of(world, 2, 5)
    for layers in PLANS[plan]:
        train(model, layers)
        train(plain, layers)
        loss = model(inputs[rank]).square().mean()
        assert loss.requires_grad == bool(layers)
        if layers:
            loss.backward()
            (sum(plain(x).square().mean() for x in inputs) / world).backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters()):
            assert (p.grad is None) == (q.grad is None), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for old, p, q in zip(kept, plain.parameters(), model.parameters()):
        assert old is q
    assert_same_weights(model, plain)


def test_an_unfrozen_parameter_is_trained_in_its_own_dtype(mesh, rank):
    model = three_layers().to(mesh.device_type)
    model[0].requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    weight = model[0].weight
    x = torch.ones(1, 5, device=mesh.device_type)
    model(x).float().sum().backward()
    assert weight.dtype == torch.bfloat16 and weight.grad is None
    weight.requires_grad_(True)
    model(x).float().sum().backward()
    assert model[0].weight is weight
    assert weight.dtype == weight.grad.dtype == torch.float32
    assert model[0].bias.grad is None


def test_setters_and_hooks_survive_a_parameter_that_is_unfrozen(mesh, rank, world):
    model = three_layers().to(mesh.device_type)
    model[0].requires_grad_(False)
    fully_shard(model, mesh=mesh)
    seen = []
    model.set_gradient_divide_factor(2.0 * world)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()))
    model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append("bias"))
    x = torch.ones(1, 5, device=mesh.device_type)
    grads = []
    for _ in range(2):
        model(x).sum().backward()
        grads.append(model[2].bias.grad.full_tensor())
        model.zero_grad()
        model[0].requires_grad_(True)
    assert grads[0].equal(grads[1]) and grads[0].eq(0.5).all()
    assert seen.count("bias") == 2 and len(seen) == 5


def test_models_whose_frozen_parameters_stay_frozen(mesh, rank):
    class Fused(nn.Linear):
        fuse_wgrad_accumulation = True

    model = nn.Sequential(Fused(5, 7), nn.Linear(7, 3)).to(mesh.device_type)
    model[1].requires_grad_(False)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(1, 5, device=mesh.device_type)
    model(x)
    model[1].requires_grad_(True)
    with torch.no_grad():
        model(x)  # follows nothing
    with pytest.raises(
        NotImplementedError, match="unfrozen.* where modules write to m"
    ):
        model(x)
    model[1].requires_grad_(False)
    model(x)


def test_the_cores_optimizer_names_a_parameter_that_was_frozen(mesh, rank):
    model = fully_shard(three_layers().to(mesh.device_type), mesh=mesh)
    optimizer = flatshard.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 5, device=mesh.device_type)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(False)
    model(torch.ones(1, 5, device=mesh.device_type)).sum().backward()
    with pytest.raises(NotImplementedError, match="parameter 0.weight .* was frozen"):
        optimizer.step()


@pytest.mark.parametrize("frozen", ["at first", "in an evaluation", "in a step"])
def test_the_cores_optimizer_is_made_after_an_unfreezing(frozen, mesh, rank, world):
    plain = three_layers().to(mesh.device_type)
    if frozen == "at first":
        plain[1].requires_grad_(False)
    model = copy.deepcopy(plain)
    wrap(model, mesh=mesh)
    x = torch.ones(2, 5, device=mesh.device_type)
    if frozen != "at first":
        # peft's disable_adapter() does the same.
        model[1].requires_grad_(False)
        with torch.set_grad_enabled(frozen == "in a step"):
            y = model(x)
        if frozen == "in a step":
            y.sum().backward()
            model.zero_grad()
    for m, made in ((plain, torch.optim.AdamW), (model, flatshard.optim.AdamW)):
        m.requires_grad_(True)
        optimizer = made(m.parameters(), lr=0.1)
        for _ in range(2):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, plain, rtol=1e-4, atol=1e-5)


def test_adapters_that_are_disabled_in_a_first_evaluation_are_apart_from_the_base(
    mesh, rank, world
):
    plain = nn.Sequential(*[three_layers() for _ in range(2)]).to(mesh.device_type)
    plain.requires_grad_(False)
    adapters = [layers[1] for layers in plain]  # the other layers are the base
    for adapter in adapters:
        adapter.requires_grad_(True)
    model = copy.deepcopy(plain)
    wrap(model, mesh=mesh)
    x = torch.ones(2, 5, device=mesh.device_type)
    model.requires_grad_(False)
    with torch.no_grad():
        model[0](x)
    for layers in model:
        layers[1].requires_grad_(True)
    for m, made in ((plain, torch.optim.AdamW), (model, flatshard.optim.AdamW)):
        optimizer = made([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            m[0](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "convert", [lambda m: m.float(), lambda m: m.to(torch.float32)]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtypes_before_the_first_forward(convert, strategy, mesh, rank):
    plain = three_layers().to(mesh.device_type, torch.bfloat16)
    plain[0].requires_grad_(False)
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[1], mesh=mesh, strategy=strategy, mp_policy=policy)
    fully_shard(model, mesh=mesh, strategy=strategy, mp_policy=policy)
    kept = list(model.parameters())
    convert(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.ones(1, 5, device=mesh.device_type)).float().sum().backward()
    for old, (name, p), q in zip(kept, plain.named_parameters(), model.parameters()):
        assert old is q
        assert q.full_tensor().equal(p.float().detach()) or not q.requires_grad, name
        assert (q.grad is None) == (not p.requires_grad), name
        if q.grad is not None:
            assert q.dtype == q.grad.dtype == torch.float32
    optimizer.step()
    # A step that bfloat16 would round away.
    moved = model[2].bias.full_tensor() - plain[2].bias.float()
    assert (moved.abs() > 0).all()


@pytest.mark.parametrize("units", ["root", "layers"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtypes_between_steps(units, strategy, mesh, rank, world):
    model = three_layers().to(mesh.device_type)
    wrap(model, units, mesh=mesh, strategy=strategy)
    x = torch.ones(1, 5, device=mesh.device_type)
    model(x).sum().backward()
    former = [p.grad.full_tensor() for p in model.parameters()]
    kept = list(model.parameters())
    model.double()
    # Gradients are converted, as nn.Module does it, and the next are added.
    model(x.double()).sum().backward()
    for old, p, grad in zip(kept, model.parameters(), former):
        assert p is old and p.dtype == p.grad.dtype == torch.float64
        torch.testing.assert_close(p.grad.full_tensor(), 2 * grad.double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    before = model[2].bias.full_tensor().clone()
    optimizer.step()
    model(x.double())
    assert (model[2].bias.full_tensor() != before).all()


# -- options of the outermost module ---------------------------------------------------


@pytest.mark.parametrize("option", [{"prefetch": 2}, {"buffers_on_demand": False}])
def test_options_of_the_root_are_refused_inside(option, mesh):
    model = three_layers().to(mesh.device_type)
    fully_shard(model[0], mesh=mesh, **option)
    fully_shard(model, mesh=mesh)
    name = next(iter(option))
    with pytest.raises(ValueError, match=f"{name}=.* of unit 0 has no effect"):
        model(torch.ones(1, 5, device=mesh.device_type))
    same = three_layers().to(mesh.device_type)
    fully_shard(same[0], mesh=mesh, **option)
    fully_shard(same, mesh=mesh, **option)
    same(torch.ones(1, 5, device=mesh.device_type))


def test_padding_is_a_warning(mesh, rank, monkeypatch):
    model = fully_shard(three_layers().to(mesh.device_type), mesh=mesh)
    asked = []

    def describe(units, max_padding):
        asked.append(max_padding)
        return "padding is 9.8 %"

    monkeypatch.setattr(root._C, "describe_excessive_padding", describe)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(torch.ones(1, 5, device=mesh.device_type))
    texts = [str(w.message) for w in seen]
    assert asked == [0.05]
    assert ("fully_shard: padding is 9.8 %" in texts) == (rank == 0)


def test_one_row_that_no_rank_shares_is_accepted(mesh, rank):
    class Embedded(nn.Module):  # as vit_large_patch16_224
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(1, 197, 1024))
            self.head = nn.Linear(1024, 4)

        def forward(self, x):
            return self.head(x + self.positions)

    model = fully_shard(Embedded().to(mesh.device_type), mesh=mesh)
    x = torch.ones(1, 197, 1024, device=mesh.device_type)
    model(x).sum().backward()
    assert model.positions.grad is not None


def test_a_dtensor_of_another_dtype_takes_the_place_of_a_parameter(mesh, rank):
    values = torch.arange(35.0, device=mesh.device_type).view(7, 5) / 7
    model = three_layers().to(mesh.device_type, torch.bfloat16)
    fully_shard(model, mesh=mesh)
    mine = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    model[0].weight = mine
    with torch.autocast(mesh.device_type, torch.bfloat16):
        model(torch.ones(1, 5, device=mesh.device_type)).sum().backward()
    assert model[0].weight is mine and mine.grad.dtype == torch.float32
    assert mine.full_tensor().equal(values)
