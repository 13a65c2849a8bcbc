"""fully_shard(..., cuda_graph=True): forwards of blocks, and their backwards, as CUDA
graphs with the bits of eager training.

On CPUs a replay calls the captured forward again. The rest is the same. On GPUs
(FLATSHARD_TEST_DEVICE=cuda) graphs are captured."""

import functools
import gc
import re
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy, megatron
from flatshard._fsdp.forward import root_of
from tests.python.device import DEVICE, on_device
from tests.python.graph_training import (
    BLOCKS,
    DIM,
    HEADS,
    LATE,
    REPLAYED,
    SEQ,
    STEPS,
    VOCAB,
    WARMUP,
    Around,
    Block,
    Body,
    Transformer,
    assert_replays,
    assert_same,
    both,
    pair,
    shard,
    train,
)
from tests.python.models import Mlp
from bench.harness.options import fully_shard

pytestmark = pytest.mark.usefixtures("graphs_on_cpu")


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("reshard", (True, False))
@pytest.mark.parametrize("strategy", ("zero0", "zero1", "zero2", "zero3"))
def test_bits_of_eager_training(strategy, reshard, in_place, mesh, rank):
    options = {
        "strategy": strategy,
        "reshard_after_forward": reshard,
        "grads_in_place": in_place,
    }
    stats, model = both(Transformer, mesh, rank, options)
    assert_replays(stats, REPLAYED * BLOCKS)
    assert stats["captures"] == 2 * BLOCKS
    assert stats["nbytes"] > 0
    assert type(model.blocks[0]).forward.__wrapped__ is Block.forward


@pytest.mark.parametrize("reshard", (True, False))
def test_microbatches(reshard, mesh, rank):
    options = {"reshard_after_forward": reshard}
    stats, _ = both(Transformer, mesh, rank, options, microbatches=3)
    assert_replays(stats, REPLAYED * BLOCKS * 3)


def test_mixed_precision(mesh, rank):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    stats, _ = both(Transformer, mesh, rank, {"mp_policy": policy})
    assert_replays(stats, REPLAYED * BLOCKS)


def test_autocast(mesh, rank):
    around = functools.partial(torch.autocast, DEVICE, dtype=torch.bfloat16)
    stats, model = both(Transformer, mesh, rank, around=around)
    assert_replays(stats, REPLAYED * BLOCKS)
    train(model, rank, steps=1)
    reasons = flatshard.cuda_graph_stats(model)["fallbacks"]
    assert reasons == {"autocast is in another state": BLOCKS}


