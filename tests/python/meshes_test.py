"""Units of one model on several meshes, compared with FSDP2 and with one process.

Experts are on "efsdp" of one mesh, and other layers on "fsdp" of another one."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import flatshard
from bench.harness.options import fully_shard
from flatshard import checkpoint
from tests.python.device import DEVICE, named_mesh, on_device
from tests.python.experts_mesh_test import Model
from tests.python.sum_order import near
from tests.python.training import adamw, train_batches

DIM = 8  # of Model
DEGREES = [1, 2, 4]


def meshes(world, ep, replicas=1):
    """Two meshes over the same ranks: of other layers, and of experts."""
    shards = world // replicas
    if world < 2 or world % replicas or shards % ep:
        pytest.skip("needs ranks that the degrees divide")
    return (
        named_mesh(replicate=replicas, fsdp=shards, tp=1),
        named_mesh(replicate=replicas, efsdp=shards // ep, ep=ep),
    )


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return on_device(torch.randn(4, DIM, generator=generator))


def net(depth=4):
    torch.manual_seed(0)
    return on_device(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(depth))))


def shard(model, function, inner, outer, **options):
    """Layers 0 and 2 on one mesh, the others on another."""
    function(model[0], mesh=inner, **options)
    function(model[1], mesh=outer, **options)
    function(model[2], mesh=inner, **options)
    return function(model, mesh=outer, **options)


def total_norm(model):
    """The norm of gradients on several meshes as transformers' Trainer computes it."""
    groups = {}
    for p in model.parameters():
        groups.setdefault(p.grad.device_mesh, []).append(p.grad)
    norms = [get_total_norm(grads).full_tensor() for grads in groups.values()]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_each_mesh(model, most=0.1):
    """As accelerate does it."""
    norm = total_norm(model)
    groups = {}
    for p in model.parameters():
        groups.setdefault(p.grad.device_mesh, []).append(p)
    for mesh, parameters in groups.items():
        clip_grads_with_norm_(parameters, most, DTensor.from_local(norm, mesh))
    return norm.item()


def train(model, ranks, optimizer=None, steps=3, clip=None):
    """Returns losses, and norms before each step. `ranks`: whose batches."""
    return train_batches(
        lambda step, rank: model(batch(rank, step)).square().mean(),
        optimizer or adamw(model),
        ranks,
        steps,
        lambda: clip(model) if clip else None,
    )


def full(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def whole(model):
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in tensors.items()
    }


def check(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, **near(value), msg=lambda text: f"{name}: {text}"
        )


@pytest.mark.parametrize("inner_is_smaller", [True, False])
@pytest.mark.parametrize("ep", DEGREES)
def test_each_unit_is_sharded_over_its_own_mesh(ep, inner_is_smaller, rank, world):
    dense, expert = meshes(world, ep)
    inner, outer = expert["efsdp"], dense["fsdp"]
    if not inner_is_smaller:
        inner, outer = outer, inner
    ours, theirs = shard(net(), fully_shard, inner, outer), net()
    shard(theirs, fsdp2, inner, outer)
    assert ours[0].weight.device_mesh == inner
    assert ours[1].weight.device_mesh == outer
    assert train(ours, [rank]) == pytest.approx(train(theirs, [rank]), rel=1e-5)
    check(whole(ours), whole(theirs))


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2"])
def test_strategies(strategy, rank, world):
    dense, expert = meshes(world, 2)
    inner, outer = expert["efsdp"], dense["fsdp"]
    ours = shard(net(), fully_shard, inner, outer, strategy=strategy)
    theirs = shard(net(), fsdp2, inner, outer)
    assert train(ours, [rank]) == pytest.approx(train(theirs, [rank]), rel=1e-5)
    check(whole(ours), whole(theirs))


def test_accumulation_without_collectives(rank, world):
    dense, expert = meshes(world, 2)
    models = [
        shard(net(), f, expert["efsdp"], dense["fsdp"]) for f in (fully_shard, fsdp2)
    ]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            model(batch(rank, step)).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    check(whole(models[0]), whole(models[1]))


def test_two_models_on_the_same_meshes(rank, world):
    """Their all-gathers follow one another on each rank."""
    dense, expert = meshes(world, 2)
    found = []
    for function in (fully_shard, fsdp2):
        pair = [shard(net(), function, expert["efsdp"], dense["fsdp"]) for _ in "ab"]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
        for step in range(6):
            x = batch(rank, step)
            with torch.no_grad():
                target = pair[step % 2](x)
            (pair[1 - step % 2](x + 1) - target).square().mean().backward()
            optimizers[1 - step % 2].step()
            optimizers[1 - step % 2].zero_grad()
        found.append([whole(model) for model in pair])
    for ours, theirs in zip(*found):
        check(ours, theirs)


