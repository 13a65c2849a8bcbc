"""Megatron-FSDP's names, first and second version: they translate, and refuse by name
what they cannot."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import flatshard
from flatshard import megatron
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard.megatron import v2
from tests.python.device import DEVICE, on_device
from tests.python.models import Block, Mlp
from tests.python.sum_order import SMALL_MODEL
from tests.python.training import distance, full_state, shard, train


def single(model, world, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(steps):
        for r in range(world):
            generator = torch.Generator().manual_seed(1000 * step + 100_000 * r)
            (model.loss(generator) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model)


@pytest.mark.parametrize("strategy", [0, 1, "optim_grads", 3])
@pytest.mark.parametrize("kind", [Block, "tests.python.models.Block"])
def test_fully_shard_trains(strategy, kind, mesh, world, rank):
    model = Mlp()
    expected = single(copy.deepcopy(model), world, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = megatron.fully_shard(
        model,
        optimizer,
        fsdp_unit_modules=[kind],
        device_mesh=mesh,
        dp_shard_dim="dp",
        zero_dp_strategy=strategy,
    )
    assert type(model.blocks[0]).__name__ == "FSDPBlock"
    train(model, rank, steps=3, optimizer=optimizer)
    assert distance(full_state(model), expected) < 1e-4


def test_bf16_modules_keep_float32_main_parameters(mesh, rank):
    model = megatron.fully_shard_model(
        Mlp().bfloat16(),
        [Block],
        device_mesh=mesh,
        mixed_precision_policy=megatron.MixedPrecisionPolicy(
            grad_comm_dtype=torch.bfloat16
        ),
    )
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(isinstance(p, ShardedTensor) for p in model.parameters())
    out = model(on_device(torch.randn(2, 13, dtype=torch.bfloat16)))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    optimizer = megatron.fully_shard_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer.step(sync_grad_before_optimizer_step=True)
    optimizer.zero_grad(zero_grad_buffer=True)
    with pytest.raises(NotImplementedError, match="install_optimized_model_weights"):
        optimizer.step(install_optimized_model_weights=False)
    with pytest.raises(NotImplementedError, match="zero_grad_buffer"):
        optimizer.zero_grad(zero_grad_buffer=False)


def test_meta_device(mesh, rank):
    with torch.device("meta"):
        model = Mlp()
    megatron.fully_shard_model(
        model, [Block], device_mesh=mesh, init_model_with_meta_device=True
    )
    model.loss(torch.Generator().manual_seed(rank)).backward()


def test_per_token_loss_sums(mesh, rank, world):
    grads = []
    for per_token in (False, True):
        torch.manual_seed(0)
        model = megatron.fully_shard_model(
            Mlp(), [Block], device_mesh=mesh, calculate_per_token_loss=per_token
        )
        model.loss(torch.Generator().manual_seed(rank)).backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    for mean, total in zip(*grads):
        torch.testing.assert_close(total, world * mean)


@pytest.mark.parametrize(
    "name, value",
    [
        ("overlap_grad_reduce", False),
        ("sync_model_each_microbatch", False),
        ("nccl_ub", True),
        ("cuda_graph_mode", "full"),
        ("use_decoupled_grad", True),
        ("suggested_communication_unit_size", 10**9),
    ],
)
def test_what_has_no_counterpart_is_named(name, value, mesh):
    with pytest.raises(NotImplementedError, match=name):
        megatron.fully_shard_model(Mlp(), device_mesh=mesh, **{name: value})


def test_bad_arguments_are_named(mesh):
    with pytest.raises(TypeError, match="no_such"):
        megatron.fully_shard_model(Mlp(), device_mesh=mesh, no_such=1)
    with pytest.raises(ValueError, match="zero_dp_strategy"):
        megatron.fully_shard_model(Mlp(), device_mesh=mesh, zero_dp_strategy=4)
    with pytest.raises(ValueError, match="outer_dp_sharding_strategy: .* got 'grads'"):
        megatron.fully_shard_model(
            Mlp(), device_mesh=mesh, outer_dp_sharding_strategy="grads"
        )
    with pytest.raises(ValueError, match="outer: 'optim' expects a mesh of 2"):
        megatron.fully_shard_model(
            Mlp(), device_mesh=mesh, outer_dp_sharding_strategy="optim"
        )
    with pytest.raises(ValueError, match="fsdp_unit_modules"):
        megatron.fully_shard_model(Mlp(), ["no.such.Class"], device_mesh=mesh)
    with pytest.raises(ValueError, match="a dimension 'xp'"):
        megatron.fully_shard_model(Mlp(), device_mesh=mesh, dp_shard_dim="xp")
    with pytest.raises(ValueError, match="after fully_shard_model"):
        megatron.fully_shard_optimizer(torch.optim.SGD(Mlp().parameters()))
    with pytest.raises(TypeError, match="flatshard.megatron.v2.fully_shard"):
        megatron.fully_shard(Mlp(), mesh)
    two = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    with pytest.raises(NotImplementedError, match="bfloat16, torch.float32"):
        megatron.fully_shard_model(two, device_mesh=mesh)
    assert two[1].weight.dtype == torch.bfloat16


# -- the second version ----------------------------------------------------------------

R, S, P = Replicate(), Shard(0), Partial("avg")
ONE_AXIS = {
    "no_shard": ([R], [P], [R]),
    "optim": ([R], [P], [S]),
    "optim_grads": ([R], [S], [S]),
    "optim_grads_params": ([S], [S], [S]),
}
TWO_AXES = {
    "no_shard": ([R, R], [P, P], [R, R]),
    "optim": ([R, R], [P, P], [R, S]),
    "optim_grads": ([R, R], [P, S], [R, S]),
    "optim_grads_params": ([R, S], [P, S], [R, S]),
    "hfsdp": ([R, S], [P, S], [S, S]),
}


def placements(lists, axes=None):
    return v2.Placements(range(len(lists[0])) if axes is None else axes, *lists)


def zero3():
    return placements(ONE_AXIS["optim_grads_params"])


def shard_v2(model, mesh, which, **options):
    with v2.fully_shard_context() as context:
        for unit in model.units():
            assert v2.fully_shard(unit, mesh, which, **options) is None
        v2.fully_shard(model, mesh, which, **options)
    return context


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_v2(model, context, rank, microbatches, steps=3):
    """Trains as `train`, with the outer reduction in the last microbatch only."""
    optimizer = sgd(model)
    v2.fully_shard_optimizer(optimizer)
    return train(
        model,
        rank,
        steps=steps,
        accumulation=microbatches,
        optimizer=optimizer,
        around=lambda is_last: v2.microbatch(context, is_last=is_last),
    )


def check_v2_trains(which, strategy, mesh, rank, microbatches):
    model = Mlp()
    plain = copy.deepcopy(model)
    shard(plain, flatshard.fully_shard, mesh=mesh, strategy=strategy)
    expected = train(plain, rank, accumulation=microbatches, optimizer=sgd(plain))
    context = shard_v2(model, mesh, placements(which))
    assert type(model.blocks[0]).__name__ == "FSDPBlock"
    found = train_v2(model, context, rank, microbatches)
    # Sums of `microbatches` gradients, in another order for what waits.
    assert found == pytest.approx(expected, rel=SMALL_MODEL)
    assert distance(full_state(model), full_state(plain)) < SMALL_MODEL
    assert context.is_last_microbatch


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_v2_trains(strategy, microbatches, mesh, rank):
    check_v2_trains(ONE_AXIS[strategy], strategy, mesh, rank, microbatches)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", TWO_AXES)
def test_v2_trains_with_replicas(strategy, microbatches, mesh_2d, rank):
    same = "optim_grads_params" if strategy == "hfsdp" else strategy
    check_v2_trains(TWO_AXES[strategy], same, mesh_2d, rank, microbatches)


def test_v2_microbatch_waits_with_the_outer_reduction(mesh_2d, rank):
    """There are gradients to step with only after the last one: the sum of all."""
    model = Mlp()
    reference = copy.deepcopy(model)
    shard(reference, flatshard.fully_shard, mesh=mesh_2d)
    context = shard_v2(model, mesh_2d, placements(TWO_AXES["optim_grads_params"]))
    for micro in range(3):
        seed = 10 * micro + rank
        reference.loss(torch.Generator().manual_seed(seed)).backward()
        # Read when the backward runs: the forward may be outside.
        loss = model.loss(torch.Generator().manual_seed(seed))
        with v2.microbatch(context, is_last=micro == 2):
            loss.backward()
        for p in model.parameters():
            assert (p.grad is None) == (micro < 2)
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor())


def test_v2_microbatch_restores_what_was_before(mesh):
    model = Mlp()
    context = shard_v2(model, mesh, zero3())
    with v2.microbatch(context, is_last=False):
        with v2.microbatch(context, is_last=True):
            assert context.is_last_microbatch
        assert not context.is_last_microbatch
        with pytest.raises(KeyError), v2.microbatch(context, is_last=True):
            raise KeyError
        assert not context.is_last_microbatch
    assert context.is_last_microbatch
    with pytest.raises(TypeError, match="microbatch: .* got FSDPMlp"):
        with v2.microbatch(model, is_last=True):
            pass


def test_v2_context_serves_several_roots(mesh, rank):
    """Runs two models, one of them without direct parameters."""
    first, second = Mlp(), torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.ReLU())
    with v2.fully_shard_context() as context:
        for module in (first.blocks[0], first, second[0], second):
            v2.fully_shard(module, mesh, placements(ONE_AXIS["optim"]))
    optimizer = sgd(torch.nn.ModuleList([first, second]))
    x = on_device(torch.randn(4, 13))
    before = second[0].weight.full_tensor().clone()
    for last in (False, True):
        with v2.microbatch(context, is_last=last):
            second(first(x)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(second[0].weight.full_tensor(), before)


@pytest.mark.parametrize("divisor", [2, 4])
def test_v2_grad_divisor_divides_the_mean(divisor, mesh, rank):
    grads = []
    for given in (1, divisor):
        torch.manual_seed(0)
        model = Mlp()
        shard_v2(model, mesh, zero3(), grad_divisor=given)
        model.loss(torch.Generator().manual_seed(rank)).backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    for mean, divided in zip(*grads):
        torch.testing.assert_close(mean, divisor * divided)


@pytest.mark.parametrize(
    "policy, main",
    [
        (None, torch.float32),
        (megatron.MixedPrecisionPolicy(None), torch.float32),
        (megatron.MixedPrecisionPolicy(torch.bfloat16), torch.bfloat16),
        (
            megatron.MixedPrecisionPolicy(
                main_params_dtype=torch.float32,
                main_grads_dtype=torch.float32,
                grad_comm_dtype=torch.bfloat16,
            ),
            torch.float32,
        ),
    ],
)
def test_v2_dtypes(policy, main, mesh):
    model = Mlp().bfloat16()
    shard_v2(model, mesh, zero3(), mixed_precision_policy=policy)
    out = model(on_device(torch.randn(2, 13, dtype=torch.bfloat16)))
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    for p in model.parameters():
        assert (p.dtype, p.grad.dtype) == (main, main)


def test_v2_axes_of_a_larger_mesh(world, rank):
    """Along the axes that are not named, copies are independent of each other."""
    mesh = init_device_mesh(DEVICE, (world, 1), mesh_dim_names=("dp", "tp"))
    lists = ONE_AXIS["optim_grads_params"]
    expected = None
    for axes in (["dp"], [0], [-2]):
        torch.manual_seed(0)
        model = Mlp()
        context = shard_v2(model, mesh, placements(lists, axes))
        losses = train_v2(model, context, rank, 1)
        assert losses == (expected or losses)
        expected = losses
    unnamed = init_device_mesh(DEVICE, (world, 1))
    for wrong, problem in (
        (placements(lists, ["xp"]), "dp_axes: .* names .*'tp'.*, got 'xp'"),
        (placements(lists, [2]), "dp_axes: .* got 2"),
        (placements(TWO_AXES["no_shard"], [1, 0]), "dp_axes: .* order"),
        (placements(TWO_AXES["no_shard"], ["dp", 0]), "dp_axes: expected different"),
    ):
        with v2.fully_shard_context(), pytest.raises(ValueError, match=problem):
            v2.fully_shard(Mlp(), mesh, wrong)
    with v2.fully_shard_context(), pytest.raises(ValueError, match="mesh_dim_names"):
        v2.fully_shard(Mlp(), unnamed, placements(lists, [0]))


@pytest.mark.parametrize(
    "lists, error, problem",
    [
        (([S, S], [S, S], [S, S]), NotImplementedError, "a mesh of one axis"),
        (([S], [P], [S]), NotImplementedError, "gradient .*Partial.* not supported"),
        (([S], [Shard(1)], [S]), NotImplementedError, "Placements.gradient: .*Shard"),
        (([R], [Partial("sum")], [R]), NotImplementedError, "expected Partial.'avg'"),
        (([R], [R], [R]), ValueError, "Placements.gradient: expected Partial"),
        (([R], [P], [P]), ValueError, "Placements.optimizer: expected Replicate"),
    ],
)
def test_v2_other_placements_are_named(lists, error, problem, world):
    shape = (world,) if len(lists[0]) == 1 else (world, 1)
    mesh = init_device_mesh(DEVICE, shape)
    with v2.fully_shard_context(), pytest.raises(error, match=problem):
        v2.fully_shard(Mlp(), mesh, placements(lists))


def test_v2_bad_arguments_are_named(mesh):
    with pytest.raises(ValueError, match="Placements.optimizer: .* 1, got 2"):
        v2.Placements([0], [S], [S], [S, S])
    with pytest.raises(RuntimeError, match="inside fully_shard_context"):
        v2.fully_shard(Mlp(), mesh, zero3())
    with pytest.raises(NotImplementedError, match="use_symmetric_memory"):
        with v2.fully_shard_context(use_symmetric_memory=True):
            pass
    with pytest.raises(NotImplementedError, match="unify_communication_stream"):
        with v2.fully_shard_context(unify_communication_stream=True):
            pass
    with v2.fully_shard_context(torch.device("meta")):
        with pytest.raises(ValueError, match=f"device meta .* mesh's type, {DEVICE}"):
            v2.fully_shard(Mlp(), mesh, zero3())
    with v2.fully_shard_context(device=torch.device(DEVICE)) as context:
        with pytest.raises(RuntimeError, match="cannot be nested"):
            with v2.fully_shard_context():
                pass
        with pytest.raises(RuntimeError, match="leave the fully_shard_context"):
            with v2.microbatch(context, is_last=True):
                pass
        with pytest.raises(ValueError, match="grad_divisor: .* got 0"):
            v2.fully_shard(Mlp(), mesh, zero3(), grad_divisor=0)
        model = Mlp().bfloat16()
        with pytest.raises(NotImplementedError, match="main_grads_dtype=torch.bf"):
            policy = v2.MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
            v2.fully_shard(model, mesh, zero3(), policy)
        v2.fully_shard(model.head, mesh, zero3())
        with pytest.raises(AssertionError, match="Linear before"):
            v2.fully_shard(model.head, mesh, zero3())
    with v2.fully_shard_context():
        with pytest.raises(ValueError, match="Mlp contains a FSDPLinear .* outside"):
            v2.fully_shard(model, mesh, zero3())


class Tagged(torch.nn.Parameter):
    pass


def test_v2_a_refused_module_is_as_before(mesh):
    model = torch.nn.Module()
    model.rows = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    model.tagged = Tagged(torch.ones(2, dtype=torch.bfloat16))
    with v2.fully_shard_context():
        with pytest.raises(NotImplementedError, match="parameter tagged is a Tagged"):
            v2.fully_shard(model, mesh, zero3())
    assert type(model) is torch.nn.Module
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_v2_optimizers_that_would_not_train_are_named(mesh):
    model = Mlp()
    early = sgd(model)
    shard_v2(model, mesh, zero3())
    with pytest.raises(ValueError, match="parameter up.weight as it was"):
        v2.fully_shard_optimizer(early)
    with pytest.raises(TypeError, match="got a Tensor of shape"):
        v2.fully_shard_optimizer(
            torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
        )
    for function in (v2.fully_shard_optimizer, megatron.fully_shard_optimizer):
        function(sgd(model), precision_aware=True)


def test_v2_checkpoint(mesh, rank, tmp_path_factory):
    folder = [str(tmp_path_factory.mktemp("checkpoint"))]
    torch.distributed.broadcast_object_list(folder)
    states = []
    for run in range(2):
        torch.manual_seed(run)
        model = Mlp()
        shard_v2(model, mesh, zero3())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if run == 0:
            train(model, rank, optimizer=optimizer)
            v2.save_checkpoint(model, optimizer, folder[0])
        else:
            v2.load_checkpoint(model, optimizer, folder[0])
        train(model, rank, steps=1, optimizer=optimizer)
        states.append(full_state(model))
    assert distance(*states) == 0
    with pytest.raises(NotImplementedError, match="sync_model_weights"):
        v2.load_checkpoint(model, optimizer, folder[0], sync_model_weights=False)


def test_both_versions_are_found_under_one_name():
    for name in ("fully_shard_context", "Placements", "microbatch"):
        assert getattr(megatron, name) is getattr(v2, name)
    assert megatron.MixedPrecisionPolicy is v2.MixedPrecisionPolicy