def test_two_forwards_before_their_backwards(mesh, rank):
    def run(model):
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for step in range(STEPS):
            losses = [
                model.loss(torch.Generator().manual_seed(10 * step + i))
                for i in range(2)
            ]
            sum(losses).backward()
            seen += [p.grad.to_local().clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    eager, graphs = pair(Transformer, mesh)
    assert_same(run(eager), run(graphs))
    stats = flatshard.cuda_graph_stats(graphs)
    # A step more is watched: the first backward got gradients from elsewhere.
    assert stats["forward_replays"] == (REPLAYED - 1) * BLOCKS
    reason = "an earlier forward of it waits for its backward"
    assert stats["fallbacks"][reason] == (REPLAYED - 1) * BLOCKS


def test_evaluation_in_between(mesh, rank):
    def evaluate(model, step):
        model.eval()
        with torch.no_grad():
            loss = model.loss(torch.Generator().manual_seed(step), batch=3)
        model.train()
        return [loss]

    stats, _ = both(Transformer, mesh, rank, after=evaluate)
    assert_replays(stats, REPLAYED * BLOCKS)


@pytest.mark.parametrize("inference", (False, True))
def test_a_capture_is_of_a_training_step(inference, mesh, rank):
    """Captures a training step also when an evaluation runs first after the warm-up."""
    seen = []

    def body(block, x):
        seen.append((torch.is_grad_enabled(), block.training, torch.is_inference(x)))
        return block.inner(x)

    def evaluate(model, step):
        model.eval()
        with torch.inference_mode() if inference else torch.no_grad():
            model.loss(torch.Generator().manual_seed(step))
        model.train()
        return []

    model = shard(Around(body, lambda b, x: b(x)), mesh, True)
    train(model, rank, after=evaluate)
    stats = flatshard.cuda_graph_stats(model)
    assert stats["forward_replays"] in LATE
    assert_replays(stats, stats["forward_replays"])
    assert set(seen) == {(True, True, False), (False, False, inference)}


def test_a_capture_has_the_modes_of_the_watched_call(mesh, rank):
    """Not those that the program has when it captures."""
    seen = []

    def body(block, x):
        seen.append(block.inner.training)
        return block.inner(x)

    def run(before):
        torch.manual_seed(0)  # train seeds each rank on its own
        model = shard(Around(body, lambda b, x: b(x)), mesh, True)
        train(model, rank, before=before)
        return flatshard.cuda_graph_stats(model)

    captures = STEPS - run(None)["forward_replays"]  # the step that does

    def before(model, step):
        model.block.inner.train(step != captures)
        if step == captures:
            seen.clear()

    stats = run(before)
    reason = "it or a module inside it changed between train() and eval()"
    assert stats["fallbacks"] == {reason: 1}
    assert seen[:2] == [True, False]  # the capture; the call


@pytest.mark.parametrize("first, last", ((0, 4), (WARMUP + 1, WARMUP + 1), (4, 6)))
def test_an_inner_hook_comes_and_goes(first, last, mesh, rank):
    handles, calls, replays = [], [], []

    def hook(module, args, output):
        calls.append(module)
        return output * 2

    def before(model, step):
        if step == first:
            handles.append(model.blocks[1].out.register_forward_hook(hook))
        elif step == last + 1:
            handles.pop().remove()

    def after(model, step):
        replays.append(flatshard.cuda_graph_stats(model)["forward_replays"])
        return []

    stats, _ = both(Transformer, mesh, rank, before=before, after=after, steps=12)
    assert len(calls) == 2 * (last - first + 1)
    # Eager steps of a warm-up are none in place of replays.
    hooked = stats["fallbacks"]["a module inside it has hooks"]
    assert 1 <= hooked <= last - first + 1
    assert replays[-1] - replays[-2] == BLOCKS


def test_hooks_of_the_block_itself_run_every_step(mesh, rank):
    calls = {"forward": 0, "backward": 0}

    def count(name):
        calls[name] += 1

    block = Body(lambda b, x: torch.tanh(b.inner(x)))
    model = nn.Sequential(block, on_device(nn.Linear(DIM, 1)))
    fully_shard(block, mesh=mesh, cuda_graph=True)
    fully_shard(model, mesh=mesh)
    block.register_forward_hook(lambda m, a, o: count("forward"))
    block.register_full_backward_hook(lambda m, a, o: count("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = on_device(torch.randn(4, DIM, requires_grad=True)) * 1
        model(x).sum().backward()
        optimizer.step()
    assert calls == {"forward": STEPS, "backward": STEPS}
    assert_replays(flatshard.cuda_graph_stats(model), REPLAYED)


def test_another_shape(mesh, rank):
    def before(model, step):
        return {"batch": 3} if step == WARMUP + 1 else {}

    stats, _ = both(Transformer, mesh, rank, before=before)
    assert stats["fallbacks"] == {"an input has another shape, layout or dtype": BLOCKS}
    assert stats["forward_replays"] == (REPLAYED - 1) * BLOCKS


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            lambda model: setattr(model, "factor", 0.5),
            "an argument that is not a tensor has another value",
        ),
        (
            lambda model: [b.dropout.eval() for b in model.blocks],
            "it or a module inside it changed between train.. and eval..",
        ),
        (
            lambda model: [
                setattr(b, "scale", b.scale.clone() * 2) for b in model.blocks
            ],
            "a module or buffer inside it was replaced or moved",
        ),
        (
            lambda model: [setattr(b, "dropout", nn.Identity()) for b in model.blocks],
            "a module or buffer inside it was replaced or moved|train.. and eval..",
        ),
    ],
)
def test_what_differs_from_the_captured_call_runs_eagerly(change, reason, mesh, rank):
    def before(model, step):
        if step == WARMUP + 1:
            change(model)

    stats, model = both(Transformer, mesh, rank, before=before)
    assert sum(stats["fallbacks"].values()) == BLOCKS * 2
    for found in stats["fallbacks"]:
        assert pytest.raises(ValueError, _raise, found).match(reason)
    assert stats["forward_replays"] == BLOCKS
    model.reset_cuda_graphs()
    train(model, rank)
    again = flatshard.cuda_graph_stats(model)
    assert again["fallbacks"] == stats["fallbacks"]
    assert again["forward_replays"] == BLOCKS + REPLAYED * BLOCKS


