"""Parameters and modules that are replaced after fully_shard: accepted where FSDP2
accepts them, otherwise an error names them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flatshard
from flatshard import checkpoint, fully_shard
from tests.python.device import DEVICE, on_device
from tests.python.sum_order import SMALL_MODEL
from tests.python.training import distance, full_state

DIM = 6


def two_linears():
    torch.manual_seed(0)
    return on_device(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))


def values(scale=0.1):
    return scale * on_device(torch.arange(float(DIM * DIM))).view(DIM, DIM).cos()


def rows(tensor, mesh):
    return distribute_tensor(tensor, mesh, [Shard(0)])


def steps(model, rank, kind=torch.optim.SGD, num=2):
    """Outputs, the first before any step; the optimizer is made now."""
    optimizer = kind(model.parameters(), lr=0.1)
    x = on_device(torch.randn(3, DIM, generator=torch.Generator().manual_seed(rank)))
    outputs = []
    for _ in range(num):
        output = model(x)
        outputs.append(output.detach())
        output.square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    return outputs


def set_weight(model, mesh):
    model[0].weight = nn.Parameter(rows(values(), mesh))


def load_child(model, mesh):
    state = {"weight": rows(values(), mesh), "bias": rows(values()[0], mesh)}
    model[0].load_state_dict(state, assign=True)


def tie(model, mesh):
    model[1].weight = model[0].weight


def set_both(model, mesh):
    model[0].weight = model[1].weight = nn.Parameter(rows(values(), mesh))


def swap(model, mesh):
    model[0].weight, model[1].weight = model[1].weight, model[0].weight


def leave_out(model, mesh):
    model[0] = nn.Identity()


@pytest.mark.parametrize(
    "change", [set_weight, load_child, tie, set_both, swap, leave_out]
)
def test_taken_like_fsdp2(change, mesh, rank):
    results = []
    for function in (fully_shard, fsdp2):
        model = function(two_linears(), mesh=mesh)
        change(model, mesh)
        outputs = steps(model, rank)
        results.append((outputs, full_state(model)))
    (ours, state), (theirs, other) = results
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)
    assert distance(state, other) < SMALL_MODEL


def test_load_of_a_child_after_a_step(mesh, rank):
    results = []
    for function in (fully_shard, fsdp2):
        model = function(two_linears(), mesh=mesh)
        steps(model, rank, num=1)
        load_child(model, mesh)
        results.append(steps(model, rank))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "name, strategy", [("hsdp", "optim_grads_params"), ("", "optim")]
)
def test_taken_with_the_placements_of_the_strategy(name, strategy, request, mesh, rank):
    mesh = request.getfixturevalue("mesh_2d") if name == "hsdp" else mesh
    model = fully_shard(two_linears(), mesh=mesh, strategy=strategy)
    kinds = [
        Shard(0) if p.is_shard() else Replicate() for p in model[0].weight.placements
    ]
    mine = nn.Parameter(distribute_tensor(values(), mesh, kinds))
    model[0].weight = mine
    steps(model, rank)
    assert model[0].weight is mine
    assert not torch.equal(mine.full_tensor(), values())  # it was trained


@pytest.mark.parametrize("seen", [False, True])
def test_pieces_with_the_placements_of_the_shard(seen, mesh, rank):
    """`seen`: torch has cached the result of operations on Shard(0). It uses that for
    the placements of shards because they equal Shard(0)."""
    model = two_linears()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if seen:
        for p in model.parameters():
            nn.Parameter(rows(p.full_tensor().detach(), mesh))
    expected = {name: 2 * p.full_tensor() for name, p in model.named_parameters()}
    for name, p in list(model.named_parameters()):
        layer, attribute = name.split(".")
        piece = DTensor.from_local(
            2 * p.to_local().detach(),
            p.device_mesh,
            p.placements,
            shape=p.shape,
            stride=p.stride(),
        )
        setattr(model.get_submodule(layer), attribute, nn.Parameter(piece))
    model(on_device(torch.ones(1, DIM)))
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), expected[name]), name


def test_a_sharded_parameter_of_another_model_is_taken_as_values(mesh, rank):
    model, other = (fully_shard(two_linears(), mesh=mesh) for _ in range(2))
    with torch.no_grad():
        other[0].weight.mul_(2)
    model.load_state_dict(other.state_dict(keep_vars=True), assign=True)
    model[1].weight = nn.Parameter((other[1].weight * 3).detach())
    steps(model, rank, num=1)
    assert model[0].weight is not other[0].weight
    state = {n: p.full_tensor() for n, p in other.named_parameters()}
    single = two_linears()
    single.load_state_dict({**state, "1.weight": 3 * state["1.weight"]})
    steps(other, rank, num=1)
    x = on_device(torch.ones(1, DIM))
    fresh = fully_shard(two_linears(), mesh=mesh)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), model(x))


def test_parameters_on_meta_get_values(mesh, rank):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    fully_shard(model, mesh=mesh)
    for layer in model:
        state = {"weight": rows(values(), mesh), "bias": rows(values()[0], mesh)}
        layer.load_state_dict(state, assign=True)
    single = two_linears()
    for layer in single:
        layer.load_state_dict({"weight": values(), "bias": values()[0]})
    x = on_device(torch.ones(1, DIM))
    torch.testing.assert_close(model(x), single(x))


@pytest.mark.parametrize("change", [tie, leave_out])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, flatshard.optim.AdamW])
def test_checkpoints_know_what_is_left(change, kind, folder, mesh, rank):
    """They load into a model that was made so."""
    model = fully_shard(two_linears(), mesh=mesh)
    change(model, mesh)
    optimizer = kind(model.parameters(), lr=0.1)
    x = on_device(torch.ones(1, DIM))
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    checkpoint.save(folder, 2, model, optimizer)
    other = two_linears()
    change(other, mesh)
    fully_shard(other, mesh=mesh)
    loaded = kind(other.parameters(), lr=0.1)
    checkpoint.load(folder, other, loaded)
    assert distance(full_state(model), full_state(other)) == 0
    assert (
        distance(
            full_state(model),
            full_state(fully_shard_again(model, mesh, change, folder, kind)),
        )
        == 0
    )
    for m, o in ((model, optimizer), (other, loaded)):
        m(x).square().mean().backward()
        o.step()
    assert distance(full_state(model), full_state(other)) < SMALL_MODEL


def fully_shard_again(model, mesh, change, folder, kind):
    """Changed after fully_shard as `model` was, and loaded before any forward."""
    again = fully_shard(two_linears(), mesh=mesh)
    change(again, mesh)
    checkpoint.load(folder, again, kind(again.parameters(), lr=0.1))
    return again


REFUSED = {
    "plain": (
        lambda mesh: values(),
        "0.weight .*by a plain tensor, expected a DTensor",
    ),
    "shape": (
        lambda mesh: rows(values()[:2], mesh),
        r"shape \(2, 6\), expected \(6, 6\)",
    ),
    "columns": (
        lambda mesh: distribute_tensor(values(), mesh, [Shard(1)]),
        r"placements .Shard.dim=1.,., expected .Shard.0",
    ),
    "meta": (
        lambda mesh: rows(torch.empty(DIM, DIM, device="meta"), mesh),
        "device meta, expected",
    ),
    "whole": (
        lambda mesh: distribute_tensor(values(), mesh, [Replicate()]),
        r"placements .Replicate.*, expected .Shard.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name, mesh, rank, world):
    if world == 1 and name in ("columns", "whole"):
        pytest.skip("on one rank every placement is all of it")
    make, problem = REFUSED[name]
    model = fully_shard(two_linears(), mesh=mesh)
    before = full_state(model)
    shard = model[0].weight
    model[0].weight = nn.Parameter(make(mesh))
    for _ in range(2):  # it is not forgotten
        with pytest.raises(ValueError, match=problem):
            model(on_device(torch.ones(1, DIM)))
    model[0].weight = shard
    steps(model, rank, num=1)
    assert distance(full_state(model), before) > 0


def test_other_changes_are_named(mesh, rank):
    x = on_device(torch.ones(1, DIM))

    def refused(change, problem, kind=ValueError, first=False, inner=False):
        model = two_linears()
        if inner:
            fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if first:
            model(x)
        change(model)
        with pytest.raises(kind, match=problem):
            model(x)

    def untie(model):
        model[1].weight = model[0].weight
        model.to(x.device)
        model.load_state_dict(model.state_dict())
        assert model[1].weight is model[0].weight  # the tie is as it was
        model[1].bias = None
        model[0] = nn.Linear(DIM, DIM)

    problem = "1.weight of unit root was .* by parameter 0.weight of unit 0"
    refused(lambda m: tie(m, mesh), problem, inner=True)
    refused(
        lambda m: set_weight(m, mesh),
        "0.weight was replaced after the first",
        RuntimeError,
        True,
    )
    refused(
        lambda m: setattr(m[1], "bias", None),
        "1.bias was removed after",
        RuntimeError,
        True,
    )
    refused(
        lambda m: m.__setitem__(0, nn.Linear(DIM, DIM)),
        "0.weight was added .*not sharded",
        RuntimeError,
    )
    refused(
        lambda m: m.register_parameter("more", nn.Parameter(x)),
        "parameter more was added",
        RuntimeError,
    )
    refused(untie, "0.weight was added", RuntimeError)


def same_object(model, mesh):
    model[0].weight = model[1].weight = nn.Parameter(rows(values(), mesh))


def same_memory(model, mesh):
    value = rows(values(), mesh)
    model[0].weight, model[1].weight = nn.Parameter(value), nn.Parameter(value)


def memory_of_a_shard(model, mesh):
    model[1].weight = nn.Parameter(model[0].weight.detach())


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("change", [same_object, same_memory, memory_of_a_shard])
def test_ties_of_two_units_are_named(change, meta, mesh, rank):
    """Each unit would have a copy, and one of them would stay as it is."""
    if meta and change is memory_of_a_shard:
        pytest.skip("it has no values to share")
    with torch.device("meta" if meta else DEVICE):
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    fully_shard(model[0], mesh=mesh), fully_shard(model, mesh=mesh)
    change(model, mesh)
    with pytest.raises(ValueError) as error:
        model(on_device(torch.ones(1, DIM)))
    for part in ("0.weight of unit 0", "1.weight of unit root", "wrap one module"):
        assert part in str(error.value)


def test_pieces_of_one_tensor_are_no_tie(mesh, rank):
    """Loaders split one tensor into parameters."""
    model = two_linears()
    fully_shard(model[0], mesh=mesh), fully_shard(model, mesh=mesh)
    pieces = [layer.weight.to_local().numel() for layer in model]
    if mesh.size() > 1:
        pieces = [torch.chunk(values(), mesh.size())[rank].numel()] * 2
    flat = on_device(torch.arange(float(sum(pieces)))).split(pieces)
    for layer, piece in zip(model, flat):
        own = DTensor.from_local(piece.view(-1, DIM), mesh, [Shard(0)])
        layer.weight = nn.Parameter(own)
    before = [layer.weight.full_tensor().clone() for layer in model]
    steps(model, rank, num=1)
    assert not any(
        torch.equal(a, m.weight.full_tensor()) for a, m in zip(before, model)
    )


def averaged(parameter, world):
    """Reduces the gradients of a parameter outside the package."""

    def hook(p):
        dist.all_reduce(p.grad)
        p.grad /= world

    parameter.register_post_accumulate_grad_hook(hook)


def test_new_parameters_whose_gradients_the_caller_reduces(mesh, rank, world):
    """As adapters that are attached to a sharded model."""
    outputs = []
    for function in (fully_shard, fsdp2):
        model = function(two_linears().requires_grad_(False), mesh=mesh)
        torch.manual_seed(1)
        model.append(on_device(nn.Linear(DIM, DIM)))
        for p in model[2].parameters():
            averaged(p, world)
        outputs.append(steps(model, rank, num=3))
    torch.testing.assert_close(*outputs)
    assert not torch.equal(outputs[0][0], outputs[0][2])


def test_new_modules_that_are_sharded_or_frozen_or_ignored_run(mesh, rank):
    model = fully_shard(two_linears(), mesh=mesh)
    model[0] = fully_shard(on_device(nn.Linear(DIM, DIM)), mesh=mesh)
    model.append(on_device(nn.Linear(DIM, DIM)).requires_grad_(False))
    steps(model, rank, num=1)
    kept = two_linears()
    fully_shard(kept, mesh=mesh, ignored_params=set(kept[1].parameters()))
    steps(kept, rank, num=1)


def test_whole_state_dicts_say_what_to_call(mesh):
    model = fully_shard(nn.Sequential(two_linears()), mesh=mesh)
    state = {f"0.{name}": t for name, t in two_linears().state_dict().items()}
    for module, own in ((model, state), (model[0], two_linears().state_dict())):
        problem = (
            "load_state_dict: (0.)?0.weight is a full tensor.*set_model_state_dict"
        )
        with pytest.raises(ValueError, match=problem):
            module.load_state_dict(own)
        module.load_state_dict(own, assign=True)  # takes this rank's rows
    assert distance(full_state(model), state) == 0
    child = model[0][0]
    del model, module
    child.load_state_dict(child.state_dict())
