"""Every name of the FSDP2 that is installed is offered with its meaning, or refused
with its own name."""

import inspect
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import FSDPModule as Fsdp2Module

import flatshard
from tests.python.device import DEVICE
from tests.python.models import Mlp
from bench.harness.options import fully_shard
from tests.python.training import data, distance, full_state, shard, train, twins

# The parts that fully_shard needs from the package that FSDP2 shares with FSDP1.
PUBLIC = (
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)


def sharded(mesh):
    return shard(Mlp(), fully_shard, mesh=mesh)


def loss_of(model, rank):
    return model.loss(torch.Generator().manual_seed(rank))


def test_every_method_has_its_parameters():
    for name, method in inspect.getmembers(Fsdp2Module, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = getattr(flatshard.FSDPModule, name)
        wanted = list(inspect.signature(method).parameters)
        assert list(inspect.signature(ours).parameters) == wanted, name


def test_every_option_of_fully_shard():
    wanted = inspect.signature(fsdp.fully_shard).parameters
    assert set(wanted) <= set(inspect.signature(flatshard.fully_shard).parameters)


def test_every_function():
    # torch 2.11's package has not all of them.
    assert [name for name in PUBLIC if not hasattr(flatshard, name)] == []


@pytest.mark.parametrize(
    "call, problem",
    [
        (lambda m: m.set_symm_mem_for_comm(), "set_symm_mem_for_comm.*copy_engines"),
        (
            lambda m: m.set_separate_reduce_scatter_group(False),
            "set_separate_reduce_scatter_group.False.",
        ),
        (
            lambda m: m.set_reduce_scatter_unused_params(False),
            "set_reduce_scatter_unused_params.False.",
        ),
        (
            lambda m: m.set_reduce_scatter_max_input_buffers(2, recurse=False),
            "set_reduce_scatter_max_input_buffers.*recurse",
        ),
        (
            lambda m: m.set_keep_unsharded_storage(True),
            "set_keep_unsharded_storage.*set_reshard_after_forward",
        ),
        (
            lambda m: m.set_manual_backward_finalization(True),
            "set_manual_backward_finalization.True.*no_sync",
        ),
        (lambda m: m.finalize_backward(), "finalize_backward.*leave the call out"),
        (lambda m: m.get_pending_gradients(), "get_pending_gradients.*are in .grad"),
    ],
)
def test_what_is_refused(call, problem, mesh):
    with pytest.raises(NotImplementedError, match=problem):
        call(sharded(mesh))


def test_options_that_are_refused(mesh):
    for dims in (
        object(),
        MeshDims("tp"),
        MeshDims(("dp", "tp")),
        MeshDims(None, "dp"),
    ):
        with pytest.raises(NotImplementedError, match="dp_mesh_dims.*distribute them"):
            fully_shard(Mlp(), mesh=mesh, dp_mesh_dims=dims)
    model = sharded(mesh)
    model.head.weight.grad_dtype = None
    with pytest.raises(NotImplementedError, match="grad_dtype None of .*head.weight"):
        loss_of(model, 0)


def test_a_dtype_for_each_parameter(mesh, rank):
    bf16 = torch.bfloat16

    def keeps(p):
        return p.dtype if p.dim() == 1 else None

    policy = flatshard.MixedPrecisionPolicy(
        param_dtype=bf16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
        param_dtype_override_fn=keeps,
    )
    model = Mlp()
    fully_shard(model.blocks[0], mesh=mesh, mp_policy=policy)
    seen = []
    up = model.blocks[0].up
    up.register_forward_pre_hook(
        lambda m, args: seen.extend([m.weight.dtype, m.bias.dtype])
    )
    with pytest.raises(RuntimeError, match="dtype"):
        loss_of(model, rank)
    assert seen == [bf16, torch.float32]
    wrong = flatshard.MixedPrecisionPolicy(
        param_dtype=bf16, param_dtype_override_fn=lambda p: torch.float16
    )
    with pytest.raises(
        ValueError, match="param_dtype_override_fn expected .* up.weight"
    ):
        fully_shard(Mlp().blocks[0], mesh=mesh, mp_policy=wrong)
    with pytest.raises(NotImplementedError, match="not supported with fp8"):
        fp8 = flatshard.Float8Policy("rowwise")
        fully_shard(Mlp(), mesh=mesh, mp_policy=policy, fp8=fp8)


def test_sums_instead_of_means(mesh, rank, world):
    grads = []
    for forces in (False, True):
        torch.manual_seed(0)
        model = sharded(mesh)
        model.set_force_sum_reduction_for_comms(forces)
        model.blocks[0].set_force_sum_reduction_for_comms(forces)
        loss_of(model, rank).backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    torch.testing.assert_close(*grads)


def test_a_forward_waits_for_the_event_after_the_optimizer(mesh, rank):
    class Event:
        waits = 0

        def wait(self):
            Event.waits += 1

    model = sharded(mesh)
    model.set_post_optim_event(Event())
    for _ in range(2):
        loss_of(model, rank).backward()
    assert Event.waits == 1


def test_what_is_so_already(mesh):
    model = sharded(mesh)
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_keep_unsharded_storage(False)
    model.set_manual_backward_finalization(False)


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_more_input_buffers_change_no_bit(buffers, mesh, rank):
    plain, model = twins(lambda: Mlp(blocks=5), mesh, {})
    model.set_reduce_scatter_max_input_buffers(buffers)
    assert train(model, rank) == train(plain, rank)
    assert distance(full_state(model), full_state(plain)) == 0


@pytest.mark.parametrize(
    "value, error", [(True, TypeError), ("2", TypeError), (0, ValueError)]
)
def test_input_buffers_are_a_number(value, error, mesh):
    with pytest.raises(error, match="max_input_buffers: expected"):
        sharded(mesh).set_reduce_scatter_max_input_buffers(value)


def test_reset_iter_state_lets_the_next_step_start_clean(mesh, rank):
    plain, model = twins(Mlp, mesh, {})
    model.reset_iter_state()  # nothing to do yet
    generator = torch.Generator().manual_seed(rank)
    loss = model.loss(generator)
    model.blocks[1].register_forward_pre_hook(fail_once(RuntimeError("once")))
    with pytest.raises(RuntimeError, match="once"):
        model.loss(generator)
    model.reset_iter_state()
    del loss
    assert all(p.grad is None for p in model.parameters())
    assert train(model, rank) == train(plain, rank)
    assert distance(full_state(model), full_state(plain)) == 0


def fail_once(error):
    def hook(module, args):
        if hook.fails:
            hook.fails = False
            raise error

    hook.fails = True
    return hook


def test_reset_iter_state_is_the_roots(mesh):
    model = sharded(mesh)
    model.reset_iter_state()
    with pytest.raises(ValueError, match="outermost"):
        model.blocks[0].reset_iter_state()


@dataclass
class MeshDims:
    """DataParallelMeshDims of torch 2.12 and later."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


@pytest.mark.parametrize("names", [("dp",), ("outer", "dp")])
def test_mesh_dims_that_name_all_of_the_mesh(names, request, mesh, rank):
    mesh = mesh if len(names) == 1 else request.getfixturevalue("mesh_2d")
    found = []
    for dims in (
        None,
        MeshDims(*reversed(names)),
        MeshDims(*((n,) for n in names[::-1])),
    ):
        torch.manual_seed(0)
        model = fully_shard(Mlp(), mesh=mesh, dp_mesh_dims=dims)
        model(data(rank)).square().mean().backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other)
    )


def test_no_offload_policy_offloads_nothing(mesh, rank):
    model = fully_shard(Mlp(), mesh=mesh, offload_policy=None)
    model(data(rank)).square().mean().backward()
    assert all(p.grad.device.type == DEVICE for p in model.parameters())
    with pytest.raises(
        ValueError, match="offload_policy: expected .* or None, got 'no'"
    ):
        fully_shard(Mlp(), mesh=mesh, offload_policy="no")
