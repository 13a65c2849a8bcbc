"""Copies of sharded modules, parameters, optimizers and state dicts, as FSDP2 has them."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    update_bn,
)

import flatshard

from tests.python.device import on_device

LIBRARIES = (flatshard, fsdp2)


def small_model():
    torch.manual_seed(0)
    layers = nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)
    return on_device(nn.Sequential(*layers))


def shard(library, model, mesh, **options):
    for layer in (model[0], model[2]):
        library.fully_shard(layer, mesh=mesh, **options)
    return library.fully_shard(model, mesh=mesh, **options)


def train(model, optimizer, rank, steps=3, after=lambda: None):
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(
            on_device(torch.randn(4, 7, generator=generator))
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def whole(values):
    return [v.full_tensor() if isinstance(v, DTensor) else v.clone() for v in values]


# -- averages (EMA) ----------------------------------------------------------------------


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_model_that_was_made_before_sharding(use_buffers, mesh, rank):
    found = []
    for library in LIBRARIES:
        model = small_model()
        # FSDP2 fails where foreach gets shards and buffers together.
        if use_buffers and library is fsdp2:
            average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)
        else:
            function = get_ema_multi_avg_fn(0.9)
            average = AveragedModel(
                model, multi_avg_fn=function, use_buffers=use_buffers
            )
        shard(library, model, mesh)
        shard(library, average.module, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, rank, after=lambda: average.update_parameters(model))
        average.eval()
        outputs = [average(on_device(torch.ones(2, 7))).detach()]
        found.append(whole([*average.parameters(), *average.buffers()]) + outputs)
        if library is flatshard:
            ours = average
    torch.testing.assert_close(*found)
    update_bn([on_device(torch.randn(3, 7)) for _ in range(2)], ours)


def test_averaged_model_of_a_sharded_one_is_refused(mesh):
    model = shard(flatshard, small_model(), mesh)
    with pytest.raises(AssertionError, match=r"AveragedModel\(model\) does so"):
        AveragedModel(model)


@pytest.mark.parametrize("kind", ["clones", "deepcopy", "state_dict"])
def test_averages_of_shards(kind, mesh, rank):
    found = []
    for library in LIBRARIES:
        model = shard(library, small_model(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "clones":
            averages = {n: p.detach().clone() for n, p in model.named_parameters()}
        elif kind == "deepcopy":
            averages = copy.deepcopy(dict(model.named_parameters()))
            assert all(isinstance(p, nn.Parameter) for p in averages.values())
        else:
            averages = copy.deepcopy(model.state_dict())

        @torch.no_grad()
        def update():
            for name, value in model.state_dict().items():
                if name in averages and value.is_floating_point():
                    averages[name].lerp_(value, 0.1)

        train(model, optimizer, rank, after=update)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(averages, strict=kind == "state_dict")
        model.eval()
        output = model(on_device(torch.ones(2, 7))).detach()
        model.load_state_dict(kept)
        found.append([output, *whole(averages.values()), *whole(kept.values())])
    torch.testing.assert_close(*found)


# -- deep copies -------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["root", "unit", "around"])
def test_deep_copies_of_modules_are_refused(which, mesh):
    for library in LIBRARIES:
        model = small_model()
        library.fully_shard(model[0], mesh=mesh)
        if which == "root":
            library.fully_shard(model, mesh=mesh)
        copied = model[0] if which == "unit" else model
        with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
            copy.deepcopy(copied)


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
@pytest.mark.parametrize("dim", [0, 1])
def test_deep_copies_of_parameters_have_what_these_have(strategy, dim, mesh):
    model = on_device(nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 4)))
    if dim:
        flatshard.fully_shard(model, mesh=mesh, shard_placement_fn=_columns)
    else:
        flatshard.fully_shard(model, mesh=mesh, strategy=strategy)
    model[1].requires_grad_(False)
    model[0].weight.note = ["a note"]
    model(on_device(torch.ones(2, 12))).sum().backward()
    for parameter in model.parameters():
        copied = copy.deepcopy(parameter)
        assert type(copied) is type(parameter) and isinstance(copied, nn.Parameter)
        assert copied.requires_grad == parameter.requires_grad
        torch.testing.assert_close(whole([copied]), whole([parameter]), rtol=0, atol=0)
        assert (copied.grad is None) == (parameter.grad is None)
        if copied.grad is not None:
            grads = whole([copied.grad]), whole([parameter.grad])
            torch.testing.assert_close(*grads, rtol=0, atol=0)
        # Only the piece, not the unit's flat memory.
        local = copied.to_local()
        assert local.untyped_storage().nbytes() == local.nbytes
    copied = copy.deepcopy(model[0].weight)
    assert copied.note == ["a note"] and copied.note is not model[0].weight.note
    with torch.no_grad():
        copied.zero_()
    assert whole([model[0].weight])[0].abs().sum() > 0


def _columns(parameter):
    return Shard(1) if parameter.dim() == 2 else None


@pytest.mark.parametrize(
    "library, way",
    # FSDP2 has hooks that cannot be pickled.
    [(flatshard, "deepcopy"), (flatshard, "pickle"), (fsdp2, "deepcopy")],
)
def test_a_layer_of_a_unit_is_copied_without_the_unit(library, way, mesh):
    model = library.fully_shard(small_model(), mesh=mesh)
    model(on_device(torch.ones(2, 7))).sum().backward()
    model.zero_grad()
    if library is fsdp2:
        model.reshard()  # its parameters() are unsharded after a forward
    for i, layer in enumerate(model):
        if way == "deepcopy":
            copied = copy.deepcopy(layer)
        else:
            copied = pickle.loads(pickle.dumps(layer))
        assert type(copied) is (nn.BatchNorm1d if i == 1 else nn.Linear)
        kept = layer.state_dict()
        torch.testing.assert_close(
            whole(copied.state_dict().values()), whole(kept.values()), rtol=0, atol=0
        )
        copied.load_state_dict(kept)
        with torch.no_grad():
            copied.weight.zero_()
        assert whole([layer.weight])[0].abs().sum() > 0


def test_shallow_copies_are_the_same_unit(mesh, rank):
    found = []
    for library in LIBRARIES:
        model = shard(library, small_model(), mesh)
        copied = copy.copy(model)
        assert copied is not model and copied[0] is model[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(copied, optimizer, rank, steps=2)
        train(model, optimizer, rank, steps=1)
        found.append(whole(model.state_dict().values()))
    torch.testing.assert_close(*found)


# -- optimizers --------------------------------------------------------------------------


def test_deep_copies_of_optimizers(mesh, rank):
    found = []
    for library in LIBRARIES:
        model = shard(library, small_model(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, rank, steps=1)
        copied = copy.deepcopy(optimizer)
        kept = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, rank, steps=1)
        optimizer.load_state_dict(kept)
        train(model, optimizer, rank, steps=1)
        parameters = [p for group in copied.param_groups for p in group["params"]]
        assert parameters[0] is not model[0].weight
        states = [v for state in copied.state.values() for v in state.values()]
        found.append(whole([*parameters, *states, *model.parameters()]))
    torch.testing.assert_close(*found)


# -- pickling ----------------------------------------------------------------------------


@pytest.mark.parametrize("save", [pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
def test_modules_are_not_pickled(save, mesh):
    model = shard(flatshard, small_model(), mesh)
    with pytest.raises(TypeError, match=r"save the module's state_dict\(\), by torch"):
        save(model)
    with pytest.raises(pickle.PicklingError):
        save(shard(fsdp2, small_model(), mesh))


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_and_gradients_are_pickled(dim, mesh):
    model = on_device(nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 4)))
    flatshard.fully_shard(
        model, mesh=mesh, shard_placement_fn=_columns if dim else None
    )
    model(on_device(torch.ones(2, 12))).sum().backward()
    for parameter in model.parameters():
        again = pickle.loads(pickle.dumps(parameter))
        assert isinstance(again, nn.Parameter) and again.requires_grad
        torch.testing.assert_close(whole([again]), whole([parameter]), rtol=0, atol=0)
        grad = pickle.loads(pickle.dumps(parameter.grad))
        torch.testing.assert_close(
            whole([grad]), whole([parameter.grad]), rtol=0, atol=0
        )
