"""A NaN of one rank is seen by all of them, whatever the reduction. Maxima of Gloo keep it
from some ranks only."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from flatshard import fully_shard
from tests.python.device import on_device
from tests.python.models import Mlp
from tests.python.training import shard

ORDERS = (math.inf, -math.inf, 2.0, 1.0, 3.0, -1.0)


def with_gradients(mesh, dim):
    model = Mlp(dim=13 if dim == 0 else 12, hidden=36)
    options = {}
    if dim:
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() > 1 else None
    shard(model, fully_shard, mesh=mesh, **options)
    model(on_device(torch.ones(2, 13 if dim == 0 else 12))).square().mean().backward()
    return model


@torch.no_grad()
def put(tensor, value):
    """Writes it to one element of this rank's part, if it has one."""
    local = tensor.to_local()
    if local.numel():
        local[tuple(size // 2 for size in local.shape)] = value


def of_all(tensor):
    """Returns the values of all ranks."""
    value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.contiguous())
    return torch.stack(values)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("foreach", [True, False])
def test_norms(foreach, dim, mesh, world):
    if dim and 36 % world:
        pytest.skip("36 is no multiple of the ranks")
    for which in range(world):
        model = with_gradients(mesh, dim)
        gradients = [p.grad for p in model.parameters()]
        if dist.get_rank() == which:
            put(gradients[0], math.nan)
        for order in ORDERS:
            norm = torch.nn.utils.get_total_norm(
                gradients, norm_type=order, foreach=foreach
            )
            assert of_all(norm).isnan().all(), (which, order)
        torch.nn.utils.clip_grad_norm_(
            model.parameters(), 1.0, norm_type=math.inf, foreach=foreach
        )
        assert all(of_all(g).isnan().all() for g in gradients)
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(
                model.parameters(),
                1.0,
                norm_type=math.inf,
                error_if_nonfinite=True,
                foreach=foreach,
            )


@pytest.mark.parametrize("dim", [0, 1])
def test_extremes_of_a_parameter(dim, mesh, world):
    if dim and 36 % world:
        pytest.skip("36 is no multiple of the ranks")
    for which in range(world):
        model = with_gradients(mesh, dim)
        weight = model.blocks[0].up.weight
        if dist.get_rank() == which:
            put(weight, math.nan)
        weight = weight.detach()
        for result in (
            weight.max(),
            weight.min(),
            weight.amax(),
            weight.amin(),
            # EvenShard's results are torch's DTensors.
            weight.abs().amax() if dim == 0 else weight.amax(),
            torch.linalg.vector_norm(weight, math.inf),
            torch.linalg.vector_norm(weight, -math.inf),
            weight.norm(math.inf),
            *torch._foreach_norm([weight, weight], math.inf),
        ):
            assert of_all(result).isnan().all(), which
        for result in (weight.amax(1), weight.amin(0), weight.max(1).values):
            assert of_all(result).isnan().any(1).all(), which


def test_finite_extremes(mesh, world):
    """They equal the extremes of the full tensor."""
    for dim in (0, 1):
        if dim and 36 % world:
            continue
        model = with_gradients(mesh, dim)
        for p in model.parameters():
            for order in ORDERS:
                norm = torch.nn.utils.get_total_norm([p.grad], norm_type=order)
                whole = torch.linalg.vector_norm(p.grad.full_tensor(), order)
                torch.testing.assert_close(of_all(norm), whole.expand(world))
            for of in (torch.amax, torch.amin):
                whole = of(p.detach().full_tensor())
                assert torch.equal(of_all(of(p.detach())), whole.expand(world))
