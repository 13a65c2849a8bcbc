"""`unshard()` and `reshard()`, and setters."""

import copy

import pytest
import torch
from torch import nn

from flatshard import MixedPrecisionPolicy, fully_shard
from tests.python.models import Body, plain
from tests.python.training import data, full_state, refused, shard


def test_setters(mesh, rank, world):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    single_loss = model(data(rank)).square().mean()
    single_loss.backward()
    grads = [p.grad.full_tensor().clone() for p in model.parameters()]

    def again():
        model.zero_grad()
        model(data(rank)).square().mean().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    a, b, c = model.blocks
    a.set_modules_to_forward_prefetch([b, c])
    c.set_modules_to_backward_prefetch([b, a])
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for ours, theirs in zip(again(), grads):
        torch.testing.assert_close(ours, theirs)
    model.set_reshard_after_backward(True)
    model.set_gradient_divide_factor(1.0)  # of the root's own parameters
    for (name, _), ours, theirs in zip(model.named_parameters(), again(), grads):
        factor = world if name.startswith("head") else 1
        torch.testing.assert_close(ours, factor * theirs)


def test_unshard_and_reshard(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    whole = full_state(model)
    model(data(rank)).sum().backward()
    block = model.blocks[1]
    for async_op in (False, True):
        handle = block.unshard(async_op)
        if async_op:
            handle.wait()
        assert type(block.up.weight) is nn.Parameter
        assert torch.equal(block.up.weight, whole["blocks.1.up.weight"])
        block.reshard()
        assert torch.equal(block.up.weight.full_tensor(), whole["blocks.1.up.weight"])
    block.unshard()
    model(data(rank)).sum().backward()


def test_unshard_before_the_first_forward(mesh, rank, world):
    torch.manual_seed(1)
    plain_model = Body(plain)
    whole = {name: t.clone() for name, t in plain_model.state_dict().items()}
    for first in ("root", "block", "async block"):
        model = shard(copy.deepcopy(plain_model), fully_shard, mesh=mesh)
        model.reshard()  # nothing is gathered yet
        if first == "root":
            model.unshard()
            assert torch.equal(model.head.weight, whole["head.weight"])
        else:
            block = model.blocks[1]
            handle = block.unshard(async_op=first == "async block")
            if handle:
                handle.wait()
            assert torch.equal(block.up.weight, whole["blocks.1.up.weight"])
        # All units of the model are unsharded, and it trains like any other.
        model(data(rank)).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "optim"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_unshard_sees_the_last_step(mesh, rank, strategy, dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    options = {"mesh": mesh, "strategy": strategy, "mp_policy": policy}
    model = shard(Body(plain), fully_shard, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(data(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        new = full_state(model)["blocks.1.up.weight"].to(dtype)
        block = model.blocks[1]
        block.unshard()
        assert torch.equal(block.up.weight, new)
        block.reshard()


def test_a_model_that_grows_after_unshard_is_refused(mesh, rank):
    model = Body(plain)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    model.blocks[1].unshard()
    fully_shard(model, mesh=mesh)
    with refused("unit blocks.1 ran, or was unsharded, before", RuntimeError):
        model(data(rank))
