"""Megatron-FSDP's tp_dim and expert meshes with a dimension of tensor parallelism."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from flatshard import megatron
from tests.python.device import named_mesh, on_device
from tests.python.sum_order import near
from tests.python.training import adamw, train_batches

DIM, EXPERTS, TOKENS = 8, 4, 12


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Row i of [experts, rows, DIM] goes to expert i. Their width may be split over
    `etp`. Ranks of `etp` have the same rows, or other ones."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) / 4)
        self.etp, self.rows = None, Replicate()

    def forward(self, x):
        if self.etp is None:
            return torch.bmm(torch.tanh(torch.bmm(x, self.up)), self.down)
        x = DTensor.from_local(x, self.etp, [self.rows]).redistribute(
            placements=[Replicate()]
        )
        y = torch.bmm(torch.tanh(torch.bmm(x, self.up)), self.down)
        return y.redistribute(placements=[self.rows]).to_local()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.experts = Experts()
        self.ep = None

    def forward(self, x):
        from torch.distributed.nn.functional import all_to_all_single

        x = x + self.mlp(x)
        rows = x.view(-1, EXPERTS, DIM).transpose(0, 1).contiguous()
        ep = 1 if self.ep is None else self.ep.size()
        if ep == 1:
            y = self.experts(rows)
        else:
            n, each = rows.shape[1], EXPERTS // ep

            def exchange(rows):
                return all_to_all_single(torch.empty_like(rows), rows, group=self.ep)

            # [ep, each, n, DIM]: each peer's tokens for this rank's experts.
            rows = exchange(rows).view(ep, each, n, DIM).transpose(0, 1)
            y = self.experts(rows.reshape(each, ep * n, DIM))
            y = y.view(each, ep, n, DIM).transpose(0, 1).contiguous()
            y = exchange(y).view(EXPERTS, n, DIM)
        return x + y.transpose(0, 1).reshape(x.shape)


def made():
    torch.manual_seed(0)
    return on_device(nn.Sequential(Layer(), Layer(), nn.Linear(DIM, DIM)))


def train(model, ranks):
    def loss_of(step, rank):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(TOKENS, DIM, generator=generator)
        return model(on_device(x)).square().mean()

    return train_batches(loss_of, adamw(model), ranks)


def state_of(model):
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in model.state_dict().items()
    }


def cut_experts(model, mesh, etp, rows):
    """Each rank keeps its experts, and of these its part of the width."""
    ep, rank = mesh["ep"].size(), mesh.get_local_rank("ep")
    for layer in model[:2]:
        layer.ep = mesh.get_group("ep")
        experts = layer.experts
        experts.etp, experts.rows = mesh[etp], rows
        for name, dim in (("up", 2), ("down", 1)):
            own = getattr(experts, name).detach().chunk(ep)[rank].contiguous()
            p = nn.Parameter(distribute_tensor(own, mesh[etp], [Shard(dim)]))
            p.allreduce = False
            setattr(experts, name, p)


def shard(model, mesh, dp, tp_dim):
    """Returns the sharded model, and the number of this rank's samples among how many."""
    megatron.fully_shard_model(
        model,
        [Layer],
        device_mesh=dp,
        expt_device_mesh=mesh["edp", tp_dim],
        dp_shard_dim="dp",
        tp_dim=tp_dim,
    )
    return model, dp.get_local_rank(), dp.size()


def shares_layers(edp, ep):
    """Ranks of tp share layers and experts, and read the same samples."""
    mesh = named_mesh(edp=edp, ep=ep, tp=2)
    dp = mesh["edp", "ep"]._flatten("dp")
    model = made()
    for layer in model[:2]:
        plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    cut_experts(model, mesh, "tp", Replicate())
    return shard(model, mesh, dp, "tp")


def shares_experts(edp, ep):
    """Ranks of etp share only experts, and read other samples."""
    mesh = named_mesh(edp=edp, ep=ep, etp=2)
    dp = mesh["edp", "ep", "etp"]._flatten("dp")
    model = made()
    cut_experts(model, mesh, "etp", Shard(1))
    return shard(model, mesh, dp, "etp")


@pytest.fixture
def ranks_4(world):
    if world != 4:
        pytest.skip("needs 4 ranks")


GRIDS = [(2, 1), (1, 2)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("make", [shares_layers, shares_experts])
def test_trains_like_one_process(make, grid, ranks_4):
    expected = made()
    model, rank, ranks = make(*grid)
    for name, value in state_of(model).items():
        assert torch.equal(value, expected.state_dict()[name]), name
    experts = model[0].experts.up
    assert experts.shape == (EXPERTS, DIM, 2 * DIM)
    assert experts.to_local().numel() == experts.numel() // 4
    train(expected, range(ranks))
    train(model, [rank])
    for name, value in state_of(model).items():
        want = expected.state_dict()[name]
        torch.testing.assert_close(value, want, **near(want), msg=name)


@pytest.mark.parametrize("make", [shares_layers, shares_experts])
def test_checkpoints_go_to_other_grids(make, ranks_4, tmp_path_factory):
    path = [str(tmp_path_factory.mktemp("dcp"))]
    torch.distributed.broadcast_object_list(path)
    saved, rank, _ = make(*GRIDS[0])
    train(saved, [rank])
    dcp.save(saved.state_dict(), checkpoint_id=path[0])
    expected = state_of(saved)
    for other in (shares_layers, shares_experts):
        loaded, _, _ = other(*GRIDS[1])
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=path[0])
        loaded.load_state_dict(state)
        for name, value in state_of(loaded).items():
            assert torch.equal(value, expected[name]), name


def test_a_mesh_with_tp_dim(ranks_4):
    """Without experts device_mesh has both dimensions, and no other name."""
    mesh = named_mesh(dp=2, tp=2)
    torch.manual_seed(0)
    expected, model = on_device(Mlp()), on_device(Mlp())
    model.load_state_dict(expected.state_dict())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    megatron.fully_shard_model(model, device_mesh=mesh, tp_dim="tp")
    assert model.up.weight.device_mesh == mesh
    train(expected, range(2))
    train(model, [mesh.get_local_rank("dp")])
    for name, value in state_of(model).items():
        torch.testing.assert_close(value, expected.state_dict()[name], msg=name)


def test_what_does_not_fit_is_named(ranks_4):
    mesh = named_mesh(dp=2, tp=2)

    def refused(error, match, model, **options):
        with pytest.raises(error, match=match):
            megatron.fully_shard_model(model, device_mesh=mesh, **options)

    refused(ValueError, "tp_dim: expected .* a dimension 'cp'", Mlp(), tp_dim="cp")
    other = parallelize_module(
        on_device(Mlp()), named_mesh(a=2, b=2)["a"], {"up": ColwiseParallel()}
    )
    refused(ValueError, "tp_dim: parameter up.weight is a DTensor", other, tp_dim="tp")
    marked = on_device(Mlp())
    marked.up.weight.tensor_model_parallel = True
    refused(
        NotImplementedError,
        "parameter up.weight has the attribute tensor_model_parallel",
        marked,
        tp_dim="tp",
    )
