"""flatshard.diagnostics reports norms of parameters, and where a NaN came from."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch.distributed.tensor.debug import CommDebugMode

import flatshard
from flatshard import fully_shard
from flatshard.diagnostics import parameter_norms, report_nan_in_param_grad
from flatshard.megatron import fully_shard_model
from tests.python.models import Mlp
from tests.python.sum_order import SMALL_MODEL
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
        assert found[name].weight == pytest.approx(p.norm().item(), rel=SMALL_MODEL)
        if p.grad is None:
            assert found[name].grad is None
        else:
            assert found[name].grad == pytest.approx(p.grad.norm().item(), rel=1e-4)
    # The gradients still belong to the program: they accumulate, and zero_grad drops
    # them.
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


def counts_of(mode):
    return {str(name): count for name, count in mode.get_comm_counts().items()}


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("reshards", [None, False])
def test_comm_debug_mode_counts_as_with_fsdp2(reshards, replicas, request, rank):
    mesh = request.getfixturevalue("mesh_2d" if replicas else "mesh")
    found = []
    for library in (flatshard, fsdp2):
        model = Mlp()
        for block in model.blocks:
            library.fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
        library.fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
        data = torch.Generator().manual_seed(rank)
        with CommDebugMode() as mode:
            loss = model.loss(data)
        found.append(counts_of(mode))
        with CommDebugMode() as mode:
            loss.backward()
        found.append(counts_of(mode))
        model.loss(data).backward()  # what nobody watches is not counted later
        model.set_requires_gradient_sync(False)
        with CommDebugMode() as mode:
            model.loss(data).backward()
        found.append(counts_of(mode))
        model.set_requires_gradient_sync(True)
        with CommDebugMode() as mode:
            model.loss(data).backward()
            table = mode.generate_comm_debug_tracing_table(noise_level=3)
        found.append(counts_of(mode))
        assert "_reduce_scatter_base_" in table or mesh.size(mesh.ndim - 1) == 1
        with CommDebugMode() as mode:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        found.append(counts_of(mode))
    assert found[:5] == found[5:]
