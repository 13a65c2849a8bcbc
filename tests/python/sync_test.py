"""When and how gradients are reduced, unit by unit, compared with FSDP2."""

import copy
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from flatshard import fully_shard
from tests.python.device import DEVICE
from tests.python.models import Body, plain
from tests.python.sum_order import SMALL_MODEL, near
from tests.python.training import data, shard


def twins(mesh, **options):
    torch.manual_seed(0)
    ours = Body(plain)
    theirs = copy.deepcopy(ours)
    return (
        shard(ours, fully_shard, mesh=mesh, **options),
        shard(theirs, fsdp2, mesh=mesh, **options),
    )


def backward(model, rank, step, scale=1.0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (scale * model(data(rank, step)).square().mean()).backward()


def grads(model):
    return [
        None if p.grad is None else p.grad.full_tensor() for p in model.parameters()
    ]


def check_equal(ours, theirs, exact=True):
    for a, b in zip(grads(ours), grads(theirs)):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **near(b, 0.0 if exact else SMALL_MODEL))


# The settings before each of three microbatches: (block or None for the root, setter,
# value, recurse).
SYNC, REDUCE = "set_requires_gradient_sync", "set_requires_all_reduce"
PLANS = {
    "one unit": [[(1, SYNC, False, True)], [], [(1, SYNC, True, True)]],
    "all but one": [
        [(None, SYNC, False, True), (0, SYNC, True, True)],
        [],
        [(None, SYNC, True, True)],
    ],
    "the root alone": [[(None, SYNC, False, False)], [], [(None, SYNC, True, False)]],
    "one unit, twice": [
        [(2, SYNC, False, True)],
        [(2, SYNC, True, True), (0, SYNC, False, True)],
        [(0, SYNC, True, True)],
    ],
    "all-reduce of one unit": [
        [(1, REDUCE, False, True)],
        [],
        [(1, REDUCE, True, True)],
    ],
    "all-reduce of the root": [
        [(None, REDUCE, False, False)],
        [],
        [(None, REDUCE, True, False)],
    ],
    # Gradient synchronization sets both.
    "sync after all-reduce": [
        [(1, REDUCE, False, True)],
        [(1, SYNC, True, True)],
        [],
    ],
}


def set_all(model, plan):
    for block, setter, value, recurse in plan:
        module = model if block is None else model.blocks[block]
        getattr(module, setter)(value, recurse=recurse)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_units_decide(name, replicas, mesh, rank, world):
    if replicas == 2:
        if world != 4:
            pytest.skip("needs 4 ranks")
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "dp"))
    ours, theirs = twins(mesh)
    for step, plan in enumerate(PLANS[name]):
        for model in (ours, theirs):
            set_all(model, plan)
            backward(model, rank, step)
        check_equal(ours, theirs, exact=False)


def test_a_unit_that_accumulates_shows_no_gradient(mesh, rank):
    ours, theirs = twins(mesh)
    for model in (ours, theirs):
        model.blocks[1].set_requires_gradient_sync(False)
        backward(model, rank, 0)
        assert model.blocks[1].up.weight.grad is None
        assert model.blocks[0].up.weight.grad is not None
        assert model.head.weight.grad is not None
    check_equal(ours, theirs, exact=False)


def test_no_sync_keeps_what_units_had(mesh, rank):
    ours, _ = twins(mesh)
    ours.blocks[1].set_requires_gradient_sync(False)
    with ours.no_sync():
        assert not ours.blocks[0]._state().policy.sync_gradients
        backward(ours, rank, 0)
        assert grads(ours) == [None] * len(grads(ours))
    assert ours.blocks[0]._state().policy.sync_gradients
    assert ours.blocks[0]._state().policy.all_reduce
    assert not ours.blocks[1]._state().policy.sync_gradients
    backward(ours, rank, 1)
    assert ours.blocks[1].up.weight.grad is None


# -- divisors --------------------------------------------------------------------------


def half_policy():
    return MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)


class Constant(torch.nn.Module):
    """Its gradient is the input's sum over rows."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, dtype=dtype, device=DEVICE))

    def forward(self, x):
        return (self.weight * x).sum()


@pytest.mark.parametrize("factor", [None, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("fully", [fully_shard, fsdp2])
def test_large_float16_gradients(factor, fully, mesh, world):
    if world != 2:
        pytest.skip("40000 times two is what float16 cannot hold")
    model = fully(Constant(torch.float16), mesh=mesh)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(torch.full((8,), 40000.0, dtype=torch.float16, device=DEVICE)).backward()
    found = model.weight.grad.full_tensor()
    # A sum, of a factor of one, is infinite.
    expected = {None: 40000.0, 1.0: torch.inf, 2.0: 40000.0, 6.0: 80000 / 6}[factor]
    assert torch.equal(found, torch.full_like(found, expected))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("factor", [None, 2.0, 3.0, 10.0, 0.3])
def test_float16_is_that_of_fsdp2_to_the_bit(factor, accumulation, mesh, rank, world):
    if world > 2:
        pytest.skip("sums of three float16 numbers depend on the order")
    if world == 1 and factor is not None:
        pytest.skip("FSDP2 divides twice on one rank")
    ours, theirs = twins(mesh, mp_policy=half_policy())
    for model in (ours, theirs):
        if factor is not None:
            for module in (model, *model.blocks):
                module.set_gradient_divide_factor(factor)
        for step in range(accumulation):
            backward(model, rank, step, scale=100.0)
    for a, b in zip(grads(ours), grads(theirs)):
        assert torch.equal(a, b)


def test_float16_with_replicas(rank, world):
    """Four ranks: what is divided before and after the sum is a power of two."""
    if world != 4:
        pytest.skip("needs 4 ranks")
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "dp"))
    for fully in (fully_shard, fsdp2):
        model = fully(Constant(torch.float16), mesh=mesh)
        model(torch.full((8,), 30000.0, dtype=torch.float16, device=DEVICE)).backward()
        found = model.weight.grad.full_tensor()
        assert torch.equal(found, torch.full_like(found, 30000.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [None, 3.0])
def test_sums_alone(factor, dtype, mesh, rank, world):
    if world > 2:
        pytest.skip("sums of three numbers depend on the order")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    ours, theirs = twins(mesh, mp_policy=policy)
    if world == 1 and factor is not None:
        pytest.skip("FSDP2 divides twice on one rank")
    for model in (ours, theirs):
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
        backward(model, rank, 0)
    for a, b in zip(grads(ours), grads(theirs)):
        assert torch.equal(a, b)
