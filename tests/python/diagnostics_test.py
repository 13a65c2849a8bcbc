"""What flatshard.diagnostics tells: norms of parameters, and where a NaN came from."""

import copy

import pytest
import torch
import torch.distributed as dist

from flatshard import fully_shard
from flatshard.diagnostics import parameter_norms, report_nan_in_param_grad
from flatshard.megatron import fully_shard_model
from tests.python.models import Mlp
from tests.python.training import STRATEGIES, shard


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norms_are_those_of_one_process(strategy, mesh, rank, world):
    model = Mlp()
    model.blocks[2].requires_grad_(False)
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh, strategy=strategy)
    assert all(norm.grad is None for norm in parameter_norms(model))
    model.loss(torch.Generator().manual_seed(rank)).backward()
    for r in range(world):
        (single.loss(torch.Generator().manual_seed(r)) / world).backward()
    found = {norm.name: norm for norm in parameter_norms(model)}
    assert found.keys() == dict(single.named_parameters()).keys()
    for name, p in single.named_parameters():
        assert found[name].weight == pytest.approx(p.norm().item(), rel=1e-5)
        if p.grad is None:
            assert found[name].grad is None
        else:
            assert found[name].grad == pytest.approx(p.grad.norm().item(), rel=1e-4)
    # The gradients are still the program's: they accumulate and go.
    before = model.head.weight.grad.full_tensor().clone()
    model.loss(torch.Generator().manual_seed(rank)).backward()
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), 2 * before)
    model.zero_grad()
    assert all(norm.grad is None for norm in parameter_norms(model))
    with pytest.raises(ValueError, match="outermost module .*, got unit blocks.0"):
        parameter_norms(model.blocks[0])


@pytest.mark.parametrize("through", ["flatshard", "megatron"])
def test_a_nan_is_named_before_it_is_reduced(through, mesh, rank):
    if through == "megatron":
        model = fully_shard_model(
            Mlp(), [type(Mlp().blocks[0])], report_nan_in_param_grad=True
        )
    else:
        model = shard(Mlp(), fully_shard, mesh=mesh)
        report_nan_in_param_grad(model)
    loss = lambda: model.loss(torch.Generator().manual_seed(rank))  # noqa: E731
    loss().backward()  # nothing to report

    def spoil(*_):
        # Every rank has one, each in another place.
        bias = model.blocks[1].up.bias
        bias.register_hook(lambda grad: grad.index_fill(0, at, float("nan")))

    at = torch.tensor([3 + rank], device=next(model.parameters()).device)
    handle = model.blocks[1].register_forward_pre_hook(spoil)
    problem = rf"rank {rank}/.*unit blocks.1.*before its reduction.* of parameter "
    problem += rf"blocks.1.up.bias is nan at flat element {3 + rank} of shape"
    with pytest.raises(RuntimeError, match=problem):
        loss().backward()
    handle.remove()
    dist.barrier()
    report_nan_in_param_grad(model, False)
    loss().backward()
