"""Experts on a part of the mesh: their module joins the block's unit."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import flatshard
from flatshard import Float8Policy, MixedPrecisionPolicy, checkpoint
from tests.python.device import named_mesh, on_device
from tests.python.sum_order import near
from tests.python.training import adamw, clip_to, train_batches
from bench.harness.options import fully_shard

DIM, EXPERTS, TOKENS = 8, 4, 12
BF16 = torch.bfloat16


class Experts(nn.Module):
    """The experts of one rank: token t goes to expert t % EXPERTS on any rank."""

    def __init__(self, n=EXPERTS):
        super().__init__()
        self.up = nn.Parameter(torch.randn(n, DIM, 2 * DIM) / 4)
        self.down = nn.Parameter(torch.randn(n, 2 * DIM, DIM) / 4)

    def forward(self, x):
        """[n, tokens, DIM] of each expert's tokens."""
        return torch.bmm(torch.tanh(torch.bmm(x, self.up)), self.down)


class Block(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.experts = Experts()
        self.group = group

    def forward(self, x):
        x = torch.tanh(self.dense(x))
        rows = x.view(-1, EXPERTS, DIM).transpose(0, 1).contiguous()
        ep = 1 if self.group is None else self.group.size()
        if ep > 1:  # [ep, local experts, tokens, DIM] of this rank's tokens
            rows = exchange(rows, self.group).view(ep, EXPERTS // ep, -1, DIM)
            n = rows.shape[2]
            rows = rows.transpose(0, 1).reshape(EXPERTS // ep, -1, DIM)
            rows = self.experts(rows).view(EXPERTS // ep, ep, n, DIM)
            rows = exchange(rows.transpose(0, 1).contiguous(), self.group)
            rows = rows.view(EXPERTS, n, DIM)
        else:
            rows = self.experts(rows)
        return x + rows.transpose(0, 1).reshape(x.shape)


def exchange(rows, group):
    from torch.distributed.nn.functional import all_to_all_single

    return all_to_all_single(torch.empty_like(rows), rows, group=group)


class Model(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mesh_of(replicas, edp, ep):
    mesh = named_mesh(replicate=replicas, edp=edp, ep=ep)
    dp = mesh["edp", "ep"]._flatten("dp")
    return mesh, dp


def sharded(model, meshes, one_call=None, **options):
    """Each rank keeps its slice of the experts.

    Args:
        one_call: of a mesh, makes what shard_placement_fn returns for experts. None:
            they get a separate call.
    """
    mesh, dp = meshes
    ep, rank = mesh["ep"].size(), mesh.get_local_rank("ep")
    has_replicas = mesh["replicate"].size() > 1
    part = mesh["replicate", "edp"] if has_replicas else mesh["edp"]
    whole = DeviceMesh._concatenate([mesh["replicate"], dp]) if has_replicas else dp
    for block in model.blocks:
        block.group = mesh.get_group("ep")
        for name, p in list(block.experts.named_parameters()):
            values = p.detach().chunk(ep)[rank].clone()
            setattr(block.experts, name, nn.Parameter(values))
        if one_call is None:
            fully_shard(block.experts, mesh=part, **options)
            fully_shard(block, mesh=whole, **options)
            continue
        experts = set(block.experts.parameters())
        fully_shard(
            block,
            mesh=whole,
            shard_placement_fn=lambda p: one_call(part) if p in experts else Shard(0),
            **options,
        )
    return fully_shard(model, mesh=whole, **options)


def train(model, ranks, optimizer=None):
    def loss_of(step, rank):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(TOKENS, DIM, generator=generator)
        return model(on_device(x)).square().mean()

    clip = clip_to(model, 0.05)
    return train_batches(loss_of, optimizer or adamw(model), ranks, before_step=clip)


def whole_state(model):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()
        for name, p in model.state_dict().items()
    }


def made():
    torch.manual_seed(0)
    return on_device(Model())


SHAPES = [(1, 2, 2), (1, 1, 4), (2, 1, 2), (1, 4, 1)]


@pytest.fixture
def ranks_4(world):
    if world != 4:
        pytest.skip("needs 4 ranks")


@dataclass
class ShardPlacementResult:
    """A stand-in for FSDP2's since torch 2.12."""

    placement: object
    mesh_info: object


ONE_CALLS = {
    "tuple": lambda mesh: (Shard(0), mesh),
    "result": lambda mesh: ShardPlacementResult(Shard(0), SimpleNamespace(mesh=mesh)),
}


@pytest.mark.parametrize("kind", ONE_CALLS)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mesh_for_each_parameter(shape, strategy, kind, ranks_4, rank, world):
    meshes = mesh_of(*shape)
    model = sharded(made(), meshes, ONE_CALLS[kind], strategy=strategy)
    other = sharded(made(), meshes, strategy=strategy)
    for p, q in zip(model.parameters(), other.parameters()):
        assert p.placements == q.placements and p.to_local().equal(q.to_local())
    losses = [train(m, [rank]) for m in (model, other)]
    assert losses[0] == losses[1]
    for p, q in zip(model.parameters(), other.parameters()):
        assert p.to_local().equal(q.to_local())


def test_what_is_frozen_beside_experts_stays_frozen(ranks_4, rank):
    model = made()
    model.head.requires_grad_(False)
    model = sharded(model, mesh_of(1, 2, 2))
    x = on_device(torch.ones(TOKENS, DIM))
    model(x).sum().backward()
    model.embed.requires_grad_(False)
    model(x).sum().backward()
    model.head.requires_grad_(True)
    with pytest.raises(NotImplementedError, match="unfrozen.* on a part of the mesh"):
        model(x)


def test_a_mesh_that_is_no_part_is_refused(ranks_4, rank):
    mesh, dp = mesh_of(1, 2, 2)
    other = named_mesh(a=2, b=2)["a"]
    for problem, own in (("should be on", other), ("or .Shard, mesh.", "edp")):
        block = on_device(Block())
        with pytest.raises((ValueError, NotImplementedError), match=problem):
            fully_shard(
                block, mesh=dp, shard_placement_fn=lambda p, own=own: (Shard(0), own)
            )


@pytest.mark.parametrize("own", [False, True], ids=["torch's", "own"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_trains_like_one_process(shape, strategy, own, ranks_4, rank, world):
    expected = made()
    train(expected, range(world))
    model = sharded(made(), mesh_of(*shape), strategy=strategy)
    optimizer = flatshard.optim.AdamW if own else torch.optim.AdamW
    train(model, [rank], optimizer(model.parameters(), lr=1e-2, eps=1e-4))
    for name, value in whole_state(model).items():
        want = expected.state_dict()[name]
        torch.testing.assert_close(value, want, **near(want), msg=name)


@pytest.mark.parametrize("compute", [None, BF16], ids=["own", "bf16"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_train_like_collectives(shape, strategy, compute, ranks_4, rank):
    policy = MixedPrecisionPolicy(compute, torch.float32)
    states = []
    for copy_engines in ("none", "all"):
        model = sharded(
            made(),
            mesh_of(*shape),
            strategy=strategy,
            mp_policy=policy,
            copy_engines=copy_engines,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        for step in range(2):
            for is_last in (False, True):
                model.set_requires_gradient_sync(is_last)
                generator = torch.Generator().manual_seed(10 * step + rank + is_last)
                x = on_device(torch.randn(TOKENS, DIM, generator=generator))
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(whole_state(model))
    for name, value in states[0].items():
        torch.testing.assert_close(
            value, states[1][name], rtol=1e-4, atol=1e-5, msg=name
        )


def test_copy_engines_are_one_for_both(ranks_4):
    meshes = mesh_of(1, 2, 2)
    block = made().blocks[0]
    fully_shard(block.experts, mesh=meshes[0]["edp"], copy_engines="all")
    with pytest.raises(
        ValueError, match="copy_engines: .*Experts.* choose one for both"
    ):
        fully_shard(block, mesh=meshes[1])


def test_shows_all_experts(ranks_4):
    model = sharded(made(), mesh_of(1, 2, 2))
    shown = dict(model.named_parameters())
    assert shown["blocks.0.experts.up"].shape == (EXPERTS, DIM, 2 * DIM)
    for name, value in whole_state(model).items():
        assert torch.equal(value, made().state_dict()[name]), name
    with pytest.raises(NotImplementedError, match="joined the unit around it"):
        model.blocks[0].experts.set_gradient_divide_factor(2.0)


def test_checkpoint_of_other_meshes(ranks_4, rank, folder):
    saved = sharded(made(), mesh_of(1, 2, 2))
    train(saved, [rank])
    dcp.save(saved.state_dict(), checkpoint_id=str(folder))
    for shape in SHAPES:
        torch.manual_seed(1)
        loaded = sharded(on_device(Model()), mesh_of(*shape))
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=str(folder))
        loaded.load_state_dict(state)
        expected = whole_state(saved)
        for name, value in whole_state(loaded).items():
            assert torch.equal(value, expected[name]), (shape, name)


@pytest.mark.parametrize("own", [False, True], ids=["torch's", "own"])
def test_own_checkpoint_goes_on_at_other_meshes(own, ranks_4, rank, folder):
    """Weights and the optimizer's state, in flatshard.checkpoint's format."""
    optimizer = flatshard.optim.AdamW if own else torch.optim.AdamW

    def make(shape):
        model = sharded(made(), mesh_of(*shape))
        return model, optimizer(model.parameters(), lr=1e-2, eps=1e-4)

    model, optim = make((1, 2, 2))
    train(model, [rank], optim)
    checkpoint.save(folder, 3, model, optim)
    expected = whole_state(model)
    moments = [optim.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    for shape in SHAPES:
        model, optim = make(shape)
        checkpoint.load(folder, model, optim)
        for name, value in whole_state(model).items():
            assert torch.equal(value, expected[name]), (shape, name)
        for p, moment in zip(model.parameters(), moments):
            assert torch.equal(optim.state[p]["exp_avg"].full_tensor(), moment)
        train(model, [rank], optim)


def test_frozen_dense_weights_and_accumulation(ranks_4, rank, world):
    def make():
        model = made()
        for name, p in model.named_parameters():
            p.requires_grad_("experts" in name)
        return model

    expected, model = make(), sharded(make(), mesh_of(1, 2, 2))
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        for one, ranks in ((expected, range(world)), (model, [rank])):
            for r in ranks:
                generator = torch.Generator().manual_seed(100 * micro + r)
                x = on_device(torch.randn(TOKENS, DIM, generator=generator))
                (one(x).square().mean() / len(ranks)).backward()
    grads = {n: p.grad for n, p in expected.named_parameters()}
    for name, p in model.named_parameters():
        if "experts" in name:
            torch.testing.assert_close(p.grad.full_tensor(), grads[name], msg=name)
        else:
            assert p.grad is None


def test_mixed_precision(ranks_4, rank, world):
    policy = MixedPrecisionPolicy(BF16, torch.float32)
    model = sharded(made(), mesh_of(1, 2, 2), mp_policy=policy)
    expected = made()
    train(model, [rank])
    train(expected, range(world))
    for name, value in whole_state(model).items():
        torch.testing.assert_close(
            value, expected.state_dict()[name], rtol=0.05, atol=0.02, msg=name
        )


def test_replicas_that_differ_are_named(ranks_4, rank):
    meshes = mesh_of(1, 2, 2)
    model = made()
    with torch.no_grad():
        model.blocks[1].experts.down += meshes[0].get_local_rank("edp")
    sharded(model, meshes)
    with pytest.raises(RuntimeError, match="blocks.1.experts.down"):
        train(model, [rank])


def test_what_is_not_supported_is_named(ranks_4):
    meshes = mesh_of(1, 2, 2)
    fp8 = Float8Policy("tensorwise", emulate=True)
    for options, word in (
        ({"fp8": fp8, "mp_policy": MixedPrecisionPolicy(BF16)}, "fp8"),
        ({"grads_in_place": True}, "grads_in_place"),
    ):
        with pytest.raises(NotImplementedError, match=word):
            fully_shard(made().blocks[0].experts, mesh=meshes[0]["edp"], **options)
    with pytest.raises(NotImplementedError, match="zero1, zero2 or zero3"):
        sharded(made(), meshes, strategy="zero0")


def test_without_a_unit_around(ranks_4):
    """The outermost module cannot be on a part of the mesh."""
    model = made()
    fully_shard(model.blocks[0].experts, mesh=mesh_of(1, 2, 2)[0]["edp"])
    with pytest.raises(RuntimeError, match="on the flattened mesh"):
        model.blocks[0].experts(on_device(torch.zeros(EXPERTS, 3, DIM)))


def test_writes_to_experts_are_seen(ranks_4, rank, world):
    """By an optimizer of torch's and by hand, also when the part's own state is gone."""
    model = sharded(made(), mesh_of(1, 2, 2))
    x = on_device(torch.ones(TOKENS, DIM))
    first = model(x)
    with torch.no_grad():
        model.blocks[0].experts.down.zero_()
        model.blocks[1].experts.down.zero_()
    assert not torch.equal(model(x), first)
    assert torch.count_nonzero(model.blocks[0].experts.down.full_tensor()) == 0
