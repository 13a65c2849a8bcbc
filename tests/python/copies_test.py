"""copy_engines: all-gathers and reductions by copies between the ranks' memory."""

import pytest
import torch

import flatshard
from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.python.device import DEVICE, on_device
from tests.python.models import Mlp
from tests.python.sum_order import SMALL_MODEL
from bench.harness.options import fully_shard
from tests.python.training import STRATEGIES, distance, full_state, shard, train, twins

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
OWN = MixedPrecisionPolicy()
# Sums in another order: none on two ranks, and float32 with one rounding on more.
BOUND = {None: SMALL_MODEL, torch.bfloat16: 3e-2}


def pair(mesh, make=Mlp, **options):
    """The same model sharded, by collectives and by copies."""
    return twins(make, mesh, {"copy_engines": "all"}, **options)


def assert_alike(models, precision, world, exact=True):
    states = [full_state(model) for model in models]
    if world <= 2 and exact:  # the same products, and two gradients have one sum
        for name, value in states[0].items():
            assert value.equal(states[1][name]), name
    assert distance(*states) < BOUND[precision.param_dtype]


@pytest.mark.parametrize("precision", [OWN, BF16], ids=["own", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_by_collectives(strategy, precision, mesh, rank, world):
    models = pair(mesh, strategy=strategy, mp_policy=precision)
    for model in models:
        train(model, rank, accumulation=2)
    assert_alike(models, precision, world)


@pytest.mark.parametrize("outer", ["replicate", "optim"])
def test_on_two_axes(outer, mesh_2d, rank, world):
    models = pair(mesh_2d, outer=outer, mp_policy=BF16)
    for model in models:
        train(model, rank, accumulation=2)
    assert_alike(models, BF16, world)


@pytest.mark.parametrize(
    "options",
    [{"offload_policy": CPUOffloadPolicy()}, {"grads_in_place": True}],
    ids=["offload", "in_place"],
)
def test_beside_other_options(options, mesh, rank, world):
    models = pair(mesh, mp_policy=BF16, **options)
    for model in models:
        optimizer = flatshard.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        train(model, rank, accumulation=2, optimizer=optimizer)
    # The core's kernel that also writes compute weights is another one. It rounds some
    # intermediate values elsewhere.
    assert_alike(models, BF16, world, exact=DEVICE == "cpu")


@pytest.mark.parametrize("precision", [OWN, BF16], ids=["own", "bf16"])
def test_writes_after_an_evaluation_wait_for_the_peers(precision, mesh, rank):
    """Every rank evaluates the weights before, however late it is."""
    losses = []
    for model in pair(mesh, mp_policy=precision):
        seen = []
        for step in range(20):
            # Peers may still read when the first rank writes.
            if (step + rank) % 2:
                on_device(torch.randn(200, 200)) @ on_device(torch.randn(200, 200))
            with torch.no_grad():
                seen.append(model.loss(torch.Generator().manual_seed(step)).item())
                for p in model.parameters():
                    p.data.add_(0.01)
        losses.append(seen)
    assert losses[0] == losses[1]


def test_unsharded_by_hand(mesh, rank):
    states = []
    for model in pair(mesh):
        model.unshard()
        whole = [p.detach().clone() for p in model.head.parameters()]
        model.reshard()
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(0.5)
        model.unshard()
        halves = [p.detach().clone() for p in model.head.parameters()]
        model.reshard()
        for a, b in zip(whole, halves):
            assert a.mul(0.5).equal(b)
        states.append(full_state(model))
    assert distance(*states) == 0


@pytest.mark.skipif(DEVICE != "cpu", reason="counts pages of host memory")
def test_weights_lie_where_the_peers_read(mesh, world):
    def shared_pages():
        with open("/proc/self/maps") as maps:
            return sum("memfd:flatshard" in line for line in maps)

    before = shared_pages()
    models = pair(mesh)
    assert shared_pages() - before == (0 if world == 1 else 4 * world)
    del models


@pytest.mark.skipif(DEVICE != "cpu", reason="with GPUs it is for their links to say")
def test_auto_takes_collectives_without_gpus(mesh):
    model = shard(Mlp(), fully_shard, mesh=mesh, copy_engines="auto")
    assert not model._flatshard.sharding.copy_engines


def test_bad_options_are_named(mesh):
    with pytest.raises(ValueError, match="copy_engines: expected 'none', 'auto'"):
        fully_shard(Mlp(), mesh=mesh, copy_engines="gathers")
    model = Mlp()
    for block in model.units():
        fully_shard(block, mesh=mesh, copy_engines="all")
    fully_shard(model, mesh=mesh)
    with pytest.raises(
        ValueError, match="copy_engines='all' of unit blocks.0 has no effect"
    ):
        model.loss(torch.Generator())
