"""Where FSDP2 raises, and where it ought to: what is wrong is named, and what to do."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.tensor import Replicate, Shard

import flatshard
from flatshard import register_fsdp_forward_method
from flatshard._tensor.same_values import digest
from tests.python.device import on_device
from tests.python.models import Mlp
from bench.harness.options import fully_shard
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
            "shard_placement_fn: expected None, a Shard or .*, got R",
        ),
        (
            {"shard_placement_fn": lambda p: Shard(5)},
            AssertionError,
            "Shard dim 5 is invalid for 2D tensor: shard_placement_fn: expected a dim",
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
        ([], ValueError, "module: .* got an empty list"),
        (nn.ModuleList([nn.Linear(2, 2)]), ValueError, "containers .*got ModuleList"),
    ],
)
def test_what_is_no_module(module, error, problem, mesh):
    with pytest.raises(error, match=problem):
        fully_shard(module, mesh=mesh)


def test_twice(mesh):
    with pytest.raises(AssertionError, match="applied to this FSDPMlp before"):
        fully_shard(sharded(mesh), mesh=mesh)


def test_outermost_unit_of_several_modules(mesh):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    fully_shard([first, second], mesh=mesh)
    with pytest.raises(RuntimeError, match=r"several modules \(FSDPLinear, FSDPLinear"):
        first(on_device(torch.ones(2, 3)))
    # The error's advice works: under one that calls them they train.
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
    problem = "still on meta device: .*head.weight.*reset_parameters"
    with pytest.raises(RuntimeError, match=problem):
        model(on_device(torch.ones(2, 13)))


class Scaled(torch.Tensor):
    """A tensor that computes in its own way, such as quantized weights."""


class OfTorchao(torch.Tensor):
    """A stand-in for torchao's class. tests/python/torchao_test.py has the real one."""

    __module__ = "torchao.float8.fsdp_utils"


class Tagged(nn.Parameter):
    """Another kind of parameter for callers that ask for its type."""


@pytest.mark.parametrize(
    "parameter, error, problem",
    [
        (
            lambda: nn.Parameter(torch.ones(2, 2).as_subclass(Scaled)),
            NotImplementedError,
            "parameter weight is a Scaled, .*nn.Parameter.*ignored_params",
        ),
        (
            lambda: nn.Parameter(torch.ones(2, 2).as_subclass(OfTorchao)),
            NotImplementedError,
            r"parameter weight is a OfTorchao, .*fp8=Float8Policy\(...\)\) and not torchao's",
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
    ],
)
def test_setters_of_fsdp2_that_are_refused(setter, value, mesh):
    with pytest.raises(NotImplementedError, match=f"{setter} is not supported: "):
        getattr(sharded(mesh), setter)(value)


def test_forward_methods(mesh):
    with pytest.raises(ValueError, match="FSDPMlp has no method nope"):
        register_fsdp_forward_method(sharded(mesh), "nope")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_made_before(kind, mesh, rank):
    model = Mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    later = kind(model.head.parameters(), lr=0.1)
    fully_shard(model.blocks[0], mesh=mesh)
    between = kind(model.head.parameters(), lr=0.1)
    between.step()  # these are as they were
    fully_shard(model, mesh=mesh)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    for made in (optimizer, later, between):
        problem = (
            f"{kind.__name__} was created before fully_shard: .* parameter .*weight"
        )
        with pytest.raises(RuntimeError, match=problem):
            made.step()
    afterwards = kind(model.blocks.parameters(), lr=0.1)
    afterwards.step()
    afterwards.add_param_group(optimizer.param_groups[0])
    with pytest.raises(RuntimeError, match="was created before fully_shard"):
        afterwards.step()
    kind(model.parameters(), lr=0.1).step()


def differently_made(rank, mesh, change=lambda m: None, **options):
    """Makes another rank's weights differ, from its own seed."""
    torch.manual_seed(rank)
    model = Mlp()
    change(model)
    return shard(model, fully_shard, mesh=mesh, **options)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_ranks_that_made_other_weights(strategy, mesh, rank, world):
    x = on_device(torch.ones(2, 13))

    def noticed(what):
        problem = f"parameter {what}: the ranks had different values"
        several = pytest.raises(RuntimeError, match=problem)
        return several if world > 1 else contextlib.nullcontext()

    model = differently_made(rank, mesh, strategy=strategy)
    for call in (lambda: model(x), torch.no_grad()(lambda: model(x)), model.unshard):
        with noticed("head.weight and [0-9]+ more"):
            call()

    def equal_but_the_last_row(m):
        torch.manual_seed(0)
        for p in m.parameters():
            nn.init.normal_(p)
        with torch.no_grad():
            m.blocks[1].down.bias[-1] += rank

    with noticed("blocks.1.down.bias"):
        differently_made(rank, mesh, equal_but_the_last_row, strategy=strategy)(x)
    differently_made(rank, mesh, strategy=strategy, check_same_values=False)(x)


def test_ranks_that_got_their_weights_later(mesh, rank, world, folder):
    x = on_device(torch.ones(2, 13))
    torch.manual_seed(5)
    single = Mlp()
    state = single.state_dict()
    options = StateDictOptions(full_state_dict=True)

    def load_whole(m):
        set_model_state_dict(m, state, options=options)

    def load_assigned(m):
        m.load_state_dict(state, assign=True)

    def write(m):
        with torch.no_grad():
            for name, p in m.named_parameters():
                p.copy_(fully_sharded.get_parameter(name))

    def load_checkpoint(m):
        flatshard.checkpoint.load(folder, m)

    fully_sharded = Mlp()
    fully_sharded.load_state_dict(state)
    shard(fully_sharded, fully_shard, mesh=mesh)
    flatshard.checkpoint.save(folder, 1, fully_sharded)
    for load in (load_whole, load_assigned, write, load_checkpoint):
        model = differently_made(rank, mesh)
        load(model)
        torch.testing.assert_close(model(x), single(x))
    model = differently_made(rank, mesh)
    flatshard.reset_parameters(model, seed=1)
    model(x)
    if world > 1:
        partly = differently_made(rank, mesh)
        with torch.no_grad():
            for p in partly.head.parameters():
                p.fill_(1.0)
        with pytest.raises(
            RuntimeError, match="parameter blocks.0.up.weight and 11 more"
        ):
            partly(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_digests_see_every_bit(dtype):
    values = on_device(torch.arange(15.0).to(dtype))
    one = digest(values)
    assert one.dtype == torch.int64 and one >= 0
    for i in range(15):
        other = values.clone()
        other[i] += 0.5
        assert digest(other) != one
    # The check ignores their layout.
    wide = on_device(torch.zeros(15, 2, dtype=dtype))
    wide[:, 1] = values
    moved = on_device(torch.zeros(16, dtype=dtype))[1:]
    moved.copy_(values)
    assert digest(wide[:, 1]) == one and digest(moved) == one
    assert digest(values[:0]) == 0


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_are_renormalized_in_the_forward(kind, mesh, world):
    model = nn.Sequential(kind(6, 4, max_norm=1.0))
    if world == 1:
        fully_shard(model, mesh=mesh)
        return
    with pytest.raises(NotImplementedError, match="parameter 0.weight: max_norm=1.0"):
        fully_shard(model, mesh=mesh)
