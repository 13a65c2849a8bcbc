"""fully_shard(..., fp8=Float8Policy(...)): nn.Linear with FP8 weights."""

import functools
import weakref

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatshard
from flatshard import _C, CPUOffloadPolicy, Float8Policy
from flatshard._fsdp.forward import root_of
from flatshard.float8.linear import Float8Linear
from tests.python.device import DEVICE, on_device
from tests.python.float8_models import (
    BF16,
    DIM,
    KINDS,
    Block,
    Mlp,
    Recomputing,
    llama,
    one_rank,
    policy,
    shard,
    train,
)
from bench.harness.options import fully_shard
from tests.python.training import distance, full_state


def sharded(mesh, fp8, make=Mlp, **options):
    torch.manual_seed(0)
    return shard(make(), mesh, fp8, **options)


def of_all_ranks(losses, world):
    found = [None] * world
    torch.distributed.all_gather_object(found, losses)
    # The losses of one step: rank by rank.
    return [loss for step in zip(*found) for loss in step]


# -- the same numbers ------------------------------------------------------------------


@pytest.mark.parametrize("make", [Mlp, llama], ids=["mlp", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_bitwise_one_with_their_microbatches(kind, make, mesh, rank, world):
    if world not in (1, 2, 4):
        pytest.skip("a power of two divides gradients exactly")
    many = sharded(mesh, policy(*KINDS[kind]), make)
    one = sharded(one_rank(world), policy(*KINDS[kind]), make)
    losses = of_all_ranks(train(many, [rank]), world)
    expected = train(one, range(world))
    if DEVICE == "cpu" and world <= 2:
        assert losses == expected
        assert distance(full_state(many), full_state(one)) == 0
    else:
        assert losses == pytest.approx(expected, abs=2e-2)
    assert losses[-1] < losses[0]
    # It is FP8, and near to bfloat16.
    plain = train(sharded(one_rank(world), None, make), range(world))
    assert plain != expected and plain == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2"])
def test_every_strategy_computes_the_same(strategy, mesh, rank):
    for kind in ("tensorwise", "rowwise stored"):
        fp8 = policy(*KINDS[kind])
        models = sharded(mesh, fp8), sharded(mesh, fp8, strategy=strategy)
        losses = [train(model, [rank]) for model in models]
        assert losses[0] == losses[1], kind
        assert distance(*map(full_state, models)) == 0


def test_replicas(mesh_2d, mesh, rank):
    fp8 = policy("rowwise")
    expected = train(sharded(mesh, fp8), [rank])
    for options in ({}, {"outer": "optim"}):
        losses = train(sharded(mesh_2d, fp8, **options), [rank])
        assert losses == pytest.approx(expected, abs=2e-2)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["rowwise", "rowwise stored", "mxfp8 stored"])
def test_recomputation_and_parts_change_nothing(kind, reentrant, mesh, rank):
    def make():
        model = Mlp(block=Recomputing)
        for block in model.blocks:
            block.reentrant = reentrant
        return model

    plain = sharded(mesh, policy(*KINDS[kind]))
    expected = train(plain, [rank])
    for parts in ("unit", "recomputed", "module"):
        fp8 = policy(*KINDS[kind], gather_parts=parts)
        for model in (sharded(mesh, fp8), sharded(mesh, fp8, make)):
            assert train(model, [rank]) == expected, parts
            assert distance(full_state(model), full_state(plain)) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"copy_engines": "all"},
        {"buffers_on_demand": False},
        {"granularity": "tensor", "max_padding": 8.0},
        {"grads_in_place": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_options_change_nothing(options, mesh, rank):
    fp8 = policy("rowwise", "stored")
    expected = train(sharded(mesh, fp8), [rank])
    assert train(sharded(mesh, fp8, **options), [rank]) == expected


def test_evaluation_and_generation_between_steps(mesh, rank):
    ids = on_device(torch.tensor([[3, 1, 2], [5, 4, 7]]))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    plain, model = (sharded(mesh, policy("blockwise"), llama) for _ in range(2))
    seen = []

    def between():
        model.eval()
        with torch.no_grad():
            model.loss(torch.Generator().manual_seed(5))
        seen.append(model.model.generate(ids, **options))
        model.train()

    expected = train(plain, [rank])
    assert train(model, [rank], between=between) == expected
    everywhere = [None] * mesh.size()
    torch.distributed.all_gather_object(everywhere, [t.tolist() for t in seen])
    assert all(found == everywhere[0] for found in everywhere)


def test_accumulation_without_synchronization(mesh, rank):
    fp8 = policy("tensorwise")
    a, b = sharded(mesh, fp8), sharded(mesh, fp8)
    for model, sync in ((a, True), (b, False)):
        for number in range(2):
            model.set_requires_gradient_sync(sync or number == 1)
            model.loss(torch.Generator().manual_seed(10 * rank + number)).backward()
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor())


