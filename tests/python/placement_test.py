"""How parameters are split: like torch.chunk, and along other dimensions."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flatshard import MixedPrecisionPolicy, checkpoint
from tests.python.device import named_mesh, on_device
from tests.python.training import assert_same_weights, backward_both, inputs_of
from bench.harness.options import fully_shard

STRATEGIES = ["zero3", "zero2", "zero1", "zero0"]


class Net(nn.Module):
    """Sizes that no number of ranks divides, except for `wide` and `deep` (12)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.wide = nn.Linear(7, 12)
        self.deep = nn.Conv1d(12, 12, 3, padding=1)
        self.last = nn.Linear(12, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.wide(self.first(x).relu())
        return self.last(self.deep(x.unsqueeze(-1)).squeeze(-1)) * self.scale


def largest_dim(p):
    return Shard(max(range(p.dim()), key=lambda d: p.shape[d] * (p.shape[d] % 12 == 0)))


def sharded(plain, units=True, **options):
    model = copy.deepcopy(plain)
    if units:
        for name in ("first", "deep"):
            fully_shard(getattr(model, name), **options)
    return fully_shard(model, **options)


def check_pieces(model, plain):
    """Compares with the placements of torch.distributed.tensor."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        expected = distribute_tensor(q.detach(), p.device_mesh, p.placements)
        assert torch.equal(p.to_local(), expected.to_local()), name
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
            torch.testing.assert_close(p.grad.to_local(), grad.to_local())


def train_both(model, plain, rank, world, num_steps=3):
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    inputs = inputs_of(world, 2, 5)
    for _ in range(num_steps):
        backward_both(model, plain, inputs, rank)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("placement", ["chunk", "largest"])
def test_pieces_are_those_of_dtensor(placement, strategy, mesh, rank, world):
    plain = on_device(Net())
    options = {} if strategy == "zero0" else {"granularity": "chunk"}
    if placement == "largest":
        options["shard_placement_fn"] = largest_dim
    model = sharded(plain, mesh=mesh, strategy=strategy, **options)
    check_pieces(model, plain)
    if placement == "largest" and strategy != "zero0" and world > 1:
        assert tuple(model.wide.weight.placements) == (Shard(0),)
        assert tuple(model.last.weight.placements) == (Shard(1),)
    train_both(model, plain, rank, world)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("granularity", ["dim0", "chunk"])
def test_hsdp(granularity, rank, world):
    if world != 4:
        pytest.skip("a mesh of two by two")
    mesh = named_mesh(replicas=2, shards=2)
    plain = on_device(Net())
    model = sharded(
        plain,
        mesh=mesh,
        granularity=granularity,
        shard_placement_fn=largest_dim,
    )
    train_both(model, plain, rank, world)
    assert_same_weights(model, plain)


def last_dim(p):
    return Shard(-1) if p.shape[-1] == 12 and p.dim() > 1 else None


def test_mixed_precision_and_writes(mesh, rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plain = on_device(Net())
    model = sharded(plain, mesh=mesh, mp_policy=policy, shard_placement_fn=last_dim)
    weight = model.last.weight
    x = on_device(torch.ones(1, 5))
    model(x)
    with torch.no_grad():
        weight.zero_()
    assert model(x).eq(0).all()
    with torch.no_grad():
        weight.copy_(distribute_tensor(plain.last.weight, mesh, weight.placements))
    there = model(x).float()
    torch.testing.assert_close(there, plain(x), rtol=0.1, atol=0.1)
    with torch.no_grad():
        weight.to_local().zero_()
    assert model(x).eq(0).all()
    weight.data = torch.ones_like(weight)
    assert weight.full_tensor().eq(1).all()


def test_what_modules_and_hooks_see(mesh, rank, world):
    plain = on_device(Net())
    model = sharded(plain, mesh=mesh, shard_placement_fn=last_dim)
    seen = []
    model.last.register_forward_pre_hook(
        lambda m, args: seen.append(m.weight.detach().clone())
    )
    model.last.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.full_tensor())
    )
    x = on_device(torch.ones(1, 5))
    model(x).sum().backward()
    plain(x).sum().backward()
    assert seen[0].equal(plain.last.weight)
    torch.testing.assert_close(seen[1], plain.last.weight.grad)
    for _ in range(2):  # added up, a gradient of the user's too
        model(x).sum().backward()
    model.last.weight.grad = torch.ones_like(model.last.weight)
    model(x).sum().backward()
    torch.testing.assert_close(
        model.last.weight.grad.full_tensor(), plain.last.weight.grad + 1
    )
    norm = nn.utils.clip_grad_norm_([model.last.weight, model.first.weight], 1e-3)
    assert isinstance(norm, DTensor) or norm.dim() == 0


def test_state_dicts(mesh, rank, world, tmp_path):
    plain = on_device(Net())
    model = sharded(plain, mesh=mesh, shard_placement_fn=last_dim)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        assert whole[name].equal(value), name
    other = sharded(on_device(Net()), mesh=mesh, granularity="chunk")
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True))
    check_pieces(other, plain)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(
        {n: distribute_tensor(v, mesh) for n, v in plain.state_dict().items()},
        assign=True,
    )
    for p, q in zip(model.parameters(), plain.parameters()):
        assert p.full_tensor().equal(q)


def test_checkpoints_of_dcp(mesh, rank, world, tmp_path_factory):
    plain = on_device(Net())
    model = sharded(plain, mesh=mesh, shard_placement_fn=last_dim)
    folder = [str(tmp_path_factory.mktemp("dcp"))]
    torch.distributed.broadcast_object_list(folder, src=0)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    other = sharded(on_device(Net()), mesh=mesh, granularity="chunk")
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state)
    check_pieces(other, plain)


def test_made_on_meta(mesh, rank, world):
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mesh=mesh, shard_placement_fn=last_dim)
    model.to_empty(device=mesh.device_type)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    assert model(on_device(torch.ones(1, 5))).gt(0).all()
    assert model.last.weight.full_tensor().eq(0.5).all()


def test_a_replaced_parameter(mesh, rank, world):
    plain = on_device(Net())
    model = sharded(plain, units=False, mesh=mesh, shard_placement_fn=last_dim)
    values = on_device(torch.full((3, 12), 0.25))
    model.last.weight = nn.Parameter(distribute_tensor(values, mesh, [Shard(1)]))
    kept = model.last.weight
    model(on_device(torch.ones(1, 5))).sum().backward()
    assert model.last.weight is kept
    assert kept.full_tensor().eq(0.25).all() and kept.grad is not None


def test_frozen_and_other_dtypes_between_steps(mesh, rank, world):
    plain = on_device(Net())
    plain.last.requires_grad_(False)
    model = sharded(plain, units=False, mesh=mesh, shard_placement_fn=last_dim)
    x = on_device(torch.ones(1, 5))
    model(x).sum().backward()
    assert model.last.weight.grad is None
    model.last.requires_grad_(True)
    model(x).sum().backward()
    assert model.last.weight.full_tensor().equal(plain.last.weight)
    assert model.last.weight.grad.dtype == torch.float32
    model.double()
    model(x.double()).sum().backward()
    assert model.last.weight.grad.dtype == torch.float64


def test_refusals(mesh, rank, world, tmp_path):
    if world == 1:
        pytest.skip("nothing is cut")

    def wrap(**options):
        return fully_shard(on_device(Net()), mesh=mesh, **options)

    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1: .*5"):
        wrap(shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    with pytest.raises(AssertionError, match="expected a dimension of parameter scale"):
        wrap(shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(
        NotImplementedError, match="expected None, a Shard or .Shard, m"
    ):
        wrap(shard_placement_fn=lambda p: (Shard(0), "dp"))
    model = wrap(shard_placement_fn=last_dim)
    model(on_device(torch.ones(1, 5)))
    with pytest.raises(NotImplementedError, match="last.weight .* dimension 1"):
        checkpoint.save(tmp_path, 1, model)
