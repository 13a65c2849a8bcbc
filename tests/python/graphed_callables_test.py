"""flatshard.make_graphed_callables: torch's signature, the bits of eager training."""

import functools

import pytest
import torch
from torch import nn

import flatshard
from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.python.device import DEVICE, on_device
from tests.python.graph_training import (
    BLOCKS,
    DIM,
    LATE,
    REPLAYED,
    SEQ,
    STEPS,
    WARMUP,
    Around,
    Body,
    Transformer,
    assert_replays,
    assert_same,
    pair,
    shard,
    train,
)
from tests.python.models import Mlp
from bench.harness.options import fully_shard

pytestmark = pytest.mark.usefixtures("graphs_on_cpu")


def like(*shape, requires_grad=False, dtype=torch.float32):
    return torch.empty(*shape, requires_grad=requires_grad, dtype=dtype, device="meta")


def samples(batch=2, factor=1.0):
    """Returns samples of a Transformer's block."""
    x = like(batch, SEQ, DIM, requires_grad=True)
    mask = like(batch, 1, SEQ, SEQ, dtype=torch.bool)
    return (x, (like(SEQ, DIM), like(SEQ, DIM))), {"factor": factor, "mask": mask}


def make_graphed(model, num_warmup_iters=WARMUP, sample=None, **options):
    args, kwargs = sample or samples()
    count = len(model.blocks)
    return flatshard.make_graphed_callables(
        tuple(model.blocks),
        (args,) * count,
        num_warmup_iters,
        sample_kwargs=(kwargs,) * count,
        **options,
    )


def trained_pair(mesh, rank, sample=None, before=None, warmup=WARMUP, **options):
    """Trains eagerly and with graphs. Stats of the latter, and its model."""
    eager, graphs = pair(Transformer, mesh, cuda_graph=False, **options)
    make_graphed(graphs, warmup, sample)
    assert_same(train(eager, rank, before=before), train(graphs, rank, before=before))
    return flatshard.cuda_graph_stats(graphs), graphs


@pytest.mark.parametrize("strategy", ("zero1", "zero3"))
def test_bits_of_eager_training(strategy, mesh, rank):
    stats, model = trained_pair(mesh, rank, strategy=strategy)
    assert_replays(stats, REPLAYED * BLOCKS)
    assert stats["captures"] == 2 * BLOCKS
    assert type(model.blocks[0]).__name__ == "FSDPBlock"


def test_what_it_returns(mesh):
    """The same modules: a tuple for a tuple, one for one."""
    model = shard(Transformer(), mesh, False)
    blocks = tuple(model.blocks)
    assert make_graphed(model) is not None
    args, kwargs = samples()
    found = flatshard.make_graphed_callables(
        blocks[:2], (args, args), sample_kwargs=(kwargs, kwargs)
    )
    assert isinstance(found, tuple)
    assert [a is b for a, b in zip(found, blocks)] == [True, True]
    one = flatshard.make_graphed_callables(blocks[2], args, sample_kwargs=kwargs)
    assert one is blocks[2]


@pytest.mark.parametrize("warmup", (1, 2, 4))
def test_warm_up_steps(warmup, mesh, rank):
    stats, _ = trained_pair(mesh, rank, warmup=warmup)
    # On several ranks buffers may be planned again after the first step.
    late = (1, 2) if warmup == 1 else (0,)
    assert STEPS - warmup - stats["forward_replays"] / BLOCKS in (0, *late)


def test_the_largest_warm_up_counts(mesh, rank):
    model = shard(Transformer(), mesh, False)
    args, kwargs = samples()
    for block, warmup in zip(model.blocks, (1, 5, 2)):
        flatshard.make_graphed_callables(block, args, warmup, sample_kwargs=kwargs)
    train(model, rank)
    assert_replays(flatshard.cuda_graph_stats(model), (STEPS - 5) * BLOCKS)


def test_samples_as_they_are_cast(mesh, rank):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    stats, _ = trained_pair(mesh, rank, mp_policy=policy)
    assert_replays(stats, REPLAYED * BLOCKS)


