"""Training the same model twice, and how far two results may be apart."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch.distributed.fsdp import fully_shard as fsdp2

import flatshard
from tests.python.device import on_device
from tests.python.models import DIM
from tests.python.sum_order import near
from bench.harness.options import fully_shard

STRATEGIES = ("no_shard", "optim", "zero2", "optim_grads_params")


OPTIMIZERS = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "core": lambda p: flatshard.optim.AdamW(p, lr=1e-2, eps=1e-4),
}


def shard(model, function, **options):
    for unit in model.units():
        function(unit, **options)
    return function(model, **options)


def twins(make, mesh, more, **options):
    """The same model sharded with `options`, and with `more` of them."""
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    return (
        shard(model, fully_shard, mesh=mesh, **options),
        shard(other, fully_shard, mesh=mesh, **{**options, **more}),
    )


def train(
    model,
    rank,
    steps=3,
    accumulation=1,
    optimizer=None,
    sync_last_only=False,
    around=lambda is_last: contextlib.nullcontext(),
):
    """Returns the losses of this rank. Every rank sees separate batches. Microbatches
    run inside `around(is_last)`."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            if sync_last_only:
                model.set_requires_gradient_sync(micro == accumulation - 1)
            generator = torch.Generator().manual_seed(
                1000 * step + 10 * micro + 100_000 * rank
            )
            with around(micro == accumulation - 1):
                loss = model.loss(generator) / accumulation
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


def train_batches(loss_of, optimizer, batches, steps=3, before_step=lambda: None):
    """Trains on the mean of `batches` in each step. Returns their losses.

    Args:
        loss_of: returns the loss of (step, batch).
        batches: numbers of batches, such as the data-parallel ranks that have them.
        steps: how many, or their numbers.
        before_step: what it returns is among the losses, unless that is None.
    """
    found = []
    for step in range(steps) if isinstance(steps, int) else steps:
        for batch in batches:
            loss = loss_of(step, batch)
            (loss / len(batches)).backward()
            found.append(loss.item())
        if (value := before_step()) is not None:
            found.append(value)
        optimizer.step()
        optimizer.zero_grad()
    return found


def clip_to(model, most):
    """Returns a `before_step` that clip_to the gradients."""

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)

    return clip


def full_state(model):
    """Returns full tensors on the tests' device, also of shards on the CPU."""
    return {
        name: on_device(t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
        for name, t in model.state_dict().items()
    }


def both(make, mesh, rank, options=None, fsdp2_options=None, **training):
    """(losses, weights) under Flatshard and under FSDP2."""
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    shard(ours, fully_shard, mesh=mesh, **(options or {}))
    shard(theirs, fsdp2, mesh=mesh, **(fsdp2_options or {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = train(ours, rank, **training)
        b = train(theirs, rank, **training)
    return (a, full_state(ours)), (b, full_state(theirs))


def distance(a, b):
    """Largest difference of two states, relative to the largest weight."""
    assert a.keys() == b.keys()
    scale = max(t.abs().max().item() for t in b.values() if t.numel())
    return (
        max(
            ((a[name] - b[name]).abs().max().item() for name in a if a[name].numel()),
            default=0.0,
        )
        / scale
    )


def data(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return on_device(torch.randn(4, DIM, generator=generator))


def inputs_of(world, *shape):
    """Returns the inputs of all ranks."""
    return [
        on_device(torch.randn(*shape, generator=torch.Generator().manual_seed(r)))
        for r in range(world)
    ]


def backward_both(model, plain, inputs, rank):
    """Runs the backward of a sharded model on this rank's input, and of the plain model
    on all inputs."""
    model(inputs[rank]).square().mean().backward()
    (sum(plain(x).square().mean() for x in inputs) / len(inputs)).backward()


def assert_same_grads(model, plain):
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def assert_same_weights(model, plain, **tolerances):
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), **tolerances)


def against_one_process(model, mesh, rank, world, steps=2, act=None, **options):
    """Trains `model` sharded and, on every rank, unsharded with all ranks' data."""

    def plain_act(m, x):
        m(x).square().mean().backward()

    act = act or plain_act
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh, **options)
    ours = torch.optim.SGD(model.parameters(), lr=0.01)
    theirs = torch.optim.SGD(single.parameters(), lr=0.01)
    for step in range(steps):
        act(model, data(rank, step))
        for r in range(world):
            act(single, data(r, step))
        for p in single.parameters():
            if p.grad is not None:
                p.grad /= world
        ours.step(), ours.zero_grad()
        theirs.step(), theirs.zero_grad()
    for name, value in full_state(model).items():
        want = single.state_dict()[name]
        torch.testing.assert_close(
            value, want, **near(want), msg=lambda text: f"{name}: {text}"
        )
    return model


def two_microbatches(m, x):
    """An `act` of against_one_process: the first without collectives."""
    if hasattr(m, "no_sync"):
        with m.no_sync():
            m(x).square().mean().backward()
    else:
        m(x).square().mean().backward()
    m(x).square().mean().backward()


def refused(match, kind=ValueError):
    return pytest.raises(kind, match=match)