class Some(nn.Module):
    """Uses some of its layers."""

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x, used):
        for i in used:
            x = self.layers[i](x)
        return x


def test_a_parameter_without_a_gradient_has_none(rank, world):
    dense, expert = meshes(world, 2)
    model = Some()
    fully_shard(model.layers[0], mesh=expert["efsdp"])
    fully_shard(model.layers[1], mesh=dense["fsdp"])
    fully_shard(model.layers[2], mesh=expert["efsdp"])
    fully_shard(model, mesh=dense["fsdp"])
    for used in ([0, 1, 3], [1, 2, 3], [2, 3], [0, 1, 2, 3]):
        model(batch(rank, 0), used).sum().backward()
        for i, layer in enumerate(model.layers):
            assert (layer.weight.grad is not None) == (i in used), used
        model.zero_grad()


def test_the_ranks_of_one_mesh_may_leave_out_a_unit(rank, world):
    dense, expert = meshes(world, 2)
    inner = expert["efsdp"]
    model = Some()
    fully_shard(model.layers[0], mesh=inner)
    fully_shard(model, mesh=dense["fsdp"])
    has_0 = expert.get_local_rank("ep") == 0
    model(batch(rank, 0), [0, 1] if has_0 else [1]).sum().backward()
    if not has_0:
        assert model.layers[0].weight.grad is None
        return
    single = net()
    for r in inner.mesh.tolist():
        single[1](single[0](batch(r, 0))).sum().backward()
    grad = model.layers[0].weight.grad.full_tensor()
    torch.testing.assert_close(grad, single[0].weight.grad / inner.size())


# -- experts, as transformers 5 shards them --------------------------------------------


def as_dtensors(experts, ep):
    """The parameters are DTensors over `ep`, and the forward uses their local tensors."""
    for name, p in list(experts.named_parameters()):
        data = distribute_tensor(p.detach(), ep, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(data))

    def forward(x):
        up, down = experts.up.to_local(), experts.down.to_local()
        return torch.bmm(torch.tanh(torch.bmm(x, up)), down)

    experts.forward = forward


def sharded(function, dense, expert, **options):
    torch.manual_seed(0)
    model = on_device(Model())
    many = dense["replicate"].size() > 1
    inner = expert["replicate", "efsdp"] if many else expert["efsdp"]
    outer = dense["replicate", "fsdp"] if many else dense["fsdp"]
    for block in model.blocks:
        block.group = expert.get_group("ep")
        as_dtensors(block.experts, expert["ep"])
        function(block.experts, mesh=inner, **options)
        block.experts.set_gradient_divide_factor(float(dense.size()))
        if expert["efsdp"].size() > 1:  # otherwise FSDP2 would divide twice
            block.experts.set_force_sum_reduction_for_comms(True)
    for block in model.blocks:
        function(block, mesh=outer, **options)
    return function(model, mesh=outer, **options)


def test_state_dicts_before_there_are_values(world):
    """transformers asks for their names when it loads a model."""
    dense, expert = meshes(world, 2)
    with torch.device("meta"):
        model = Model()
    for block in model.blocks:
        as_dtensors(block.experts, expert["ep"])
        fully_shard(block.experts, mesh=expert["efsdp"])
    fully_shard(model, mesh=dense["fsdp"])
    assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize("clip", [None, clip_each_mesh])
