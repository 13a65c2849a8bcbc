"""Where FSDP2 raises, and where it ought to: what is wrong is named, and what to do."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.tensor import Replicate, Shard

from flatshard import fully_shard, register_fsdp_forward_method
from tests.python.device import on_device
from tests.python.models import Mlp
from tests.python.training import shard


def sharded(mesh):
    return shard(Mlp(), fully_shard, mesh=mesh)


@pytest.mark.parametrize(
    "options, error, problem",
    [
        (
            {"reshard_after_forward": "yes"},
            ValueError,
            "reshard_after_forward: .*'yes'",
        ),
        (
            {"shard_placement_fn": lambda p: 0},
            NotImplementedError,
            "shard_placement_fn: .* up.weight, got 0",
        ),
        (
            {"shard_placement_fn": lambda p: Replicate()},
            NotImplementedError,
            "shard_placement_fn: expected None or Shard.0. .*, got R",
        ),
        (
            {"shard_placement_fn": lambda p: Shard(5)},
            NotImplementedError,
            "shard_placement_fn: .*, got S.5.",
        ),
        ({"mp_policy": None}, ValueError, "mp_policy: .* got NoneType"),
        (
            {"mp_policy": Fsdp2Policy(param_dtype="bf16")},
            ValueError,
            "expected a torch.dtype, got bf16",
        ),
        ({"ignored_params": {"up.weight"}}, TypeError, "ignored_params: .* got str"),
        ({"mesh": 2}, TypeError, "mesh: expected a DeviceMesh, got 2"),
    ],
)
def test_arguments(options, error, problem, mesh):
    block = Mlp().blocks[0]
    with pytest.raises(error, match=problem):
        fully_shard(block, **{"mesh": mesh, **options})
    # It is as it was.
    assert type(block).__name__ == "Block"
    fully_shard(block, mesh=mesh)


@pytest.mark.parametrize(
    "module, error, problem",
    [
        (5, TypeError, "module: .* got int"),
        ([5], TypeError, "module: .* got int"),
        ([], ValueError, "module: .* got none"),
        (nn.ModuleList([nn.Linear(2, 2)]), ValueError, "container ModuleList"),
    ],
)
def test_what_is_no_module(module, error, problem, mesh):
    with pytest.raises(error, match=problem):
        fully_shard(module, mesh=mesh)


def test_twice(mesh):
    with pytest.raises(ValueError, match="applied to this FSDPMlp before"):
        fully_shard(sharded(mesh), mesh=mesh)


def test_outermost_unit_of_several_modules(mesh):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    fully_shard([first, second], mesh=mesh)
    with pytest.raises(RuntimeError, match=r"several modules \(FSDPLinear, FSDPLinear"):
        first(on_device(torch.ones(2, 3)))
    # As it says: under one that calls them they train.
    both = fully_shard(nn.Sequential(first, second), mesh=mesh)
    both(on_device(torch.ones(2, 3))).sum().backward()
    assert first.weight.grad is not None


def test_inner_unit_before_the_root(mesh):
    model = sharded(mesh)
    model.blocks[1](on_device(torch.ones(2, 13)))
    with pytest.raises(RuntimeError, match="run the outermost module"):
        model(on_device(torch.ones(2, 13)))


def test_parameters_without_values(mesh):
    with torch.device("meta"):
        model = Mlp()
    shard(model, fully_shard, mesh=mesh)
    problem = "parameter head.weight was on the meta device .*reset_parameters"
    with pytest.raises(RuntimeError, match=problem):
        model(on_device(torch.ones(2, 13)))


class Scaled(torch.Tensor):
    """A tensor that computes in its own way, as those of quantized weights do."""


class Tagged(nn.Parameter):
    """Another kind of parameter for whoever asks for its type."""


@pytest.mark.parametrize(
    "parameter, error, problem",
    [
        (
            lambda: nn.Parameter(torch.ones(2, 2).as_subclass(Scaled)),
            NotImplementedError,
            "parameter weight is a Scaled, .*nn.Parameter.*ignored_params",
        ),
        (
            lambda: Tagged(torch.ones(2, 2)),
            NotImplementedError,
            "parameter weight is a Tagged",
        ),
        (
            nn.UninitializedParameter,
            ValueError,
            "parameter weight has no shape yet .*run the module once",
        ),
    ],
)
def test_parameters_that_are_no_plain_tensors(parameter, error, problem, mesh):
    layer = nn.Linear(2, 2)
    layer.weight = parameter()
    with pytest.raises(error, match=problem):
        fully_shard(layer, mesh=mesh)
    ignored = {layer.weight}
    fully_shard(layer, mesh=mesh, ignored_params=ignored)
    assert layer.weight in ignored and hasattr(layer.bias, "placements")


def test_non_contiguous_parameters_keep_their_values(mesh):
    """FSDP2 refuses them."""
    layer = on_device(nn.Linear(4, 6))
    values = on_device(torch.arange(24.0)).view(4, 6).t()
    layer.weight = nn.Parameter(values)
    fully_shard(layer, mesh=mesh)
    assert torch.equal(layer.weight.full_tensor(), values)


@pytest.mark.parametrize(
    "setter, option",
    [
        ("set_reshard_after_forward", "reshard_after_forward"),
        ("set_reshard_after_backward", "reshard_after_backward"),
        ("set_unshard_in_backward", "unshard_in_backward"),
    ],
)
def test_setters_take_no_numbers(setter, option, mesh):
    with pytest.raises(ValueError, match=f"{option}: expected True or False, got 2"):
        getattr(sharded(mesh), setter)(2)


def test_setters_of_prefetched_modules(mesh):
    model = sharded(mesh)
    with pytest.raises(ValueError, match="wrapped, got Linear"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="a list of modules, got FSDPBlock"):
        model.set_modules_to_backward_prefetch(model.blocks[0])


def test_divisor(mesh):
    with pytest.raises(ValueError, match="gradient divisor > 0, got 0"):
        sharded(mesh).set_gradient_divide_factor(0)


def test_former_name_of_the_divisor(mesh, rank, world):
    grads = []
    for set_divisor in (False, True):
        torch.manual_seed(0)
        model = fully_shard(Mlp(), mesh=mesh)
        if set_divisor:
            model.set_reduce_scatter_divide_factor(2.0 * world)
        model.loss(torch.Generator().manual_seed(rank)).backward()
        grads.append(model.head.weight.grad.full_tensor())
    torch.testing.assert_close(grads[0], 2 * grads[1])


@pytest.mark.parametrize(
    "setter, value",
    [
        ("set_custom_all_gather", None),
        ("set_custom_reduce_scatter", None),
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_force_sum_reduction_for_comms", True),
        ("set_post_optim_event", None),
    ],
)
def test_setters_of_fsdp2_that_are_refused(setter, value, mesh):
    with pytest.raises(NotImplementedError, match=f"{setter} is not supported: "):
        getattr(sharded(mesh), setter)(value)


def test_forward_methods(mesh):
    with pytest.raises(ValueError, match="FSDPMlp has no method nope"):
        register_fsdp_forward_method(sharded(mesh), "nope")