def _raise(text):
    raise ValueError(text)


def test_values_of_buffers_are_seen(mesh, rank):
    def before(model, step):
        for block in model.blocks:
            block.scale.mul_(1.1)

    stats, _ = both(Transformer, mesh, rank, before=before)
    assert_replays(stats, REPLAYED * BLOCKS)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints_around_it_stay_eager(reentrant, mesh, rank):
    def before(model, step):
        model.call = functools.partial(call, reentrant)

    stats, _ = both(Transformer, mesh, rank, before=before)
    assert_replays(stats, 0, 0, stats["fallbacks"])
    assert stats["captures"] == 0
    reasons = {False: "hooks on saved tensors", True: "it runs in a backward"}
    counts = [n for why, n in stats["fallbacks"].items() if reasons[reentrant] in why]
    assert counts[0] // BLOCKS in LATE and len(counts) == 1


def call(reentrant, block, *args, **kwargs):
    def run(*args):
        return tuple(block(*args, **kwargs).values())

    x, mask = checkpoint(run, *args, use_reentrant=reentrant)
    return {"x": x, "mask": mask}


class ChecksItself(Body):
    """Checkpoints its own forward, as layers of transformers do."""

    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", (False, True))
def test_a_checkpoint_in_the_call_of_a_block(reentrant, mesh, rank):
    def make():
        model = Around(None, lambda b, x: b(x))
        model.block = ChecksItself(lambda b, x: torch.tanh(b.inner(x)) * x)
        model.block.reentrant = reentrant
        return model

    def before(model, step):
        if step == STEPS - 1:
            model.block.register_forward_hook(lambda *_: None)

    stats, _ = both(make, mesh, rank, before=before)
    if reentrant:  # The checkpoint calls backward() inside a backward.
        assert stats["forward_replays"] == 0
        assert any("incompatible with .grad()" in why for why in stats["fallbacks"])
        return
    assert stats["fallbacks"] == {"it or a module inside it has hooks": 1}
    assert stats["forward_replays"] + 1 in LATE
    assert_replays(stats, stats["forward_replays"], fallbacks=stats["fallbacks"])


class Odd:
    def __init__(self, mask):
        self.mask = mask


def in_place(block, x):
    x.mul_(2)
    return block.inner(x)


def with_mode(block, x):
    with Passing():
        return block(x)


@pytest.mark.parametrize(
    "body, call, reason",
    [
        (in_place, lambda b, x: b(x), "it writes into an argument in place"),
        (
            lambda b, x: (b.inner(x), Odd(1)),
            lambda b, x: b(x)[0],
            "it returns a Odd, neither tensor nor plain value",
        ),
        (
            lambda b, x, odd: b.inner(x),
            lambda b, x: b(x, Odd(1)),
            "an argument is a Odd, neither tensor nor plain value",
        ),
        (
            lambda b, x: b.inner(x),
            with_mode,
            "a TorchDispatchMode around it intercepts each operation",
        ),
    ],
)
def test_calls_that_stay_eager(body, call, reason, mesh, rank):
    stats, _ = both(lambda: Around(body, call), mesh, rank)
    assert_replays(stats, 0, 0, {reason: stats["fallbacks"].get(reason)})
    assert stats["fallbacks"][reason] in LATE


