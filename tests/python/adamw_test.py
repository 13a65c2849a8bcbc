"""flatshard.optim.AdamW follows every change of its options and its state, as
torch.optim.AdamW does, or raises an error."""

import copy
import pickle

import pytest
import torch

import flatshard
from flatshard import checkpoint, fully_shard
from tests.python.device import DEVICE, on_device
from tests.python.models import Mlp
from tests.python.training import distance, full_state, shard

KINDS = (flatshard.optim.AdamW, torch.optim.AdamW)
# Options as torch has them, each with a value to change it to.
CHANGES = {
    "lr": 0.1,
    "betas": (0.5, 0.5),
    "eps": 1.0,
    "weight_decay": 0.9,
    "amsgrad": True,
    "maximize": True,
    "capturable": True,
    "differentiable": True,
    "foreach": False,
    "fused": False,
    "decoupled_weight_decay": False,
}
REFUSED = {
    "amsgrad",
    "maximize",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
}
# Adam divides by numbers near zero: a difference of the gradients' last bit grows.
CLOSE = 1e-4


def made(kind, mesh, **options):
    torch.manual_seed(0)
    model = shard(Mlp(), fully_shard, mesh=mesh)
    options = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, **options}
    return model, kind(model.parameters(), **options)


def train(model, optimizer, steps, rank):
    for step in steps:
        model.loss(torch.Generator().manual_seed(10 * step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_states_in_bfloat16(mesh, rank):
    float32, plain = made(flatshard.optim.AdamW, mesh)
    model, optimizer = made(flatshard.optim.AdamW, mesh, state_dtype=torch.bfloat16)
    train(float32, plain, range(4), rank)
    train(model, optimizer, range(4), rank)
    for state in optimizer.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert 0 < distance(full_state(model), full_state(float32)) < 1e-2

    # A state dict of float32 states is rounded, and the other way is exact.
    optimizer.load_state_dict(plain.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    for ours, theirs in zip(plain.state.values(), optimizer.state.values()):
        assert ours["exp_avg"].dtype == torch.float32
        assert torch.equal(
            ours["exp_avg"].to_local(), theirs["exp_avg"].to_local().float()
        )


def test_ranks_without_elements_have_states_in_bfloat16(mesh):
    torch.manual_seed(0)
    norm = on_device(torch.nn.LayerNorm(8, bias=False))
    fully_shard(norm, mesh=mesh)  # all of it is on rank 0
    optimizer = flatshard.optim.AdamW(norm.parameters(), state_dtype=torch.bfloat16)
    norm(on_device(torch.randn(2, 8))).sum().backward()
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[norm.weight][name]
        assert state.to_local().dtype == torch.bfloat16
        own = state.full_tensor().float()
        mean = own.clone()
        torch.distributed.all_reduce(mean)
        assert own.norm() > 0
        assert torch.equal(own * mesh.size(), mean)


def test_the_changes_are_all_of_torchs_options(mesh):
    group = made(torch.optim.AdamW, mesh)[1].param_groups[0]
    assert set(CHANGES) == set(group) - {"params"}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", ["assigned", "loaded", "checkpoint"])
def test_a_changed_option_takes_effect(way, name, mesh, rank, folder):
    if way == "checkpoint":
        model, other = made(torch.optim.AdamW, mesh)
        train(model, other, range(2), rank)
        other.param_groups[0][name] = CHANGES[name]
        checkpoint.save(folder, 2, model, other)
    results = []
    for kind in KINDS:
        model, optimizer = made(kind, mesh)
        train(model, optimizer, range(2), rank)

        def change():
            if way == "assigned":
                optimizer.param_groups[0][name] = CHANGES[name]
            elif way == "loaded":
                state = copy.deepcopy(optimizer.state_dict())
                state["param_groups"][0][name] = CHANGES[name]
                optimizer.load_state_dict(state)
            else:
                checkpoint.load(folder, model, optimizer)

        if kind is flatshard.optim.AdamW and name in REFUSED:
            before = full_state(model)
            with pytest.raises(NotImplementedError, match=name):
                change()
                train(model, optimizer, [2], rank)
            assert distance(full_state(model), before) == 0
            return
        change()
        train(model, optimizer, range(2, 5), rank)
        results.append(full_state(model))
    assert distance(*results) < CLOSE


@pytest.mark.parametrize(
    "name, value",
    [("lr", -1.0), ("betas", (0.9, 1.0)), ("eps", 0.0), ("weight_decay", -0.1)],
)
def test_numbers_out_of_range(name, value, mesh, rank):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        made(flatshard.optim.AdamW, mesh, **{name: value})
    model, optimizer = made(flatshard.optim.AdamW, mesh)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name}: expected"):
        train(model, optimizer, [0], rank)


def test_schedulers_of_other_options_than_lr(mesh, rank):
    results = []
    for kind in KINDS:
        model, optimizer = made(kind, mesh)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        for step in range(5):
            optimizer.param_groups[0]["weight_decay"] = 0.2 * step
            train(model, optimizer, [step], rank)
            scheduler.step()
        assert optimizer.param_groups[0]["betas"][0] != 0.9
        results.append(full_state(model))
    assert distance(*results) < CLOSE


def test_tensors_as_options(mesh, rank):
    results = []
    for kind in KINDS:
        model, optimizer = made(kind, mesh, lr=torch.tensor(1e-2), foreach=False)
        for step in range(4):
            optimizer.param_groups[0]["lr"].fill_(0.01 * (step + 1))
            train(model, optimizer, [step], rank)
        results.append(full_state(model))
    assert distance(*results) < CLOSE


def groups_of(model):
    """Matrices, and the rest: several parameters of each unit in each."""
    parameters = list(model.parameters())
    return [
        [p for p in parameters if p.dim() > 1],
        [p for p in parameters if p.dim() == 1],
    ]


def test_each_group_has_a_weight_decay(mesh, rank):
    """Also one that changes between zero and another number."""
    results = []
    for kind in KINDS:
        model, _ = made(kind, mesh)
        first, second = groups_of(model)
        optimizer = kind(
            [{"params": first, "weight_decay": 0.5}, {"params": second}],
            lr=1e-2,
            eps=1e-3,
            weight_decay=0.0,
        )
        for step, decays in enumerate([(0.5, 0.0), (0.5, 2.0), (0.0, 2.0), (1.0, 1.0)]):
            for group, decay in zip(optimizer.param_groups, decays):
                group["weight_decay"] = decay
            train(model, optimizer, [step], rank)
        results.append(full_state(model))
    assert distance(*results) < CLOSE


# Values of an option for two groups, and what they change to.
OF_GROUPS = {
    "lr": ((1e-2, 3e-2), (5e-2, 0.0)),
    "betas": (((0.9, 0.99), (0.5, 0.9)), ((0.7, 0.7), (0.0, 0.99))),
    "eps": ((1e-3, 1e-1), (1.0, 1e-2)),
    "weight_decay": ((0.5, 0.0), (0.0, 2.0)),
}


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("way", ["assigned", "loaded", "checkpoint", "scheduled"])
def test_each_group_has_its_options(way, name, mesh, rank, folder):
    """Groups that both have parameters of each unit differ in one option. It changes
    between two steps."""
    before, after = OF_GROUPS[name]

    def grouped(kind):
        model, _ = made(kind, mesh)
        groups = [
            {"params": parameters, name: value}
            for parameters, value in zip(groups_of(model), before)
        ]
        return model, kind(groups, **{"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1})

    def change(optimizer):
        for group, value in zip(optimizer.param_groups, after):
            group[name] = value

    if way == "checkpoint":
        model, other = grouped(torch.optim.AdamW)
        train(model, other, range(2), rank)
        change(other)
        checkpoint.save(folder, 2, model, other)
    results = []
    for kind in KINDS:
        model, optimizer = grouped(kind)
        train(model, optimizer, range(2), rank)
        if way == "assigned":
            change(optimizer)
        elif way == "loaded":
            state = copy.deepcopy(optimizer.state_dict())
            for group, value in zip(state["param_groups"], after):
                group[name] = value
            optimizer.load_state_dict(state)
        elif way == "checkpoint":
            checkpoint.load(folder, model, optimizer)
        else:  # a scheduler that changes each group by its own factor
            added = torch.optim.lr_scheduler.LambdaLR(
                optimizer, [lambda step: 1.0 + step, lambda step: 0.5]
            )
            train(model, optimizer, range(1), rank)
            added.step()
            change(optimizer)
        train(model, optimizer, range(2, 5), rank)
        results.append(full_state(model))
    assert distance(*results) < CLOSE


def test_another_optimizer_has_other_weight_decays(mesh, rank):
    """A later optimizer decays parameters that an earlier one left undecayed."""
    results = []
    for kind in KINDS:
        model, _ = made(kind, mesh)
        kind([{"params": model.parameters(), "weight_decay": 0.0}])
        optimizer = kind(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.9)
        train(model, optimizer, range(3), rank)
        results.append(full_state(model))
    assert distance(*results) < CLOSE


def test_groups_that_are_added(mesh, rank):
    results = []
    for kind in KINDS:
        model, _ = made(kind, mesh)
        optimizer = kind(model.blocks[0].parameters(), lr=1e-2, eps=1e-3)
        train(model, optimizer, range(2), rank)
        optimizer.add_param_group(
            {"params": model.blocks[1].parameters(), "weight_decay": 0.5, "lr": 0.1}
        )
        model.zero_grad()
        train(model, optimizer, range(2, 5), rank)
        results.append(full_state(model))
    assert distance(*results) < CLOSE


def test_a_group_that_cannot_be_added_leaves_all_as_it_was(mesh, rank):
    model, optimizer = made(flatshard.optim.AdamW, mesh)
    parameters = list(model.blocks[0].parameters())
    optimizer = flatshard.optim.AdamW(parameters, lr=1e-2)
    train(model, optimizer, [0], rank)
    other = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="that fully_shard sharded"):
        optimizer.add_param_group({"params": [other]})
    with pytest.raises(ValueError, match="lr: expected at least 0"):
        optimizer.add_param_group({"params": model.blocks[1].parameters(), "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, [1], rank)
    assert all(float(state["step"]) == 2 for state in optimizer.state.values())


def test_groups_that_get_the_sharded_parameters_later(mesh, rank):
    expected, after = made(flatshard.optim.AdamW, mesh, lr=2e-2)
    train(expected, after, range(3), rank)
    torch.manual_seed(0)
    model = Mlp()
    options = {"eps": 1e-3, "weight_decay": 0.1}
    optimizer = flatshard.optim.AdamW(model.blocks.parameters(), lr=1e-2, **options)
    optimizer.add_param_group({"params": model.head.parameters()})
    with pytest.raises(ValueError, match="lr: expected at least 0"):
        optimizer.add_param_group({"params": [torch.ones(2)], "lr": -1.0})
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="make the optimizer after fully_shard"):
        optimizer.load_state_dict(after.state_dict())
    optimizer.zero_grad()

    names = {p: n for n, p in model.named_parameters()}
    of_groups = [[names[p] for p in g["params"]] for g in optimizer.param_groups]
    shard(model, fully_shard, mesh=mesh)
    with pytest.raises(RuntimeError, match="was created before fully_shard"):
        optimizer.step()
    sharded = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, of_groups):
        group |= {"params": [sharded[name] for name in of_group], "lr": 2e-2}
    train(model, optimizer, range(3), rank)
    assert distance(full_state(model), full_state(expected)) == 0


def test_lists_of_parameters_that_were_changed(mesh, rank):
    model, optimizer = made(flatshard.optim.AdamW, mesh)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(
        RuntimeError, match="were changed since the optimizer was created"
    ):
        train(model, optimizer, [0], rank)


def test_a_parameter_that_moved_to_another_group(mesh, rank):
    model, _ = made(flatshard.optim.AdamW, mesh)
    first, second = groups_of(model)
    optimizer = flatshard.optim.AdamW([{"params": first}, {"params": second}])
    a, b = (group["params"] for group in optimizer.param_groups)
    b.insert(0, a.pop())
    with pytest.raises(
        RuntimeError, match="were changed since the optimizer was created"
    ):
        train(model, optimizer, [0], rank)


@pytest.mark.parametrize("how", ["cleared", "replaced", "values", "steps"])
def test_a_changed_state_takes_effect(how, mesh, rank):
    results = []
    for kind in KINDS:
        model, optimizer = made(kind, mesh)
        train(model, optimizer, range(2), rank)
        if how == "cleared":
            optimizer.state.clear()
        for state in optimizer.state.values():
            if how == "replaced":
                state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)
            elif how == "values":
                state["exp_avg_sq"].mul_(9.0)
            else:
                state["step"] = torch.tensor(50.0)
        train(model, optimizer, range(2, 5), rank)
        results.append(full_state(model))
        assert len(optimizer.state) == len(list(model.parameters()))
    assert distance(*results) < CLOSE


def test_loaded_states_keep_their_precision(mesh, rank):
    """torch would cast them to the parameters' dtype, bfloat16."""
    model = Mlp().to(torch.bfloat16)
    shard(model, fully_shard, mesh=mesh)
    optimizer = flatshard.optim.AdamW(model.parameters(), lr=1e-2)
    x = on_device(torch.randn(2, 13, dtype=torch.bfloat16))
    model(x).square().mean().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    moments = state["state"][0]["exp_avg"].full_tensor()
    assert moments.dtype == torch.float32
    assert not torch.equal(moments, moments.bfloat16().float())
    optimizer.state.clear()
    optimizer.load_state_dict(state)
    loaded = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert torch.equal(loaded["exp_avg"].full_tensor(), moments)


def test_float16_parameters(mesh):
    model = shard(Mlp().to(torch.float16), fully_shard, mesh=mesh)
    if DEVICE == "cuda":
        with pytest.raises(NotImplementedError, match="expected float32 parameters"):
            flatshard.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        flatshard.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("change", ["other", "missing"])
def test_states_with_other_numbers_of_steps(change, mesh, rank):
    results = []
    for kind in KINDS:
        model, optimizer = made(kind, mesh)
        train(model, optimizer, range(3), rank)
        state = copy.deepcopy(optimizer.state_dict())
        number = len(state["state"]) - 1
        if change == "other":
            state["state"][number]["step"].fill_(7)
        else:
            del state["state"][number]
        optimizer.load_state_dict(state)
        train(model, optimizer, range(3, 5), rank)
        results.append((full_state(model), counts_of(model, optimizer)))
    (ours, counts), (theirs, expected) = results
    assert distance(ours, theirs) < CLOSE
    assert counts == expected


@pytest.mark.parametrize("drop", ["pop", "emptied"])
def test_a_dropped_state(drop, mesh, rank):
    """It starts at step 1 again."""
    results = []
    for kind in KINDS:
        model, optimizer = made(kind, mesh)
        train(model, optimizer, range(3), rank)
        parameter = model.blocks[0].up.weight
        if drop == "pop":
            optimizer.state.pop(parameter)
        else:
            optimizer.state[parameter] = {}
        train(model, optimizer, [3], rank)
        results.append((full_state(model), counts_of(model, optimizer)))
    (ours, counts), (theirs, expected) = results
    assert distance(ours, theirs) < CLOSE
    assert counts == expected
    assert sorted(set(counts.values())) == [1.0, 4.0]


# Parts of names of the parameters without a gradient, by step.
WITHOUT = [[], ["up.weight"], ["up", "bias"], [], ["blocks.0"], ["down.weight"]]


def counts_of(model, optimizer):
    return {
        name: float(optimizer.state.get(p, {}).get("step", 0))
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("resumed", ["no", "state_dict", "checkpoint", "of torch"])
def test_parameters_without_gradients(resumed, grouped, mesh, rank, folder):
    """They are skipped, whatever the others of their unit have."""
    results = []
    for kind in KINDS:

        def make(of):
            model, optimizer = made(of, mesh)
            if grouped:
                matrices, rest = groups_of(model)
                groups = [{"params": matrices, "lr": 3e-2}, {"params": rest}]
                optimizer = of(groups, lr=1e-2, eps=1e-3)
            return model, optimizer

        model, optimizer = make(torch.optim.AdamW if resumed == "of torch" else kind)
        for step, without in enumerate(WITHOUT):
            model.loss(torch.Generator().manual_seed(10 * step + rank)).backward()
            for name, parameter in model.named_parameters():
                if any(part in name for part in without):
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 and resumed in ("checkpoint", "of torch"):
                checkpoint.save(f"{folder}/{kind.__module__}", 1, model, optimizer)
                model, optimizer = make(kind)
                checkpoint.load(f"{folder}/{kind.__module__}", model, optimizer)
            elif step == 2 and resumed == "state_dict":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        results.append((full_state(model), counts_of(model, optimizer)))
    (ours, counts), (theirs, expected) = results
    assert distance(ours, theirs) < CLOSE
    assert counts == expected
    assert len(set(counts.values())) > 2


@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq"])
def test_a_state_without_one_of_its_parts(name, mesh, rank):
    model, optimizer = made(flatshard.optim.AdamW, mesh)
    train(model, optimizer, range(2), rank)
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0][name]
    del optimizer.state[model.blocks[0].up.weight][name]
    for change in (
        lambda: train(model, optimizer, [2], rank),
        lambda: optimizer.load_state_dict(state),
    ):
        with pytest.raises(KeyError, match=rf"blocks.0.up.weight has no {name}, only"):
            change()


def test_the_states_of_one_unit_are_dropped(mesh, rank):
    results = []
    for kind in KINDS:
        model, optimizer = made(kind, mesh)
        train(model, optimizer, range(3), rank)
        for parameter in model.blocks[0].parameters():
            optimizer.state.pop(parameter)
        train(model, optimizer, range(3, 6), rank)
        counts = sorted(float(state["step"]) for state in optimizer.state.values())
        results.append((full_state(model), counts))
    (ours, counts), (theirs, expected) = results
    assert distance(ours, theirs) < CLOSE
    assert counts == expected


def test_gradients_that_no_backward_made(mesh, rank):
    """Gradients set by the program before any backward, and gradients of one unit after
    some."""
    results = []
    for kind in KINDS:
        model, optimizer = made(kind, mesh)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(2), rank)
        for p in model.blocks[0].parameters():
            p.grad = torch.full_like(p, 0.2)
        optimizer.step()
        counts = [float(state["step"]) for state in optimizer.state.values()]
        results.append((full_state(model), counts))
    (ours, counts), (theirs, expected) = results
    assert distance(ours, theirs) < CLOSE
    assert counts == expected


def test_copies_are_refused(mesh):
    _, optimizer = made(flatshard.optim.AdamW, mesh)
    for make in (copy.deepcopy, pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="save state_dict"):
            make(optimizer)
    copy.deepcopy(optimizer.state_dict())
