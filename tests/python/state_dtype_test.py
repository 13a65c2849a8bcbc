"""flatshard.optim.AdamW with states in other formats, and stochastic rounding: results do
not depend on the mesh, and states survive state dicts and checkpoints."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import flatshard
from flatshard import ShardOptions, checkpoint, fully_shard
from tests.python.device import DEVICE, on_device
from tests.python.training import full_state

INT8 = {"state_dtype": torch.int8}
TOKENS, DIM, HIDDEN = 96, 64, 96


class Net(nn.Module):
    """Matrices with int8 states, some with rows that split blocks, and parameters that
    keep float32: an embedding, and small ones."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.head = nn.Linear(DIM, TOKENS, bias=False)
        on_device(self)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(x)


@pytest.fixture
def one():
    """A mesh of this rank."""
    world = dist.get_world_size()
    return init_device_mesh(DEVICE, (world, 1), mesh_dim_names=("all", "one"))["one"]


def sharded(mesh, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = Net().to(dtype)
    fully_shard(model.up, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def adamw(parameters, kind=flatshard.optim.AdamW, **options):
    return kind(parameters, **{"lr": 1e-2, "weight_decay": 0.1, **options})


def made(mesh, dtype=torch.float32, **options):
    model = sharded(mesh, dtype)
    return model, adamw(model.parameters(), **options)


def groups_of(model):
    """Several formats within a unit."""
    own = dict(model.named_parameters())
    names = {
        torch.int8: ["up.weight", "head.weight"],
        torch.bfloat16: ["down.weight", "embed.weight"],
    }
    groups = [
        {"params": [own.pop(n) for n in of], "state_dtype": dtype, "lr": 2e-2}
        for dtype, of in names.items()
    ]
    return [*groups, {"params": list(own.values()), "weight_decay": 0.0}]


def train(model, optimizer, steps):
    """All ranks have the same batch, so means over 2 and 4 ranks are exact."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(TOKENS, (2, 16), generator=generator)
        model(on_device(tokens)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values_of(optimizer):
    """Returns full states by parameter and name, as a state dict has them."""
    return {
        (number, name): value.full_tensor() if hasattr(value, "full_tensor") else value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def codes_of(optimizer):
    """Returns this rank's codes by parameter and name."""
    return {
        (number, name): value.to_local().clone()
        for number, state in enumerate(optimizer.state.values())
        for name, value in state.items()
        if name != "step"
    }


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert value.dtype == b[key].dtype and torch.equal(value, b[key]), key


def skip_inexact_means():
    if dist.get_world_size() not in (1, 2, 4):
        pytest.skip("means over this number of ranks are not exact")


@pytest.mark.parametrize("kind", ["int8", "bfloat16", "groups", "rounding"])
def test_ranks_equal_one(kind, mesh, one):
    skip_inexact_means()

    def run(mesh):
        if kind == "groups":
            model = sharded(mesh)
            optimizer = adamw(groups_of(model))
        elif kind == "rounding":
            model, optimizer = made(
                mesh, torch.bfloat16, **INT8, stochastic_rounding=True, rounding_seed=3
            )
        else:
            model, optimizer = made(mesh, state_dtype=getattr(torch, kind))
        train(model, optimizer, range(4))
        return full_state(model), values_of(optimizer)

    (weights, states), (weights_of_one, states_of_one) = run(mesh), run(one)
    assert_same(weights, weights_of_one)
    assert_same(states, states_of_one)


def test_formats(mesh):
    model, optimizer = made(mesh, **INT8)
    expected = {"up.weight", "down.weight", "head.weight"}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        dtypes = state["exp_avg"].dtype, state["exp_avg_sq"].dtype
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        if name in expected:
            assert dtypes == (torch.int8, torch.uint8), name
        else:
            assert dtypes == (torch.float32, torch.float32), name
        assert state["exp_avg"].to_local().shape == parameter.to_local().shape


def test_updates_are_near_those_of_float32(mesh):
    start, _ = made(mesh)
    start = full_state(start)
    results = []
    for options in ({}, {"state_dtype": torch.bfloat16}, INT8):
        model, optimizer = made(mesh, **options)
        train(model, optimizer, range(10))
        moved = [(t - start[n]).flatten() for n, t in full_state(model).items()]
        results.append(torch.cat(moved))
    for other in results[1:]:
        assert 0 < (other - results[0]).norm() < 0.05 * results[0].norm()


def test_state_dicts(mesh):
    """The values of int8 states become the same codes again. torch.optim.AdamW reads
    them."""
    model, optimizer = made(mesh, **INT8)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    codes = codes_of(optimizer)
    assert all(
        value.dtype == torch.float32
        for state in saved["state"].values()
        for value in state.values()
    )
    again, of_again = made(mesh, **INT8)
    again.load_state_dict(model.state_dict())
    of_again.load_state_dict(saved)
    assert_same(codes_of(of_again), codes)
    train(model, optimizer, range(3, 5))
    train(again, of_again, range(3, 5))
    assert_same(full_state(again), full_state(model))
    assert_same(codes_of(of_again), codes_of(optimizer))

    other, torchs = made(mesh, kind=torch.optim.AdamW)
    torchs.load_state_dict(saved)
    for state, parameter in zip(saved["state"].values(), other.parameters()):
        assert torch.equal(
            torchs.state[parameter]["exp_avg_sq"].to_local(),
            state["exp_avg_sq"].to_local(),
        )
    of_again.load_state_dict(torchs.state_dict())
    assert_same(codes_of(of_again), codes)
    assert of_again.param_groups[0]["state_dtype"] == torch.int8


@pytest.mark.parametrize("flatten", [False, True])
def test_torchs_checkpoints(flatten, mesh, folder):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = made(mesh, **INT8)
    train(model, optimizer, range(3))
    dcp.save(
        get_optimizer_state_dict(model, optimizer, options=options),
        checkpoint_id=folder,
    )
    for dtype in (torch.int8, torch.float32):
        other, loaded = made(mesh, state_dtype=dtype)
        train(other, loaded, [7])
        state = get_optimizer_state_dict(other, loaded, options=options)
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(other, loaded, state, options=options)
        assert_same(values_of(loaded), values_of(optimizer))


@pytest.mark.parametrize("writer", ["int8", "groups", "torch", "float32"])
@pytest.mark.parametrize("reader", ["int8", "groups", "torch", "float32", "bfloat16"])
def test_checkpoints(writer, reader, mesh, one, folder):
    """Between formats, exactly to float32, and on another number of ranks."""

    def make(kind, mesh):
        model = sharded(mesh)
        if kind == "groups":
            return model, adamw(groups_of(model))
        if kind == "torch":
            return model, adamw(model.parameters(), torch.optim.AdamW)
        dtype = getattr(torch, kind)
        return model, adamw(model.parameters(), state_dtype=dtype)

    model, optimizer = make(writer, mesh)
    train(model, optimizer, range(3))
    written = by_name(model, optimizer)
    checkpoint.save(folder, 3, model, optimizer)
    for of_reader in (mesh, one):
        other, loaded = make(reader, of_reader)
        if (writer == "groups") != (reader == "groups"):
            with pytest.raises(ValueError, match="parameter groups"):
                checkpoint.load(folder, other, loaded)
            return
        checkpoint.load(folder, other, loaded)
        read = by_name(other, loaded)
        if reader in ("torch", "float32") or reader == writer:
            for name, state in read.items():
                assert_same(state, written[name])
        assert_same(full_state(other), full_state(model))


def by_name(model, optimizer):
    """Returns full states in float32 by the parameter's name."""
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = optimizer.state_dict()["state"]
    return {
        names[id(p)]: {
            name: states[number][name].full_tensor().float()
            for name in ("exp_avg", "exp_avg_sq")
        }
        for number, p in enumerate(parameters)
    }


def test_a_resumed_run_is_the_same(mesh, one, folder):
    """Also on one rank."""
    skip_inexact_means()
    model, optimizer = made(mesh, **INT8)
    train(model, optimizer, range(3))
    checkpoint.save(folder, 3, model, optimizer)
    train(model, optimizer, range(3, 6))
    for of_reader in (mesh, one):
        other, loaded = made(of_reader, **INT8)
        checkpoint.load(folder, other, loaded)
        train(other, loaded, range(3, 6))
        assert_same(full_state(other), full_state(model))
        assert_same(values_of(loaded), values_of(optimizer))


def test_nan_reaches_the_weights(mesh):
    model, optimizer = made(mesh, **INT8)
    train(model, optimizer, [0])
    model(on_device(torch.zeros(1, 2, dtype=torch.long))).sum().backward()
    grad = model.up.weight.grad.to_local()
    if grad.numel():
        grad.view(-1)[3] = float("nan")
    optimizer.step()
    found = full_state(model)["up.weight"].isnan().sum().item()
    own = torch.tensor(int(grad.numel() > 0))
    dist.all_reduce(own)
    assert found == own


def test_groups_that_are_added(mesh):
    """The states of the first ones stay, in their formats."""
    model = sharded(mesh)
    rest = [p for n, p in model.named_parameters() if not n.startswith("up.")]
    optimizer = adamw(model.up.parameters(), **INT8)
    train(model, optimizer, range(2))
    before = values_of(optimizer)
    optimizer.add_param_group({"params": rest, "state_dtype": torch.bfloat16})
    after = values_of(optimizer)
    assert_same({key: after[key] for key in before}, before)
    train(model, optimizer, range(2, 4))
    dtypes = {s["exp_avg"].dtype for s in optimizer.state.values()}
    assert dtypes == {torch.int8, torch.bfloat16, torch.float32}
    with pytest.raises(ValueError, match="expected torch.float32, torch.bfloat16 or"):
        adamw(model.parameters(), state_dtype=torch.float16)
    with pytest.raises(ValueError, match="state_dtype: expected"):
        adamw([{"params": list(model.parameters()), "state_dtype": "int8"}])


def dtypes_of(optimizer):
    return [state["exp_avg"].dtype for state in optimizer.state.values()]


def test_an_optimizer_made_from_param_groups(mesh):
    """Its states have the same formats."""
    model = sharded(mesh)
    first = adamw(groups_of(model))
    second = flatshard.optim.AdamW(first.param_groups)
    assert dtypes_of(second) == dtypes_of(first)
    first = adamw(model.parameters(), **INT8)
    second = flatshard.optim.AdamW(model.parameters(), **first.defaults)
    assert dtypes_of(second) == dtypes_of(first)


def test_a_state_dtype_stays(mesh):
    model, optimizer = made(mesh, **INT8)
    group = optimizer.param_groups[0]
    group["state_dtype"] = torch.bfloat16
    with pytest.raises(
        ValueError, match="state_dtype cannot change from torch.int8 to torch.bfloat16"
    ):
        train(model, optimizer, [0])
    group["state_dtype"] = torch.int8
    optimizer.zero_grad()
    train(model, optimizer, [0])
    other = made(mesh)[1]
    other.load_state_dict(optimizer.state_dict())
    assert "state_dtype" not in other.param_groups[0]
    assert set(dtypes_of(other)) == {torch.float32}


def test_states_that_are_assigned(mesh):
    model, optimizer = made(mesh, **INT8)
    train(model, optimizer, range(2))
    state = optimizer.state[model.down.weight]
    codes = state["exp_avg_sq"]
    values = torch.full_like(model.down.weight, 0.25, requires_grad=False)
    state["exp_avg_sq"] = values
    train(model, optimizer, [2])
    state = optimizer.state[model.down.weight]
    assert state["exp_avg_sq"].dtype == torch.uint8
    state["exp_avg"] = codes
    with pytest.raises(ValueError, match="down.weight: expected floating-point"):
        train(model, optimizer, [3])
    optimizer.state.clear()
    train(model, optimizer, [3])
    assert all(int(state["step"]) == 1 for state in optimizer.state.values())


class Odd(nn.Module):
    """One matrix with odd slices."""

    def __init__(self, width=33):
        super().__init__()
        self.first = nn.Linear(DIM, DIM * 2)
        self.odd = nn.Linear(width, 130)
        on_device(self)

    def forward(self, x):
        return self.odd(self.first(x)[:, : self.odd.in_features])


def test_odd_slices(mesh):
    """Their unit is not padded, unless an option asks for it."""
    model = fully_shard(Odd(), mesh=mesh)
    with pytest.raises(ValueError, match=r"odd.weight of shape \[130, 33\] has slices"):
        adamw(model.parameters(), **INT8)
    adamw(model.parameters(), state_dtype=torch.bfloat16)
    never = fully_shard(Odd(), mesh=mesh, options=ShardOptions(int8_states=False))
    with pytest.raises(ValueError, match=r"ShardOptions\(int8_states=False\)"):
        adamw(never.parameters(), **INT8)
    model = Odd()
    fully_shard(model.odd, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = [
        {"params": list(model.odd.parameters()), "state_dtype": torch.float32},
        {"params": list(model.first.parameters())},
    ]
    padded = fully_shard(Odd(), mesh=mesh, options=ShardOptions(int8_states=True))
    for model, parameters in ((model, groups), (padded, padded.parameters())):
        optimizer = adamw(parameters, **INT8)
        model(on_device(torch.ones(2, DIM))).sum().backward()
        optimizer.step()
        assert optimizer.state[model.first.weight]["exp_avg"].dtype == torch.int8
    assert optimizer.state[padded.odd.weight]["exp_avg"].dtype == torch.int8


def test_small_parameters_with_odd_slices(mesh, one):
    """They keep float32 and one rank has them, so they do not pad their unit."""
    skip_inexact_means()
    results = []
    for of in (mesh, one):
        torch.manual_seed(0)
        model = on_device(nn.Sequential(nn.Linear(DIM, 99), nn.Linear(99, 5)))
        fully_shard(model, mesh=of)
        optimizer = adamw(model.parameters(), **INT8)
        for _ in range(3):
            model(on_device(torch.ones(2, DIM))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        small = model[1].weight
        assert optimizer.state[small]["exp_avg"].dtype == torch.float32
        assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.int8
        assert len(small.to_local()) in (0, 5)
        results.append((full_state(model), values_of(optimizer)))
    for a, b in zip(*results):
        assert_same(a, b)


def test_chunks(mesh):
    """Of rows that are blocks, or else refused where ranks split them."""
    options = ShardOptions(granularity="chunk")
    odd = fully_shard(on_device(nn.Linear(DIM, 131)), mesh=mesh, options=options)
    if mesh.size() in (2, 4):
        with pytest.raises(ValueError, match="expected shards of full blocks of 256"):
            adamw(odd.parameters(), **INT8)
    adamw(odd.parameters(), state_dtype=torch.bfloat16)
    wide = fully_shard(on_device(nn.Linear(256, 24)), mesh=mesh, options=options)
    optimizer = adamw(wide.parameters(), **INT8)
    wide(on_device(torch.ones(2, 256))).sum().backward()
    optimizer.step()
    assert optimizer.state[wide.weight]["exp_avg"].dtype == torch.int8


def test_small_units_with_several_formats(mesh):
    """They are not laid out in blocks."""
    model = fully_shard(on_device(nn.Linear(16, 20)), mesh=mesh)
    groups = [
        {"params": [model.weight], "state_dtype": torch.bfloat16},
        {"params": [model.bias]},
    ]
    with pytest.raises(
        ValueError,
        match=r"states of several formats need.*ShardOptions\(int8_states=True",
    ):
        adamw(groups)
    adamw(groups, state_dtype=torch.bfloat16)
    adamw(model.parameters(), **INT8)
    model = on_device(nn.Linear(16, 20))
    fully_shard(model, mesh=mesh, options=ShardOptions(int8_states=True))
    groups = [
        {"params": [model.weight], "state_dtype": torch.bfloat16},
        {"params": [model.bias]},
    ]
    adamw(groups)


def test_stochastic_rounding(mesh):
    """Updates below half a rounding step are lost without it."""
    drawn = []
    for seed in (None, 0, 1):
        more = {} if seed is None else {"rounding_seed": seed}
        model, optimizer = made(
            mesh,
            torch.bfloat16,
            lr=1e-4,
            weight_decay=0.0,
            stochastic_rounding=seed is not None,
            **more,
        )
        with torch.no_grad():
            model.up.weight.fill_(1.0)
        train(model, optimizer, range(2))
        drawn.append(full_state(model)["up.weight"])
    lost, first, second = drawn
    assert (lost == 1).all()
    assert (first != 1).any() and not torch.equal(first, second)


def test_stochastic_rounding_of_float32(mesh):
    with pytest.raises(ValueError, match="stochastic_rounding is for bfloat16"):
        made(mesh, stochastic_rounding=True)


def test_stochastic_rounding_of_a_part_of_a_unit(mesh):
    model = sharded(mesh, torch.bfloat16)
    with pytest.raises(
        NotImplementedError, match=r"stochastic_rounding: parameter .*bias.* is missing"
    ):
        adamw([model.up.weight], stochastic_rounding=True)
    adamw(model.up.parameters(), stochastic_rounding=True)


@pytest.mark.parametrize("seed", [-1, 2**64, 0.5])
def test_seeds_out_of_range(seed, mesh):
    with pytest.raises(ValueError, match=f"rounding_seed: expected .* got {seed}"):
        made(mesh, torch.bfloat16, stochastic_rounding=True, rounding_seed=seed)


def test_tensor_parallelism_is_refused(mesh):
    if mesh.size() < 2:
        pytest.skip("wants two ranks")
    grid = init_device_mesh(DEVICE, (mesh.size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        on_device(nn.Linear(DIM, 256)).to(torch.bfloat16),
        grid["tp"],
        ColwiseParallel(),
    )
    fully_shard(model, mesh=grid["dp"])
    for option, value in (
        ("state_dtype=torch.int8", INT8),
        ("stochastic_rounding", {"stochastic_rounding": True}),
    ):
        with pytest.raises(
            NotImplementedError,
            match=f"AdamW: {option}: parameter weight of unit .* has tensor parallelism",
        ):
            adamw(model.parameters(), **value)
    adamw(model.parameters(), state_dtype=torch.bfloat16)
