"""Models on one mesh whose forwards and backwards follow one another or meet: a
generator and a discriminator, an encoder and a decoder that are sharded apart."""

import copy

import pytest
import torch
from torch import nn

from flatshard import fully_shard, share_comm_ctx
from flatshard._tensor.places import state_of
from tests.python.device import named_mesh, on_device

STEPS = 12


def layers(width=6):
    return on_device(
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    )


def shard(model, mesh, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def chain(models, x):
    for model in models:
        x = model(x)
    x.square().mean().backward()


def detached(models, x):
    for model in models:
        x = model(x.detach())
        x.square().mean().backward()


def together(models, x):
    sum(model(x).square().mean() for model in models).backward()


def back_and_forth(models, x):
    for model in (*models, *reversed(models)):
        x = model(x)
    x.square().mean().backward()


def adversarial(models, x):
    generator, critic = models[0], models[-1]
    fake = generator(x)
    critic(fake.detach()).mean().backward()
    (-critic(fake).mean()).backward()
    with torch.no_grad():
        critic(generator(x))


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize(
    "step", [chain, detached, together, back_and_forth, adversarial]
)
def test_each_gets_its_gradients(step, strategy, number, mesh, rank, world):
    plain = [layers() for _ in range(number)]
    sharded = [shard(copy.deepcopy(m), mesh, strategy=strategy) for m in plain]
    if number == 3:
        share_comm_ctx(sharded)
    optimizers = [
        torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
        for models in (plain, sharded)
    ]
    generators = [torch.Generator().manual_seed(r) for r in range(world)]
    for _ in range(STEPS):
        inputs = [torch.randn(2, 6, generator=g) for g in generators]
        for x in inputs:
            step(plain, x.to(mesh.device_type))
        for model in plain:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= world
        step(sharded, inputs[rank].to(mesh.device_type))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain, sharded):
        for (name, p), q in zip(a.named_parameters(), b.parameters()):
            torch.testing.assert_close(q.full_tensor(), p, msg=name)


@pytest.mark.parametrize("outer", [1, 2])
def test_streams_are_shared(outer, rank, world):
    if world % outer != 0:
        pytest.skip(f"needs a multiple of {outer} ranks")
    mesh = named_mesh(outer=outer, dp=world // outer)
    models = [shard(layers(), mesh) for _ in range(2)]
    share_comm_ctx(models)
    streams = [state_of(model).policy.shared_streams for model in models]
    assert streams[0] is streams[1] is not None
    # One ends, and what it throws does not reach the other.
    x = on_device(torch.randn(2, 6))
    models[0](x).sum().backward()
    with pytest.raises(ZeroDivisionError):
        models[1].register_forward_hook(lambda *_: 1 // 0)
        models[1](x)
    models[1].reset_iter_state()
    models[0](x).sum().backward()
    models.pop()
    models[0](x).sum().backward()


def test_share_comm_ctx_is_for_outermost_modules_that_did_not_run(mesh):
    share_comm_ctx([])
    with pytest.raises(ValueError, match="expected modules that fully_shard wrapped"):
        share_comm_ctx([layers()])
    model = shard(layers(), mesh)
    share_comm_ctx([model[0]])
    with pytest.raises(ValueError, match="share_comm_ctx: unit 0 is part of a model"):
        model(on_device(torch.randn(2, 6)))
    model = shard(layers(), mesh)
    model(on_device(torch.randn(2, 6)))
    with pytest.raises(RuntimeError, match="call it before the first forward"):
        share_comm_ctx([model])


def test_one_is_frozen_before_its_first_forward(mesh, rank):
    torch.manual_seed(0)
    generator, critic = layers(), layers()
    single = copy.deepcopy(critic)
    shard(generator, mesh)
    shard(critic, mesh)
    generator.requires_grad_(False)
    x = torch.ones(2, 6, device=next(single.parameters()).device)
    real = critic(x).mean()
    fake = generator(x)  # its first forward, between the critic's
    (real + critic(fake).mean()).backward()
    (single(x).mean() + single(fake).mean()).backward()
    for p, q in zip(critic.parameters(), single.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    assert all(p.grad is None for p in generator.parameters())