@pytest.mark.parametrize(
    "sample, reason",
    [
        (
            samples(batch=3),
            r"another shape or dtype than in sample_args: \[3, 6, 16\], torch.float32",
        ),
        (
            samples(factor=0.5),
            r"not a tensor has another value than in sample_kwargs\['factor'\]",
        ),
        (
            ((like(2, SEQ, DIM), samples()[0][1]), samples()[1]),
            "needs a gradient and does not in sample_args",
        ),
        (
            ((samples()[0][0], list(samples()[0][1])), samples()[1]),
            "nested in another way than sample_args",
        ),
        (
            (samples()[0], {"mask": samples()[1]["mask"]}),
            "other keyword arguments than sample_kwargs",
        ),
        (
            (samples()[0], {"factor": like(1), "mask": samples()[1]["mask"]}),
            r"not a tensor as in sample_kwargs\['factor'\]",
        ),
    ],
)
def test_calls_unlike_the_sample_stay_eager(sample, reason, mesh, rank):
    stats, _ = trained_pair(mesh, rank, sample)
    (found,) = stats["fallbacks"]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)
    assert stats["fallbacks"][found] // BLOCKS in LATE
    assert_replays(stats, 0, 0, stats["fallbacks"])


def test_the_sample_says_what_is_captured(mesh, rank):
    """Not the last step of the warm-up, because that has another shape."""

    def before(model, step):
        return {"batch": 3} if step == WARMUP - 1 else {}

    eager, graphs = pair(Transformer, mesh, cuda_graph=False)
    make_graphed(graphs)
    assert_same(
        train(eager, rank, steps=8, before=before),
        train(graphs, rank, steps=8, before=before),
    )
    assert flatshard.cuda_graph_stats(graphs)["forward_replays"] >= 3 * BLOCKS


def trained_around(body, call, mesh, rank, **options):
    """Trains eagerly and with a graphed block, for equal bits. Stats of the latter."""
    sample = tuple(like(4, DIM, requires_grad=True) for _ in range(2))
    eager, graphs = pair(lambda: Around(body, call), mesh, cuda_graph=False)
    flatshard.make_graphed_callables(graphs.block, sample, **options)
    assert_same(train(eager, rank), train(graphs, rank))
    stats = flatshard.cuda_graph_stats(graphs)
    assert stats["forward_replays"] in LATE
    assert_replays(stats, stats["forward_replays"])


def test_an_argument_that_is_not_used(mesh, rank):
    arguments = (
        lambda block, x, y: block.inner(x),
        lambda block, x: block(x, x * 2),
        mesh,
        rank,
    )
    with pytest.raises(
        RuntimeError, match="argument tensor 1 of unit block .*allow_unused"
    ):
        trained_around(*arguments)
    trained_around(*arguments, allow_unused_input=True)


@pytest.mark.parametrize(
    "body",
    [
        lambda block, x, y: (block.inner(x), y),
        lambda block, x, y: block.inner(x + y.relu()),
        lambda block, x, y: (block.inner(x), block.inner(y).exp())[0] + y,
    ],
)
def test_arguments_that_are_used(body, mesh, rank):
    def call(block, x):
        out = block(x, x * 2)
        return out if isinstance(out, torch.Tensor) else out[0] + out[1]

    trained_around(body, call, mesh, rank)


def test_beside_cuda_graph(mesh, rank):
    """After fully_shard(..., cuda_graph=True) the samples bound what is captured."""
    model = shard(Transformer(), mesh, True)
    args, kwargs = samples(batch=3)
    flatshard.make_graphed_callables(model.blocks[0], args, sample_kwargs=kwargs)
    train(model, rank)
    stats = flatshard.cuda_graph_stats(model)
    assert stats["forward_replays"] // (BLOCKS - 1) in LATE
    (reason,) = (r for r in stats["fallbacks"] if "sample_args" in r)
    assert stats["fallbacks"][reason] in LATE


# -- refused ---------------------------------------------------------------------------


def refused(error, match, module, mesh, **arguments):
    arguments = {"callables": module, "sample_args": (like(4, DIM),)} | arguments
    with pytest.raises(error, match=match):
        flatshard.make_graphed_callables(**arguments)
    inner = arguments["callables"]
    if isinstance(inner, nn.Module):
        assert "_flatshard_graph" not in inner.__dict__