@pytest.mark.parametrize("ep, replicas", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_experts_train_as_in_one_process(ep, replicas, clip, rank, world):
    mesh = meshes(world, ep, replicas)
    ours = sharded(fully_shard, *mesh)
    theirs = sharded(fsdp2, *mesh)
    assert train(ours, [rank], clip=clip) == pytest.approx(
        train(theirs, [rank], clip=clip), rel=1e-5
    )
    check(whole(ours), whole(theirs))
    if clip is None:
        torch.manual_seed(0)
        single = on_device(Model())
        train(single, range(world))
        check(whole(ours), whole(single))


def test_the_norm_of_torch_is_that_of_each_mesh(rank, world):
    model = sharded(fully_shard, *meshes(world, 2))
    model(batch(rank, 0)).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    expected = total_norm(model)
    torch.testing.assert_close(get_total_norm(grads).full_tensor(), expected)
    found = clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(total_norm(model), torch.full_like(expected, 0.1))


def test_a_norm_that_would_differ_between_ranks_is_refused(rank, world):
    dense, expert = meshes(world, 2)
    model = shard(net(), fully_shard, expert["efsdp"], dense["fsdp"])
    model(batch(rank, 0)).sum().backward()
    with pytest.raises(NotImplementedError, match="unknown which ranks have equal"):
        clip_grad_norm_(model.parameters(), 0.1)
    total_norm(model)


def test_norms_of_parameters_count_each_once(rank, world):
    model = sharded(fully_shard, *meshes(world, 2))
    model(batch(rank, 0)).square().mean().backward()
    found = {
        n.name: (n.weight, n.grad) for n in flatshard.diagnostics.parameter_norms(model)
    }
    for name, p in model.named_parameters():
        expected = [t.full_tensor().norm().item() for t in (p.detach(), p.grad)]
        assert found[name] == pytest.approx(tuple(expected), rel=1e-5), name


@pytest.mark.parametrize("ep", DEGREES)
def test_files_of_dcp(ep, rank, world, folder):
    mesh = meshes(world, ep)
    model = sharded(fully_shard, *mesh)
    optimizer = adamw(model)
    train(model, [rank], optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    expected = full(model)
    more = train(model, [rank], optimizer, steps=range(3, 5))

    for function, degree in ((fully_shard, 1), (fully_shard, ep), (fsdp2, ep)):
        again = sharded(function, *meshes(world, degree))
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        optimizer = adamw(again)
        weights, states = get_state_dict(again, optimizer)
        stored = {"model": weights, "optimizer": states}
        dcp.load(stored, checkpoint_id=folder)
        set_state_dict(
            again,
            optimizer,
            model_state_dict=stored["model"],
            optim_state_dict=stored["optimizer"],
        )
        for name, value in full(again).items():
            assert torch.equal(value, expected[name]), name
        found = train(again, [rank], optimizer, steps=range(3, 5))
        assert found == pytest.approx(more, rel=1e-5)
        if (function, degree) == (fully_shard, ep):
            assert found == more


def test_files_of_flatshard(rank, world, folder):
    model = sharded(fully_shard, *meshes(world, 2))
    optimizer = flatshard.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, [rank], optimizer)
    checkpoint.save(folder, 3, model, optimizer)
    more = train(model, [rank], optimizer, steps=range(3, 5))
    expected = full(model)
    for degree in (2, 1):
        again = sharded(fully_shard, *meshes(world, degree))
        optimizer = flatshard.optim.AdamW(again.parameters(), lr=1e-2)
        checkpoint.load(folder, again, optimizer)
        found = train(again, [rank], optimizer, steps=range(3, 5))
        assert found == pytest.approx(more, rel=0 if degree == 2 else 1e-5)
        check(full(again), expected)


def test_files_of_flatshard_need_known_replicas(rank, world, folder):
    dense, expert = meshes(world, 2)
    model = shard(net(), fully_shard, expert["efsdp"], dense["fsdp"])
    with pytest.raises(NotImplementedError, match="0.weight is on .* unknown which"):
        checkpoint.save(folder, 0, model)


# -- checks --------------------------------------------------------------------------


def test_equal_values_are_expected_on_the_ranks_of_a_mesh(rank, world):
    dense, expert = meshes(world, 2)
    inner, outer = expert["efsdp"], dense["fsdp"]
    model = net()
    with torch.no_grad():  # as experts differ
        model[0].weight += expert.get_local_rank("ep")
    shard(model, fully_shard, inner, outer)
    model(batch(rank, 0))
    if inner.size() == 1:
        return
    model = net()
    with torch.no_grad():  # in one of two groups only
        model[2].weight += rank == 0
    shard(model, fully_shard, inner, outer)
    with pytest.raises(RuntimeError, match="2.weight: the ranks had different values"):
        model(batch(rank, 0))


def test_parameters_may_change_between_steps(rank, world):
    dense, expert = meshes(world, 2)
    models = [
        shard(net(), f, expert["efsdp"], dense["fsdp"]) for f in (fully_shard, fsdp2)
    ]
    for model in models:
        model[0].requires_grad_(False)
        train(model, [rank], steps=range(2))
        model[0].requires_grad_(True)
        train(model, [rank], steps=range(2, 4))
    check(whole(models[0]), whole(models[1]))


def test_meshes_of_two_kinds_of_devices_are_refused(world):
    if DEVICE == "cpu":
        pytest.skip("needs GPUs")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    of_cpu = dist.device_mesh.init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=of_cpu)
    fully_shard(model, mesh=named_mesh(fsdp=world))
    with pytest.raises(ValueError, match="expected meshes of one device type"):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("copy_engines", ["none", "all"])
def test_copies(copy_engines, rank, world):
    mesh = meshes(world, 2)
    options = {"copy_engines": copy_engines}
    ours = sharded(fully_shard, *mesh, **options)
    theirs = sharded(fsdp2, *mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = train(ours, [rank])
    assert losses == pytest.approx(train(theirs, [rank]), rel=1e-5)
    check(whole(ours), whole(theirs))
