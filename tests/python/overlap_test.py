"""transformers' models with experts by the 1F1B schedule: plain accumulation's bits."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatshard import (
    _C,
    BackwardPass,
    MixedPrecisionPolicy,
    diagnostics,
    expert_parallel,
    fully_shard,
    overlap_microbatches,
)
from flatshard.moe import overlap
from tests.python.device import DEVICE, IS_WHOLE_MATRIX, named_mesh, on_device
from tests.python.expert_parallel_test import FAMILIES, IS_4, SHAPE, experts_of, make
from tests.python.training import full_state

transformers = pytest.importorskip("transformers")


@pytest.fixture
def ep(world):
    if world not in (1, 2, 4):
        pytest.skip("needs 1, 2 or 4 ranks")
    return min(world, 2)


def sharded(
    model, ep, replicas=1, spread=True, beside=(), copy_engines="auto", **options
):
    world = dist.get_world_size() // replicas
    names = ("replicate", "edp", "ep")
    mesh = named_mesh(replicate=replicas, edp=world // ep, ep=ep)
    dp, edp = mesh["edp", "ep"]._flatten("dp"), mesh["edp"]
    if replicas > 1:
        dp, edp = DeviceMesh._concatenate([mesh["replicate"], dp]), mesh[names[:2]]
    if spread:
        expert_parallel(model, mesh["ep"], overlap=True, copy_engines=copy_engines)
    own = {key: v for key, v in options.items() if key != "grads_in_place"}
    for layer in model.model.layers:
        experts = getattr(experts_of(layer), "experts", None)
        if experts is not None and ep > 1:
            fully_shard(experts, mesh=edp, **own)
        fully_shard(layer, mesh=dp, **options)
    for module in beside:
        fully_shard(module, mesh=dp, **options)
    return fully_shard(model, mesh=dp, **options)


def batches_of(step, n=3):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = on_device(torch.randint(0, 64, (n, 2, 16), generator=generator))
    return [dict(input_ids=t, labels=t) for t in tokens]


def plain(model, batches):
    losses = []
    for n, batch in enumerate(batches):
        model.set_requires_all_reduce(n + 1 == len(batches))
        loss = model(**batch).loss / len(batches)
        loss.backward()
        losses.append(loss.detach())
    return losses


def trained(step, model, n=3, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for number in range(steps):
        losses += step(model, batches_of(number, n))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), full_state(model)


def expect_equal(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    for name, value in theirs[1].items():
        assert torch.equal(ours[1][name], value), name


def late(model, batches):
    return overlap_microbatches(model, batches, delay_wgrad=True)


def make_mixtral():
    return make("mixtral")


def qwen(**options):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{
            **SHAPE,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            **options,
        }
    )
    return on_device(transformers.Qwen3MoeForCausalLM(config))


def qwen_with_dense_layers():
    return qwen(num_hidden_layers=4, mlp_only_layers=[0, 2], tie_word_embeddings=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_B67_the_schedule_is_plain_accumulation(family, ep):
    ours = trained(overlap_microbatches, sharded(make(family), ep))
    expect_equal(ours, trained(plain, sharded(make(family), ep)))
    assert ours[0][-1] != ours[0][2]


STRATEGIES = ["zero0", "zero1", "zero2", "zero3", "hsdp"]
BOTH, WITH_SHARED = [False, True], ["qwen3_moe", "qwen2_moe"]
# Each value of a column with each value of any other.
PAIRWISE = [
    (STRATEGIES[i % 5], (2, 3, 5)[i % 3], BOTH[i // 5 % 2], BOTH[i % 2])
    + (WITH_SHARED[i // 7 % 2], (1, 2)[i // 4 % 2])
    for i in range(15)
]
WHOLE = list(itertools.product(STRATEGIES, [2, 3, 5], BOTH, BOTH, WITH_SHARED, [1, 2]))


@pytest.mark.parametrize(
    "strategy, n, delays, recomputes, family, ep",
    WHOLE if IS_WHOLE_MATRIX else PAIRWISE,
)
def test_matrix(strategy, n, delays, recomputes, family, ep, world):
    """FLATSHARD_WHOLE_MATRIX=1 runs all combinations and needs minutes."""
    replicas = 2 if strategy == "hsdp" else 1
    if world not in (1, 2, 4) or world % (ep * replicas):
        pytest.skip("for another number of ranks")
    if strategy == "zero0" and 1 < ep < world:
        pytest.skip("ZeRO-0 keeps experts whole on one rank alone")

    def made():
        model = make(family)
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        options = {} if strategy == "hsdp" else dict(strategy=strategy)
        return sharded(model, ep, replicas, grads_in_place=True, **options).train()

    ours = trained(late if delays else overlap_microbatches, made(), n, 2)
    expect_equal(ours, trained(plain, made(), n, 2))


def test_one_microbatch_and_copies(ep):
    ours = trained(overlap_microbatches, sharded(make("mixtral"), ep), 1, 2)
    expect_equal(ours, trained(plain, sharded(make("mixtral"), ep), 1, 2))
    options = dict(copy_engines="all")
    copied = trained(overlap_microbatches, sharded(make("mixtral"), ep, **options), 3)
    expect_equal(copied, trained(plain, sharded(make("mixtral"), ep), 3))


def test_dense_layers_and_tied_embeddings(ep):
    ours = trained(overlap_microbatches, sharded(qwen_with_dense_layers(), ep))
    expect_equal(ours, trained(plain, sharded(qwen_with_dense_layers(), ep)))


def test_B68_late_weight_gradients_come_once(ep, monkeypatch):
    options = dict(grads_in_place=True)
    run, late_ones = BackwardPass.run_wgrads, []

    def run_wgrads(self, module, node=0):
        before = self.num_delayed_wgrads
        run(self, module, node)
        late_ones.append(before - self.num_delayed_wgrads)

    monkeypatch.setattr(BackwardPass, "run_wgrads", run_wgrads)
    ours = trained(late, sharded(make("qwen3_moe"), ep, **options))
    # q, k, v and o, in version 4 the router, of two layers in nine microbatches; weight
    # gradients of experts come at once.
    assert sorted(late_ones) == [0] * 18 + [4 + IS_4] * 18
    expect_equal(ours, trained(plain, sharded(make("qwen3_moe"), ep, **options)))


def with_skewed_routing(top_k=2):
    """The first `top_k` experts get all tokens."""
    model = qwen(num_experts_per_tok=top_k)
    with torch.no_grad():
        for layer in model.model.layers:
            experts_of(layer).gate.weight.zero_()  # of equal ones the first are chosen
    return model


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_rank_without_tokens(top_k, ep):
    def made():
        return sharded(with_skewed_routing(top_k), ep)

    ours = trained(overlap_microbatches, made(), 2, 1)
    expect_equal(ours, trained(plain, made(), 2, 1))


def test_an_expert_of_the_last_microbatch_alone(ep):
    """Tokens below 32 go to experts 0 and 1, the others to 2 and 3."""

    def made():
        model = with_skewed_routing()
        with torch.no_grad():
            embedding = model.model.embed_tokens.weight
            embedding[:, 0] = torch.where(torch.arange(64) < 32, 9.0, -9.0)
            for layer in model.model.layers:
                experts_of(layer).gate.weight[:, 0] = torch.tensor([1.0, 1, -1, -1])
        return sharded(model, ep)

    def gradients(step, batches):
        model = made()
        step(model, batches)
        named = model.named_parameters()
        return {name: p.grad.full_tensor() for name, p in named}

    batches = batches_of(0)
    for number, batch in enumerate(batches):
        tokens = batch["input_ids"] % 32 + 32 * (number == 2)
        batch.update(input_ids=tokens, labels=tokens)
    ours = gradients(overlap_microbatches, batches)
    for name, gradient in gradients(plain, batches).items():
        assert torch.equal(ours[name], gradient), name
    name = "model.layers.1.mlp.experts.down_proj"
    before = gradients(overlap_microbatches, batches[:2])[name]
    is_used = [g.flatten(1).any(1).tolist() for g in (before, ours[name])]
    assert is_used == [[True, True, False, False], [True] * 4]


def test_mixed_precision(ep):
    options = dict(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    ours = trained(overlap_microbatches, sharded(make("mixtral"), ep, **options))
    expect_equal(ours, trained(plain, sharded(make("mixtral"), ep, **options)))


def test_a_loss_of_ones_own_and_units_beside_the_layers(ep):
    def loss_of(model, batch):
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(input_ids=batch["input_ids"])
        assert out.router_logits
        return out.logits.float().logsumexp(-1).mean() + out.router_logits[0].mean()

    def step(model, batches):
        return overlap_microbatches(model, batches, loss_of)

    def plainly(model, batches):
        losses = []
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def made():
        model = make("mixtral")
        return sharded(model, ep, beside=(model.model.embed_tokens, model.lm_head))

    expect_equal(trained(step, made(), 2), trained(plainly, made(), 2))


@pytest.mark.parametrize("make_model", [make_mixtral, qwen_with_dense_layers])
def test_gradient_checkpointing(make_model, ep):
    def made():
        model = make_model()
        model.config.attention_dropout = 0.2
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2
        model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(dist.get_rank())
        return sharded(model, ep).train()

    counts = []

    def count(*_):
        counts.append(1)

    first, second = made(), made()
    for layer in first.model.layers:
        layer.self_attn.register_forward_hook(count)
    torch.manual_seed(7)
    ours = trained(overlap_microbatches, first)
    assert len(counts) == 2 * 9 * len(first.model.layers)
    torch.manual_seed(7)
    expect_equal(ours, trained(plain, second))
    assert first.model.layers[0].gradient_checkpointing


# -- what the schedule does ------------------------------------------------------------


def test_rows_travel_while_the_other_microbatch_computes(ep, monkeypatch):
    """Compares with the plan: between the start of an exchange and the wait for it."""
    seen = []

    def noting(kind, function):
        def noted(*arguments):
            seen.append(kind)
            return function(*arguments)

        return noted

    for kind, owner, name in (
        ("start", _C.RoutedTokens, "start_dispatch"),
        ("start", _C.RoutedTokens, "start_combine"),
        ("wait", _C.RowTransfer, "wait"),
        ("backward", overlap, "_backward"),
    ):
        monkeypatch.setattr(owner, name, noting(kind, getattr(owner, name)))
    model = sharded(make("mixtral"), ep)
    overlap_microbatches(model, batches_of(0, 2))
    # Two microbatches in two layers, four exchanges each.
    assert seen.count("start") == seen.count("wait") == 16
    text = " ".join(seen)
    # B0.combine; B0.experts; F1.dispatch; F1.experts; B0.dispatch F1.combine; B0.attend.
    assert "start wait backward start wait start start wait backward" in text, text


def test_collectives_are_those_of_the_schedule_on_all_ranks(ep, world, monkeypatch):
    if world == 1:
        pytest.skip("nothing is gathered on one rank")
    monkeypatch.setenv("FLATSHARD_TRACE_STEPS", "1")
    model = sharded(qwen(num_hidden_layers=6), ep)
    for step in range(2):  # the second one has the order
        diagnostics.take_trace(model)
        overlap_microbatches(model, batches_of(step))
        model.zero_grad()
    trace = diagnostics.take_trace(model)
    launched = [a for a in trace if a.kind in ("gather", "reduce", "accumulate")]
    of_all = [None] * world
    dist.all_gather_object(of_all, [(a.kind, a.unit, a.phase) for a in launched])
    assert all(of_rank == of_all[0] for of_rank in of_all)

    is_layer = re.compile(r"model\.layers\.\d").fullmatch
    reduced = [a.unit for a in launched if a.kind == "reduce" and is_layer(a.unit)]
    assert sorted(reduced) == sorted(3 * [f"model.layers.{n}" for n in range(6)])
    # Both microbatches compute, each a layer ahead; none is all-gathered on demand.
    gathered, most = set(), 0
    for before, action in zip([None, *trace], trace):
        if action.kind == "gather" and is_layer(action.unit):
            gathered.add(action.unit)
        elif action.kind == "release":
            gathered.discard(action.unit)
        elif action.kind == "await" and before.kind == "gather":
            assert action.unit != before.unit
        most = max(most, len(gathered))
    assert most <= 4


# -- what goes wrong -------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("when", [3, 9, 14, 21])
def test_an_exception_leaves_the_next_step_right(when, ep, monkeypatch):
    model, reference = sharded(make("mixtral"), ep), sharded(make("mixtral"), ep)
    expected = overlap_microbatches(reference, batches_of(0))
    count = iter(range(100))

    def stopping(start):
        def started(self, rows, made):
            transfer = start(self, rows, made)
            if next(count) == when:
                raise Stop
            return transfer

        return started

    with monkeypatch.context() as patch:
        for name in ("start_dispatch", "start_combine"):
            start = getattr(_C.RoutedTokens, name)
            patch.setattr(_C.RoutedTokens, name, stopping(start))
        with pytest.raises(Stop):
            overlap_microbatches(model, batches_of(0))
    assert overlap.running() is None
    losses = overlap_microbatches(model, batches_of(0))
    assert all(map(torch.equal, losses, expected))
    for p, q in zip(model.parameters(), reference.parameters()):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())


def test_what_cannot_be_run_is_named(ep):
    model = sharded(make("mixtral"), ep)
    batches = batches_of(0)
    with pytest.raises(ValueError, match="at least one, got an empty list"):
        overlap_microbatches(model, [])
    with pytest.raises(ValueError, match="loss_of: expected a call of the model"):
        overlap_microbatches(model, batches, lambda model, batch: torch.ones(()))
    with pytest.raises(ValueError, match="found none in FSDPMixtralForCausalLM"):
        overlap_microbatches(sharded(make("mixtral"), 1, spread=False), batches)
    mesh = named_mesh(ep=dist.get_world_size())
    if dist.get_world_size() < 3:
        whole = expert_parallel(make("mixtral"), mesh["ep"], overlap=True)
        with pytest.raises(ValueError, match="layer 0 is not a separate unit"):
            overlap_microbatches(fully_shard(whole), batches)


def test_it_also_runs_without_the_schedule(ep):
    model = sharded(make("qwen3_moe"), ep)
    (batch,) = batches_of(0, 1)
    with torch.no_grad():
        expected = model(**batch).loss
    (loss,) = overlap_microbatches(model, [batch])
    assert torch.equal(loss, expected)
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, expected)
