"""Parameters that were sharded on the meta device: what they show until they have values,
and the ways in which they get them, also a part of a unit at a time."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flatshard
from flatshard import fully_shard
from tests.python.device import DEVICE, on_device

SIZES = ((5, 7), (7, 3), (3, 2))


def layers():
    return nn.Sequential(*(nn.Linear(a, b) for a, b in SIZES))


def on_meta(mesh, **options):
    with torch.device("meta"):
        model = layers()
    fully_shard(model[2], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def filled():
    torch.manual_seed(0)
    return on_device(layers())


def check(model):
    """It computes and trains as one process does."""
    single = filled()
    x = on_device(torch.ones(2, 5))
    for ours, theirs, options in (
        (torch.optim.SGD, torch.optim.SGD, {}),
        (flatshard.optim.AdamW, torch.optim.AdamW, {"eps": 1e-3}),
    ):
        for m, kind in ((model, ours), (single, theirs)):
            optimizer = kind(m.parameters(), lr=0.1, **options)
            m(x).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
    for p, q in zip(model.parameters(), single.parameters()):
        assert not p.is_meta and p.device.type == DEVICE
        torch.testing.assert_close(p.full_tensor(), q.detach())


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1"])
def test_they_show_the_rows_of_torch_chunk(strategy, mesh, rank, world):
    """Loaders read those rows of a file."""
    model = on_meta(mesh, strategy=strategy)
    for p in model.parameters():
        if world > 1:
            assert p.placements == (Shard(0),) and p.device_mesh == mesh
        pieces = torch.chunk(torch.empty(p.shape), world)
        rows = pieces[rank].shape[0] if rank < len(pieces) else 0
        assert p._local_tensor.shape == (rows, *p.shape[1:])
        assert p.is_meta and p.device.type == p.to_local().device.type == "meta"


def rows_of_a_file(p, value, rank, world):
    """Returns the DTensor that a loader puts in the place of `p`, from `value` in a file."""
    pieces = torch.chunk(value, world)
    rows = pieces[rank] if rank < len(pieces) else value[:0]
    assert rows.shape == p._local_tensor.shape
    return DTensor.from_local(
        rows.clone(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
    )


@pytest.mark.parametrize("whole", [False, True])
def test_values_that_are_put_in_their_place(whole, mesh, rank, world):
    model, source = on_meta(mesh), filled()
    for name, p in list(model.named_parameters()):
        value = source.get_parameter(name).detach()
        if whole:
            value = distribute_tensor(value, p.device_mesh, p.placements)
        else:
            value = rows_of_a_file(p, value, rank, world)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(value))
    x = on_device(torch.ones(1, 5))
    torch.testing.assert_close(model(x), source(x))
    assert all(p.device.type == DEVICE for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # asks for the device
    model(x).sum().backward()
    optimizer.step()


def fill(part, prefix):
    source = filled()
    for name, p in part.named_parameters(prefix=prefix):
        with torch.no_grad():
            value = source.get_parameter(name).detach()
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements))


def test_a_part_gets_memory(mesh, rank):
    """A layer of a unit, then another, then a unit inside."""
    model = on_meta(mesh)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # it keeps them
    for number, layer in enumerate(model):
        with pytest.raises(RuntimeError, match=f"meta device: .*'{number}.weight'"):
            model(on_device(torch.ones(1, 5)))
        assert layer.weight.is_meta
        layer.to_empty(device=DEVICE)
        assert not layer.weight.is_meta
        assert all(m.weight.is_meta for m in model[number + 1 :])
        fill(layer, str(number))
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    check(model)


def test_a_unit_without_those_inside_gets_memory(mesh, rank):
    model = on_meta(mesh)
    model.to_empty(device=DEVICE, recurse=False)  # it has no parameters itself
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device=DEVICE)
    fill(model, "")
    check(model)


@pytest.mark.parametrize("loads", ["all", "layers"])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(loads, assign, mesh, rank):
    model = on_meta(mesh)
    source = fully_shard(filled(), mesh=mesh)
    state = source.state_dict()
    if loads == "all":
        model.load_state_dict(state, assign=assign)
    else:
        for number, layer in enumerate(model):
            own = {
                name.partition(".")[2]: value
                for name, value in state.items()
                if name.startswith(f"{number}.")
            }
            layer.load_state_dict(own, assign=assign)
            assert all(p.is_meta for p in model[number + 1 :].parameters())
    check(model)


def test_a_state_dict_of_a_part_leaves_the_rest_on_meta(mesh, rank):
    model = on_meta(mesh)
    state = fully_shard(filled(), mesh=mesh).state_dict()
    state.pop("1.bias")
    model.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r"still on meta device: \['1.bias'\]"):
        model(on_device(torch.ones(1, 5)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_dtype(when, mesh, rank):
    model = on_meta(mesh)
    if when == "before":
        model.to(torch.float64)
        assert all(p.is_meta for p in model.parameters())
    model.to_empty(device=DEVICE)
    fill_double = filled().double().state_dict()
    if when == "after":
        model.to(torch.float64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(fill_double[name], p.device_mesh, p.placements))
    x = on_device(torch.ones(1, 5, dtype=torch.float64))
    torch.testing.assert_close(model(x), filled().double()(x))


@pytest.mark.parametrize("make", [torch.optim.AdamW, flatshard.optim.AdamW])
def test_optimizers_that_are_made_first(make, mesh, rank):
    model, single = on_meta(mesh), filled()
    optimizers = [
        make(model.parameters(), lr=0.1, eps=1e-3),
        torch.optim.AdamW(single.parameters(), lr=0.1, eps=1e-3),
    ]
    model.to_empty(device=DEVICE)
    fill(model, "")
    x = on_device(torch.ones(2, 5))
    for _ in range(2):
        for m, optimizer in zip((model, single), optimizers):
            m(x).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
    for p, q in zip(model.parameters(), single.parameters()):
        torch.testing.assert_close(p.full_tensor(), q.detach())


@pytest.mark.parametrize("how", ["half", "to"])
def test_a_layer_of_a_unit_changes_its_dtype(how, mesh, rank):
    """Also with values."""
    model = fully_shard(filled(), mesh=mesh)
    layer = model[1].half() if how == "half" else model[1].to(torch.float16)
    assert (
        layer.weight.dtype == torch.float16 and model[0].weight.dtype == torch.float32
    )
    torch.testing.assert_close(
        layer.weight.full_tensor(), filled()[1].weight.half().detach()
    )
    model[1].float()
    single = filled()
    single[1].half().float()
    x = on_device(torch.ones(2, 5))
    model(x).square().mean().backward()
    single(x).square().mean().backward()
    for p, q in zip(model.parameters(), single.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