# -- layers ----------------------------------------------------------------------------


def test_classes_names_and_state(mesh):
    model = Mlp()
    names = list(model.state_dict())
    shard(model, mesh, policy("tensorwise"))
    block = model.blocks[0]
    assert type(block.up) is Float8Linear and isinstance(block.up, nn.Linear)
    assert not isinstance(model.head, Float8Linear)
    assert list(model.state_dict()) == names
    assert block.up.weight.dtype == torch.float32
    assert (
        repr(block.up) == "Float8Linear(in_features=128, out_features=256, bias=True)"
    )


class Odd(nn.Module):
    """A layer that is called twice, of vectors, of nothing, and after a step function."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, DIM, bias=False)
        on_device(self)

    def forward(self, x):
        twice = self.layer(x) + self.layer(x)
        # The gradient of this input is not needed.
        stepped = self.last(torch.floor(4 * twice))
        empty = self.layer(x[:0])
        return stepped + self.layer(x[0]) + empty.sum()


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_F15_a_layer_that_is_called_in_odd_ways(backend, mesh, rank, world):
    """Compilers join equal calls and drop those whose results are not needed."""
    if backend == "inductor" and world > 2:
        pytest.skip("what it compiles is that of two ranks, and takes long")
    torch._dynamo.reset()
    grads = []
    for compiles in (False, backend is not None):
        torch.manual_seed(0)
        model = Odd()
        fully_shard(model, mesh=mesh, mp_policy=BF16, fp8=policy("rowwise"))
        if compiles:
            model.compile(backend=backend)
        x = on_device(
            torch.randn(6, DIM, generator=torch.Generator().manual_seed(rank))
        )
        model(x.requires_grad_()).sum().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
        assert all(grad.any() for grad in grads[-1])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)


def gradients_as_tensors(model, loss):
    """Parameters of blocks whose gradients autograd made tensors of."""
    seen = set()

    def note(name, grad):
        if grad is not None:
            seen.add(name)

    def watch(name, module, args):
        for key, p in module.named_parameters(recurse=False):
            if p.requires_grad:
                p.register_hook(functools.partial(note, f"{name}.{key}"))

    handles = [
        module.register_forward_pre_hook(functools.partial(watch, name))
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear)
    ]
    loss().backward()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("frozen", [False, True])
def test_the_weights_gradients_need_no_tensors(frozen, mesh, rank):
    model = Mlp()
    for name, p in model.named_parameters():
        p.requires_grad = not frozen or "weight" not in name
    shard(model, mesh, policy("mxfp8"))
    seen = gradients_as_tensors(
        model, lambda: model.loss(torch.Generator().manual_seed(rank))
    )
    assert seen == {"blocks.0.up.bias", "blocks.1.up.bias"}
    assert (model.blocks[0].up.weight.grad is None) == frozen


class Attends(nn.Module):
    """q, k and v of one input, gate and up of another."""

    def __init__(self):
        super().__init__()
        names = ("q", "k", "v", "o", "gate", "up")
        for name in names:
            setattr(self, name, nn.Linear(DIM, DIM, bias=False))
        self.makes = lambda x: x + 0
        self.writes = lambda x: None
        on_device(self)

    def forward(self, x):
        x = self.makes(x)
        q, k = self.q(x), self.k(x)
        self.writes(x)
        y = self.o(q * k + self.v(x))
        return self.gate(y).relu() * self.up(y)


def inputs_of(model):
    return root_of(model).runtime.float8_inputs()


def attends(mesh, recipe="rowwise", **options):
    torch.manual_seed(0)
    fp8 = policy(recipe)
    return fully_shard(Attends(), mesh=mesh, mp_policy=BF16, fp8=fp8, **options)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_layers_with_the_same_input_quantize_it_once(recipe, mesh, rank):
    model, alone = attends(mesh, recipe), attends(mesh, recipe)
    x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(rank))
    x = on_device(x).requires_grad_()
    model(x).sum().backward()
    # The planes of x, of q * k + v and of y: in the forward, and once more in the
    # backward.
    assert inputs_of(model) == (6, 6)
    # Separate layers are bitwise identical.
    for layer in alone.children():
        layer.register_forward_pre_hook(lambda m, args: (args[0].clone(),))
    alone(x).sum().backward()
    assert inputs_of(alone) == (12, 0)
    for p, q in zip(model.parameters(), alone.parameters()):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())
    with torch.no_grad():
        model(x)
    assert inputs_of(model) == (9, 9)


def test_what_was_quantized_is_not_taken_for_what_was_written(mesh, rank):
    model, alone = attends(mesh), attends(mesh)
    x = on_device(torch.randn(6, DIM, generator=torch.Generator().manual_seed(rank)))
    results = []
    for m in (model, alone):
        m.writes = lambda x: x.mul_(3)
        if m is alone:
            for layer in m.children():
                layer.register_forward_pre_hook(lambda m, args: (args[0].clone(),))
        with torch.no_grad():
            results.append(m(x))
    assert torch.equal(*results)
    assert inputs_of(model) == (4, 2)
    # Nor for another call's input, or if torch counts no writes.
    with torch.inference_mode():
        assert torch.equal(model(x), results[0])
    assert inputs_of(model) == (10, 2)


def test_no_input_outlives_its_forward(mesh):
    if DEVICE != "cpu":
        pytest.skip("memory of numpy")
    model = attends(mesh)
    kept = []

    def make(x):
        values = numpy.zeros((6, DIM), numpy.int16)
        kept.append(weakref.ref(values))
        return torch.from_numpy(values).view(torch.bfloat16)

    model.makes = make
    model.up = nn.Identity()  # the last input that is quantized
    for layer in ("o", "gate"):
        setattr(model, layer, nn.Identity())
    model.writes = lambda x: model.v(x)
    with torch.no_grad():
        model(torch.ones(6, DIM))
    assert kept[0]() is None


def test_autocast(mesh, rank):
    model = sharded(mesh, policy("rowwise"))
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model.loss(torch.Generator().manual_seed(rank))
    loss.backward()
    other = sharded(mesh, policy("rowwise"))
    other.loss(torch.Generator().manual_seed(rank)).backward()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(
            p.grad.full_tensor(), q.grad.full_tensor(), rtol=0.1, atol=2e-2
        )


def test_a_model_that_is_deleted_is_gone(mesh, rank):
    model = sharded(mesh, policy("rowwise"))
    model.loss(torch.Generator().manual_seed(rank)).backward()
    kept = []
    handle = model.blocks[0].up.register_forward_pre_hook(
        lambda module, args: kept.append(weakref.ref(module.weight))
    )
    model.loss(torch.Generator().manual_seed(rank))
    handle.remove()
    del model
    assert kept[0]() is None


# -- programs that use FP8 layers in other ways -----------------------------------------


class Reads(Block):
    def forward(self, x):
        return x + self.down(nn.functional.linear(x, self.up.weight))


def test_a_stray_read_names_the_parameter(mesh, rank):
    model = Mlp(block=Reads)
    shard(model, mesh, policy("tensorwise"))
    with pytest.raises(
        RuntimeError,
        match="parameter blocks.0.up.weight is stored in FP8 .* module_filter_fn",
    ):
        model.loss(torch.Generator().manual_seed(rank))
    # The error's advice works.
    model = Mlp(block=Reads)
    shard(
        model, mesh, policy("tensorwise", module_filter_fn=lambda m, name: name != "up")
    )
    model.loss(torch.Generator().manual_seed(rank)).backward()


def test_a_layer_below_its_unit(mesh):
    model = sharded(mesh, policy("tensorwise"))
    x = on_device(torch.ones(2, DIM, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="Float8Linear: its weight is a shard here"):
        model.blocks[0].up(x)
    model.blocks[0].unshard()
    assert model.blocks[0].up(x).shape == (2, 256)
    model.blocks[0].reshard()


def test_inputs_of_another_kind(mesh):
    model = sharded(mesh, policy("tensorwise"))
    block = model.blocks[0]
    model.unshard(), block.unshard()
    problem = "Float8Linear: expected an input of torch.bfloat16, .*, got torch.float32"
    with pytest.raises(ValueError, match=problem):
        block.up(on_device(torch.ones(2, DIM)))
    problem = r"Float8Linear: expected an input \[..., 128\], got \[2, 3\]"
    with pytest.raises(ValueError, match=problem):
        block.up(on_device(torch.ones(2, 3, dtype=torch.bfloat16)))
    block.reshard(), model.reshard()


def test_second_derivatives_are_refused(mesh, rank):
    model = sharded(mesh, policy("tensorwise"), strategy="zero1")
    loss = model.loss(torch.Generator().manual_seed(rank))
    with pytest.raises(
        Exception, match="a linear layer with FP8 weights has no second"
    ):
        loss.backward(create_graph=True)


def test_weights_that_become_nan_are_named(mesh, rank):
    if DEVICE != "cpu":
        pytest.skip("on GPUs products become NaN")
    model = sharded(mesh, policy("rowwise"))
    model.loss(torch.Generator().manual_seed(rank))
    with torch.no_grad():
        model.blocks[1].up.weight.fill_(float("nan"))
    with pytest.raises(
        Exception, match="parameter blocks.1.up.weight of unit blocks.1"
    ):
        model.loss(torch.Generator().manual_seed(rank))


def test_after_an_error_in_the_forward(mesh, rank):
    model = sharded(mesh, policy("rowwise"))
    fresh = sharded(mesh, policy("rowwise"))
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.loss(torch.Generator().manual_seed(rank))
    handle.remove()
    assert train(model, [rank]) == train(fresh, [rank])


# -- which weights ---------------------------------------------------------------------


class Mixed(nn.Module):
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.tied = nn.Linear(32, 48, bias=False)
        self.tied.weight = self.embed.weight
        self.twice = self.Twice(32, 32)
        self.odd = nn.Linear(32, 24, bias=False)
        self.patched = nn.Linear(32, 32, bias=False)
        self.patched.forward = lambda x: x
        self.fits = nn.Linear(32, 32)
        self.ignored = nn.Linear(32, 32, bias=False)
        on_device(self)

    def forward(self, tokens):
        x = self.fits(self.twice(self.ignored(self.embed(tokens))))
        return self.tied(self.patched(x)).float().sum() + self.odd(x).float().sum()


def test_F18_the_report_says_why(mesh):
    model = Mixed()
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=BF16,
        fp8=policy("rowwise"),
        ignored_params=set(model.ignored.parameters()),
    )
    report = flatshard.float8.describe(model)
    fast = DEVICE != "cpu" and _C.float8_multiplies("rowwise", torch.device(DEVICE, 0))
    emulated = "" if fast else " (emulated)"
    assert report.float8 == {"fits.weight": f"rowwise{emulated}, derived columns"}
    assert report.others == {
        "embed.weight": "weight of Embedding",
        "twice.weight": "Twice is a subclass of nn.Linear",
        "twice.bias": "bias of Twice",
        "odd.weight": "24 rows are not a multiple of 16",
        "patched.weight": "the forward of its nn.Linear was replaced",
        "fits.bias": "bias of Linear",
        "ignored.weight": "not sharded",
    }
    assert report.num_float8_elements == 32 * 32
    assert str(report).startswith(
        f"float8: 1 parameters with {100 * 1024 / report.num_elements:.1f} % of the "
        f"elements, rowwise{emulated}, derived columns (1); not FP8: 1 (weight of Emb"
    )
    model.ignored.to(torch.bfloat16)
    model(on_device(torch.tensor([1, 2, 3]))).backward()


def test_the_filter_chooses(mesh, rank):
    seen = []

    def chosen(module, name):
        seen.append((type(module), name))
        return name == "down"

    model = Mlp()
    shard(model, mesh, Float8Policy("tensorwise", chosen, emulate=True))
    assert seen == [(nn.Linear, "up"), (nn.Linear, "down")] * 2
    report = flatshard.float8.describe(model)
    assert set(report.float8) == {"blocks.0.down.weight", "blocks.1.down.weight"}
    assert report.others["blocks.0.up.weight"] == "module_filter_fn leaves it out"
    assert report.others["head.weight"] == "its unit has no fp8"
    model.loss(torch.Generator().manual_seed(rank)).backward()


@pytest.mark.parametrize(
    "recipe, multiple", [("tensorwise", 16), ("mxfp8", 32), ("blockwise", 128)]
)
def test_a_chosen_layer_that_does_not_divide_is_refused(recipe, multiple, mesh):
    layer = nn.Linear(256, multiple + multiple // 2)
    with pytest.raises(
        ValueError,
        match=f"fp8: module_filter_fn chose weight, but it cannot be {recipe}: "
        f"{multiple + multiple // 2} rows are not a multiple of {multiple}",
    ):
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=BF16,
            fp8=policy(recipe, module_filter_fn=lambda module, name: True),
        )
    assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


@pytest.mark.parametrize(
    "options, problem",
    [
        (
            {"recipe": "delayed"},
            "fp8: recipe: expected 'tensorwise', .*, got 'delayed'",
        ),
        ({"column_plane": "both"}, "fp8: column_plane: expected .*, got 'both'"),
        ({"column_plane": "stored"}, "fp8: column_plane: 'stored' is for rowwise and"),
        ({"gather_parts": "layer"}, "fp8: gather_parts: expected .*, got 'layer'"),
        ({"emulate": 1}, "fp8: emulate: expected True or False, got 1"),
        ({"module_filter_fn": ["head"]}, "fp8: module_filter_fn: expected a function"),
    ],
)
def test_bad_policies(options, problem):
    with pytest.raises(ValueError, match=problem):
        Float8Policy(**{"recipe": "tensorwise", **options})


def test_names_of_transformer_engine():
    from flatshard import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

    assert Float8CurrentScaling().recipe == "tensorwise"
    assert Float8BlockScaling(gather_parts="unit").recipe == "blockwise"
    assert MXFP8BlockScaling(column_plane="stored").recipe == "mxfp8"
    with pytest.raises(ValueError, match="column_plane: 'stored' is for rowwise"):
        Float8BlockScaling(column_plane="stored")


def test_what_fp8_does_not_go_with(mesh):
    with pytest.raises(
        ValueError, match="fp8: expected a flatshard.Float8Policy or No"
    ):
        fully_shard(Block(), mesh=mesh, mp_policy=BF16, fp8="rowwise")
    with pytest.raises(
        ValueError,
        match="fp8: parameter up.weight would compute in torch.float32, .*mp_policy=",
    ):
        fully_shard(Block(), mesh=mesh, fp8=policy("rowwise"))


def test_a_recipe_that_the_gpu_lacks(mesh, monkeypatch):
    from flatshard.float8 import policy

    lacking = torch.device("cuda", 0)
    why = "this GPU (sm_90) does not multiply mxfp8 in FP8"
    monkeypatch.setattr(policy._C, "float8_multiplies", lambda *_: False)
    monkeypatch.setattr(policy._C, "float8_why_not_multiplied", lambda *_: why)
    with pytest.raises(
        ValueError,
        match=r"fp8: this GPU \(sm_90\) does not multiply mxfp8 in FP8: .*emul",
    ):
        policy.check_device(Float8Policy("mxfp8"), lacking)
    policy.check_device(Float8Policy("mxfp8", emulate=True), lacking)


# -- checkpoints -----------------------------------------------------------------------


def test_checkpoints_know_no_fp8(mesh, rank, world, folder):
    """FP8, then bfloat16 on one rank, then another recipe: all continue from the same."""
    a = sharded(mesh, policy("rowwise"))
    optimizer = flatshard.optim.AdamW(a.parameters(), lr=1e-2)
    a.loss(torch.Generator().manual_seed(rank)).backward()
    optimizer.step()
    flatshard.checkpoint.save(f"{folder}/fp8", 1, a, optimizer)
    alone = one_rank(world)
    b = sharded(alone, None)
    loaded = flatshard.optim.AdamW(b.parameters(), lr=1e-2)
    flatshard.checkpoint.load(f"{folder}/fp8", b, loaded)
    assert distance(full_state(a), full_state(b)) == 0
    flatshard.checkpoint.save(f"{folder}/bf16-{rank}", 1, b, loaded)
    dist.barrier()  # each rank has saved on its own, and all load rank 0's
    c = sharded(mesh, policy("rowwise"))
    d = sharded(mesh, policy("mxfp8", "stored"))
    for model in (c, d):
        torch.nn.init.zeros_(model.head.weight)
        own = flatshard.optim.AdamW(model.parameters(), lr=1e-2)
        flatshard.checkpoint.load(f"{folder}/bf16-0", model, own)
        assert distance(full_state(model), full_state(a)) == 0
    # The planes are made of what was loaded.
    generators = [torch.Generator().manual_seed(9) for _ in range(2)]
    assert a.loss(generators[0]) == c.loss(generators[1])


@pytest.mark.parametrize("kind", KINDS)
def test_F9_values_that_are_written_reach_the_planes(kind, mesh, rank):
    """Checks scales as well: values would saturate with the former ones."""
    model, other = (sharded(mesh, policy(*KINDS[kind])) for _ in range(2))
    before = model.loss(torch.Generator().manual_seed(rank)).item()
    with torch.no_grad():
        for p in (model.blocks[0].up.weight, other.blocks[0].up.weight):
            p.mul_(5.0)
    after = model.loss(torch.Generator().manual_seed(rank)).item()
    assert before != after == other.loss(torch.Generator().manual_seed(rank)).item()


def test_weights_from_the_meta_device(mesh, rank):
    models = []
    for device in ("meta", DEVICE):
        with torch.device(device):
            model = Mlp()
        shard(model, mesh, policy("blockwise"))
        flatshard.reset_parameters(model, seed=3)
        models.append(model)
    losses = [train(model, [rank]) for model in models]
    assert losses[0] == losses[1]