@pytest.mark.parametrize(
    "body, call",
    [
        # A result twice, one without a gradient, an argument, a plain value.
        (
            lambda b, x: [y := b.inner(x), y, y.detach() * 2, x, None, 3],
            lambda b, x: ((y := b(x))[0] * y[1] + y[2] + y[3] + (y[4] is None) * y[5]),
        ),
        # The same tensor twice.
        (lambda b, x, y, z: b.inner(x) * y + z, lambda b, x: b(x, x, x)),
        # Nothing of it needs a gradient but parameters.
        (lambda b, x: b.inner(x), lambda b, x: b(x.detach())),
        # A checkpoint inside.
        (
            lambda b, x: checkpoint(
                lambda t: b.inner(t).relu(),
                x,
                use_reentrant=False,
                preserve_rng_state=False,
            ),
            lambda b, x: b(x),
        ),
    ],
)
def test_calls_that_are_replayed(body, call, mesh, rank):
    make = functools.partial(Around, body, call)
    eager, graphs = pair(make, mesh)
    seen = []
    for model in (eager, graphs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(STEPS):
            loss = model.loss(torch.Generator().manual_seed(step + 10 * rank))
            loss.backward()
            found.append(loss.detach())
            found += [
                p.grad.to_local().clone()
                for p in model.parameters()
                if p.grad is not None
            ]
            optimizer.step()
            optimizer.zero_grad()
        seen.append(found)
    assert_same(*seen)
    stats = flatshard.cuda_graph_stats(graphs)
    assert_replays(stats, stats["forward_replays"])
    assert stats["forward_replays"] in LATE


class Fails(torch.autograd.Function):
    now = False

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if Fails.now:
            raise KeyError("a backward that fails")
        return grad * 2


@pytest.mark.parametrize(
    "body, call, reason",
    [
        (
            lambda b, x: (b.inner(x), x.argmax(-1)),
            lambda b, x: b(x)[0],
            "its capture failed: .*outputs of a floating-point dtype, got Long",
        ),
        (
            lambda b, x: Fails.apply(b.inner(x)),
            lambda b, x: b(x),
            "its capture failed: .*a backward that fails",
        ),
    ],
)
def test_a_capture_that_fails(body, call, reason, mesh, rank):
    model = shard(Around(body, call), mesh, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS + 2):
        Fails.now = True  # in captures, which come before a forward
        loss = model.loss(torch.Generator().manual_seed(step))
        Fails.now = False
        loss.backward()
        optimizer.step()
    (found,) = flatshard.cuda_graph_stats(model)["fallbacks"]
    assert re.search(reason, found, re.DOTALL)


def test_results(mesh):
    """Their flags; and one that is kept keeps its memory."""
    model = Around(lambda b, x: (b.inner(x), x.detach() + 1), lambda b, x: b(x))
    shard(model, mesh, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for step in range(STEPS + 1):
        y, constant = model(on_device(torch.randn(4, DIM)))
        assert y.requires_grad and not constant.requires_grad
        y.sum().backward()
        optimizer.step()
        if step == STEPS - 1:
            kept = [constant, constant.clone()]
        elif step == STEPS:
            assert torch.equal(*kept)
        del y, constant
    reason = "what it or a later region wrote before is still in use"
    stats = flatshard.cuda_graph_stats(model)
    assert stats["fallbacks"] == {reason: 1}
    assert stats["forward_replays"] in LATE


def test_weights_that_stay_after_the_backward(mesh, rank):
    def before(model, step):
        if step == 0:
            model.set_reshard_after_backward(False)

    stats, _ = both(Transformer, mesh, rank, before=before)
    assert_replays(stats, stats["forward_replays"])
    assert stats["forward_replays"] // BLOCKS in LATE


def test_an_error_in_a_replayed_step(mesh, rank):
    model = shard(Transformer(), mesh, True)
    train(model, rank)
    with pytest.raises(IndexError):
        model.loss(torch.Generator().manual_seed(0)).backward()
        raise IndexError
    model.reset_iter_state()
    train(model, rank, steps=2)
    stats = flatshard.cuda_graph_stats(model)
    assert stats["forward_replays"] == (REPLAYED + 3) * BLOCKS


@pytest.mark.parametrize("compiled", ("block", "model", "inner"))
def test_compiled(compiled, mesh, rank):
    frames, losses = [], []
    for model in pair(functools.partial(Transformer, 0.0), mesh):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        parts = {
            "block": model.blocks,
            "model": [model],
            "inner": [block.mlp for block in model.blocks],
        }
        for part in parts[compiled]:
            part.compile(backend=counter)
        # A capture keeps what its backward reads.
        with torch._functorch.config.patch(donated_buffer=False):
            losses.append(train(model, rank))
        frames.append(counter.frame_count)
    assert_same(*losses)
    stats = flatshard.cuda_graph_stats(model)
    assert frames[0] == frames[1]
    if compiled == "inner":
        assert_replays(stats, REPLAYED * BLOCKS)
    else:
        reason = "torch.compile is around it"
        assert_replays(stats, 0, 0, {reason: REPLAYED * BLOCKS})


@pytest.mark.parametrize("attention", ("eager", "sdpa"))
def test_hugging_face(attention, mesh, rank):
    transformers = pytest.importorskip("transformers")

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            config = transformers.LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=DIM,
                intermediate_size=24,
                num_hidden_layers=BLOCKS,
                num_attention_heads=HEADS,
                num_key_value_heads=1,
                attn_implementation=attention,
            )
            self.model = transformers.LlamaForCausalLM(config)
            on_device(self)

        def units(self):
            return list(self.model.model.layers)

        def forward(self, ids, mask):
            return self.model(
                input_ids=ids, attention_mask=mask, labels=ids, use_cache=False
            ).loss

        def loss(self, generator):
            ids = on_device(torch.randint(VOCAB, (2, SEQ), generator=generator))
            mask = torch.ones_like(ids)
            mask[0, -2:] = 0
            return self(ids, mask)

    stats, _ = both(Llama, mesh, rank)
    assert_replays(stats, REPLAYED * BLOCKS)


def test_no_units_with_graphs(mesh):
    model = shard(Mlp(), mesh, False)
    model.loss(torch.Generator().manual_seed(0)).backward()
    assert flatshard.cuda_graph_stats(model) == {
        "captures": 0,
        "forward_replays": 0,
        "backward_replays": 0,
        "fallbacks": {},
        "nbytes": 0,
        "audited_addresses": 0,
        "audit_findings": [],
    }
    model.reset_cuda_graphs()
    with pytest.raises(ValueError, match="outermost module .* got unit blocks.0"):
        flatshard.cuda_graph_stats(model.blocks[0])


def test_a_deleted_model_is_gone(mesh, rank):
    gc.collect()
    gc.disable()
    try:
        model = shard(Mlp(), mesh, True, grads_in_place=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            model.loss(torch.Generator().manual_seed(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert flatshard.cuda_graph_stats(model)["forward_replays"] > 0
        refs = [weakref.ref(m) for m in model.modules()]
        del model, optimizer
        assert [ref() for ref in refs if ref() is not None] == []
    finally:
        gc.enable()


# -- refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, problem",
    [
        ({"cuda_graph": 1}, ValueError, "cuda_graph: expected True or False, got 1"),
        (
            {"cuda_graph": True, "offload_policy": CPUOffloadPolicy()},
            NotImplementedError,
            "cuda_graph with CPUOffloadPolicy",
        ),
    ],
)
def test_arguments(options, error, problem, mesh):
    with pytest.raises(error, match=problem):
        fully_shard(Mlp().blocks[0], mesh=mesh, **options)


def test_cpus_are_refused(mesh, monkeypatch):
    if DEVICE != "cpu":
        pytest.skip("of CPUs")
    monkeypatch.delenv("FLATSHARD_EMULATE_CUDA_GRAPHS")
    with pytest.raises(
        ValueError, match="cuda_graph: expected a mesh of GPUs, got cpu"
    ):
        fully_shard(Mlp().blocks[0], mesh=mesh, cuda_graph=True)


def test_lists_are_refused(mesh):
    with pytest.raises(
        NotImplementedError, match="expected one module, got a list of 3"
    ):
        fully_shard(list(Mlp().blocks), mesh=mesh, cuda_graph=True)


def test_units_inside_are_refused(mesh):
    model = Mlp()
    fully_shard(model.blocks[1], mesh=mesh)
    with pytest.raises(
        ValueError, match="Mlp contains a unit, blocks.1, .* inner units"
    ):
        fully_shard(model, mesh=mesh, cuda_graph=True)


def test_units_that_come_inside_are_refused(mesh):
    model = Mlp()
    block = model.blocks[1]
    block.free = nn.Identity()
    fully_shard(block, mesh=mesh, cuda_graph=True)
    fully_shard(block.free, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="unit blocks.1 contains unit blocks.1.free"):
        model.loss(torch.Generator())


def test_offloading_elsewhere_is_refused(mesh):
    model = Mlp()
    fully_shard(model.blocks[0], mesh=mesh, cuda_graph=True)
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    with pytest.raises(
        NotImplementedError, match="CPUOffloadPolicy, which unit root has"
    ):
        model.loss(torch.Generator())


def test_a_replaced_forward_is_refused(mesh):
    block = Mlp().blocks[0]
    block.forward = functools.partial(type(block).forward, block)
    with pytest.raises(ValueError, match="forward of this Block was replaced on the"):
        fully_shard(block, mesh=mesh, cuda_graph=True)


def test_more_gradient_slots_are_refused(mesh):
    model = shard(Mlp(), mesh, True)
    with pytest.raises(NotImplementedError, match="not supported with cuda_graph=True"):
        model.set_reduce_scatter_max_input_buffers(3)


def test_create_graph_is_refused(mesh, rank):
    model = shard(Transformer(), mesh, True, strategy="zero2")
    train(model, rank)
    loss = model.loss(torch.Generator().manual_seed(0))
    with pytest.raises(Exception, match="create_graph"):
        loss.backward(create_graph=True)
    model.reset_iter_state()


def test_trained_ignored_parameters_stay_eager(mesh, rank):
    torch.manual_seed(0)
    model = Mlp()
    ignored = {model.blocks[0].up.bias}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, cuda_graph=True, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model.loss(torch.Generator().manual_seed(step)).backward()
        assert model.blocks[0].up.bias.grad is not None
        optimizer.step()
        optimizer.zero_grad()
    stats = flatshard.cuda_graph_stats(model)
    reason = "it trains parameters of ignored_params"
    assert set(stats["fallbacks"]) == {reason}
    assert stats["fallbacks"][reason] in LATE
    assert stats["forward_replays"] == stats["fallbacks"][reason] * 2


def test_trained_buffers_stay_eager(mesh, rank):
    model = Around(lambda b, x: b.inner(x) * b.scale, lambda b, x: b(x))
    scale = on_device(torch.ones(())).requires_grad_()
    model.block.register_buffer("scale", scale)
    shard(model, mesh, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        scale.grad = None
        model.loss(torch.Generator().manual_seed(step)).backward()
        assert scale.grad is not None
        optimizer.step()
    assert set(flatshard.cuda_graph_stats(model)["fallbacks"]) == {"it trains a buffer"}


def test_a_foreign_capture_is_refused(mesh, monkeypatch):
    model = shard(Mlp(), mesh, False)
    if DEVICE == "cpu":
        model.loss(torch.Generator())
        root_of(model).ranks.on_gpu = True
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="ShardOptions.cuda_graph=True"):
            model.loss(torch.Generator())
        return
    x = torch.randn(4, 13, device=DEVICE)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="ShardOptions.cuda_graph=True"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)


def test_megatron_names(mesh, rank):
    torch.manual_seed(0)
    model = Transformer()
    megatron.fully_shard_model(model, [Block], mesh, "dp", cuda_graph_mode=True)
    assert all("_flatshard_graph" in block.__dict__ for block in model.blocks)
    assert "_flatshard_graph" not in model.__dict__
    train(model, rank)
    assert_replays(flatshard.cuda_graph_stats(model), REPLAYED * BLOCKS)


@pytest.mark.parametrize(
    "units, mode, error, problem",
    [
        (
            [Block],
            "full",
            NotImplementedError,
            "cuda_graph_mode='full' .* True or False",
        ),
        ([], True, ValueError, "cuda_graph_mode: expected modules of the classes"),
    ],
)
def test_megatron_names_that_are_refused(units, mode, error, problem, mesh):
    with pytest.raises(error, match=problem):
        megatron.fully_shard_model(
            Transformer(), units, mesh, "dp", cuda_graph_mode=mode
        )
