"""Memory is given back: nothing grows from step to step, and a deleted model is gone at
once. Counted in tensors and in their bytes, not in time or in the memory that the
allocator keeps."""

import contextlib
import gc
import weakref

import pytest
import torch

import flatshard
from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard._tensor.places import state_of
from tests.python.models import Body, Mlp, plain
from tests.python.training import data, shard

STEPS = 200
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "the core's adamw": flatshard.optim.AdamW,
}


def nbytes(storage):
    try:
        return storage.nbytes()
    except RuntimeError:  # symbolic, of what torch.compile traced in another test
        return 0


def live():
    """Returns (number of tensors, bytes of their storages), including those in
    cycles."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    inner = [t._local_tensor for t in tensors if hasattr(t, "_local_tensor")]
    found = [s for s in map(storage_of, tensors + inner) if s is not None]
    storages = {s._cdata: nbytes(s) for s in found}
    return len(tensors), sum(storages.values())


def storage_of(tensor):
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # a wrapper: what is inside counts


@contextlib.contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def step(model, optimizer, number):
    model.loss(torch.Generator().manual_seed(number)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.loss(torch.Generator().manual_seed(number))


@pytest.mark.parametrize(
    "name, strategy", [("adamw", "optim_grads_params"), ("the core's adamw", "optim")]
)
def test_nothing_grows_over_many_steps(name, strategy, mesh, rank, world):
    if world > 2:
        pytest.skip("two ranks show it, and more than cores take long")
    model = shard(
        Mlp(),
        fully_shard,
        mesh=mesh,
        strategy=strategy,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-4)
    counts = []
    for number in range(STEPS):
        step(model, optimizer, 1000 * rank + number)
        if number % 50 == 9:
            torch.nn.utils.get_total_norm(list(model.parameters()))
            counts.append(live())
    # Less is possible: threads of earlier tests may have kept some tensors at first.
    for column in zip(*counts):
        assert list(column) == sorted(column, reverse=True), counts


def test_a_step_leaves_no_object_behind(mesh, rank):
    """No objects and no cycles for the collector: everything that a forward and a
    backward create is freed with them. (torch's optimizers keep plans of DTensor
    operations.)"""
    model = shard(Body(plain), fully_shard, mesh=mesh)
    model.loss = lambda generator: model(data(rank)).square().mean()
    optimizer = flatshard.optim.AdamW(model.parameters())
    for number in range(3):
        step(model, optimizer, number)
    with without_collector():
        before = len(gc.get_objects())
        for number in range(20):
            step(model, optimizer, number)
        assert len(gc.get_objects()) <= before + 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_deleted_model_is_gone_after_training(name, compiled, mesh, rank):
    torch._dynamo.reset()

    def make():
        model = shard(Body(plain), fully_shard, mesh=mesh)
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-4)
        for _ in range(3):
            model(data(rank)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model(data(rank)).square().mean().backward()  # gradients exist
        state = model.state_dict()
        assert len(state) == len(list(model.parameters()))
        return model, optimizer

    make()  # what torch keeps of the first DTensor and the first graph of a process
    gc.collect()
    with without_collector():
        model, optimizer = make()
        weight = model.blocks[0].up.weight
        watched = {
            "parameter": weakref.ref(weight),
            "its shard": weakref.ref(weight._local_tensor),
            "gradient": weakref.ref(weight.grad),
            "model": weakref.ref(model),
            "unit": weakref.ref(state_of(model.blocks[0])),
            "root": weakref.ref(state_of(model).root),
            "whole": weakref.ref(state_of(model.blocks[0]).parameters[0].whole),
            "moment": weakref.ref(optimizer.state[weight]["exp_avg"]),
        }
        del weight, optimizer, model
        if compiled:
            # nn.Module.compile() makes a cycle of any module: it keeps its own bound
            # method. But no cache may keep the model alive forever.
            gc.collect()
        left = [what for what, ref in watched.items() if ref() is not None]
        assert left == []


def test_a_forward_whose_loss_is_dropped_holds_nothing(mesh, rank):
    """Neither the model nor what its forward saved."""
    first = shard(Body(plain), fully_shard, mesh=mesh)
    first(data(rank)).sum().backward()
    with without_collector():
        model = shard(Body(plain), fully_shard, mesh=mesh)
        out = model(data(rank))
        watched = [weakref.ref(model), weakref.ref(state_of(model)), weakref.ref(out)]
        del model
        # The graph does not keep the model alive.
        assert watched[0]() is None and watched[1]() is None
        del out
        assert watched[2]() is None