@pytest.mark.parametrize(
    "arguments, error, problem",
    [
        ({"num_warmup_iters": 0}, ValueError, "num_warmup_iters: .* 1 or more, got 0"),
        ({"num_warmup_iters": True}, ValueError, "num_warmup_iters: .* got True"),
        ({"allow_unused_input": 1}, ValueError, "allow_unused_input: .* got 1"),
        ({"pool": (0, 1)}, NotImplementedError, r"pool: expected None, got \(0, 1\)"),
        ({"capture_time_hooks": []}, NotImplementedError, "capture_time_hooks"),
        (
            {"capture_error_mode": "global"},
            NotImplementedError,
            "capture_error_mode: expected None or 'thread_local', got 'global'",
        ),
        ({"sample_args": [1]}, TypeError, "sample_args: expected a tuple .* a list"),
        ({"sample_kwargs": ()}, TypeError, "sample_kwargs: expected a dict"),
        ({"sample_args": (object(),)}, TypeError, "sample_args: .* got a object"),
        (
            {"sample_args": (torch.eye(2).to_sparse(),)},
            TypeError,
            "sample_args: expected strided tensors, got a torch.sparse",
        ),
        ({"callables": torch.relu}, TypeError, "torch.cuda.make_graphed_callables"),
        (
            {"callables": nn.Linear(2, 2)},
            TypeError,
            "fully_shard wrapped.* got a Linear",
        ),
        (
            {"callables": [nn.Linear(2, 2)]},
            TypeError,
            "fully_shard wrapped.* got a list",
        ),
    ],
)
def test_arguments(arguments, error, problem, mesh):
    block = fully_shard(Body(lambda b, x: b.inner(x)), mesh=mesh)
    refused(error, problem, block, mesh, **arguments)


def test_tuples_that_do_not_match(mesh):
    model = shard(Transformer(), mesh, False)
    args, kwargs = samples()
    graph = functools.partial(flatshard.make_graphed_callables, tuple(model.blocks))
    with pytest.raises(ValueError, match="sample_args: .* each of 3 callables, got 2"):
        graph((args, args))
    with pytest.raises(ValueError, match="sample_kwargs: .* of 3 callables, got dict"):
        graph((args,) * 3, sample_kwargs=kwargs)
    with pytest.raises(ValueError, match="the same FSDPBlock is given twice"):
        flatshard.make_graphed_callables((model.blocks[0],) * 2, (args,) * 2)
    assert all("_flatshard_graph" not in block.__dict__ for block in model.blocks)


def test_samples_on_another_device(mesh):
    if DEVICE == "cpu":
        pytest.skip("the mesh is on CPUs, where samples are, too")
    block = fully_shard(Body(lambda b, x: b.inner(x)), mesh=mesh)
    with pytest.raises(ValueError, match="tensors on cuda:. or meta, got one on cpu"):
        flatshard.make_graphed_callables(block, (torch.empty(4, DIM),))


def test_cpus(mesh, monkeypatch):
    if DEVICE != "cpu":
        pytest.skip("of CPUs")
    monkeypatch.delenv("FLATSHARD_EMULATE_CUDA_GRAPHS")
    block = fully_shard(Body(lambda b, x: b.inner(x)), mesh=mesh)
    refused(ValueError, "make_graphed_callables: expected a mesh of GPUs", block, mesh)


def test_offloading_and_lists(mesh):
    block = Body(lambda b, x: b.inner(x))
    fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy())
    refused(
        NotImplementedError,
        "make_graphed_callables with CPUOffloadPolicy",
        block,
        mesh,
    )
    blocks = list(Mlp().blocks)
    fully_shard(blocks, mesh=mesh)
    refused(NotImplementedError, "one module, got a list of 3", blocks[0], mesh)


def test_units_inside(mesh):
    model = Mlp()
    fully_shard(model.blocks[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    refused(ValueError, "Mlp contains a unit, blocks.1", model, mesh)


def test_buffers_that_are_trained(mesh):
    block = Body(lambda b, x: b.inner(x) * b.scale)
    block.register_buffer("scale", on_device(torch.ones(())).requires_grad_())
    fully_shard(block, mesh=mesh)
    refused(ValueError, "buffers that need no gradient, got scale", block, mesh)


def test_after_a_forward(mesh):
    model = shard(Around(lambda b, x: b.inner(x), lambda b, x: b(x)), mesh, False)
    model.loss(torch.Generator())
    refused(RuntimeError, "unit block ran before", model.block, mesh)
