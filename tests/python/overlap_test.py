"""transformers' models with experts by the 1F1B schedule: plain accumulation's bits."""

import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatshard import (
    BackwardPass,
    MixedPrecisionPolicy,
    diagnostics,
    expert_parallel,
    fully_shard,
    overlap_microbatches,
)
from flatshard.moe import overlap
from tests.python.device import DEVICE, named_mesh, on_device
from tests.python.expert_parallel_test import FAMILIES, IS_4, SHAPE, experts_of, make
from tests.python.training import full_state

transformers = pytest.importorskip("transformers")


@pytest.fixture
def ep(world):
    if world not in (1, 2, 4):
        pytest.skip("needs 1, 2 or 4 ranks")
    return min(world, 2)


def sharded(model, ep, replicas=1, spread=True, beside=(), **options):
    world = dist.get_world_size() // replicas
    names = ("replicate", "edp", "ep")
    mesh = named_mesh(replicate=replicas, edp=world // ep, ep=ep)
    dp, edp = mesh["edp", "ep"]._flatten("dp"), mesh["edp"]
    if replicas > 1:
        dp, edp = DeviceMesh._concatenate([mesh["replicate"], dp]), mesh[names[:2]]
    if spread:
        expert_parallel(model, mesh["ep"], overlap=True)
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


def qwen_with_dense_layers():
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{**SHAPE, "num_hidden_layers": 4},
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        mlp_only_layers=[0, 2],
        tie_word_embeddings=True,
    )
    return on_device(transformers.Qwen3MoeForCausalLM(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_B67_the_schedule_is_plain_accumulation(family, ep):
    ours = trained(overlap_microbatches, sharded(make(family), ep))
    expect_equal(ours, trained(plain, sharded(make(family), ep)))
    assert ours[0][-1] != ours[0][2]


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_strategies(strategy, ep, world):
    if strategy == "no_shard" and world > ep:
        pytest.skip("ZeRO-0 keeps experts whole on one rank alone")
    options = dict(strategy=strategy)
    ours = trained(overlap_microbatches, sharded(make("qwen3_moe"), ep, **options), 2)
    expect_equal(ours, trained(plain, sharded(make("qwen3_moe"), ep, **options), 2))


def test_replicas(ep, world):
    if world < 4:
        pytest.skip("needs 4 ranks")
    ours = trained(overlap_microbatches, sharded(make("mixtral"), ep, replicas=2))
    expect_equal(ours, trained(plain, sharded(make("mixtral"), ep, replicas=2)))


@pytest.mark.parametrize("n", [1, 5])
def test_numbers_of_microbatches(n, ep):
    ours = trained(overlap_microbatches, sharded(make("mixtral"), ep), n, 2)
    expect_equal(ours, trained(plain, sharded(make("mixtral"), ep), n, 2))


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
    # q, k, v and o, in version 4 the router, of two layers in nine microbatches; those
    # of experts come at once.
    assert sorted(late_ones) == [0] * 18 + [4 + IS_4] * 18
    expect_equal(ours, trained(plain, sharded(make("qwen3_moe"), ep, **options)))


def test_a_rank_without_tokens(ep):
    def made():
        model = make("mixtral")
        with torch.no_grad():
            for layer in model.model.layers:
                experts_of(layer).gate.weight.zero_()  # the first ones are chosen
        return sharded(model, ep)

    expect_equal(
        trained(overlap_microbatches, made(), 2, 1), trained(plain, made(), 2, 1)
    )


def test_mixed_precision(ep):
    options = dict(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    ours = trained(overlap_microbatches, sharded(make("mixtral"), ep, **options))
    expect_equal(ours, trained(plain, sharded(make("mixtral"), ep, **options)))


@pytest.mark.skipif(
    os.environ.get("FLATSHARD_WHOLE_MATRIX") != "1",
    reason="FLATSHARD_WHOLE_MATRIX=1 runs all combinations, which takes minutes",
)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3", "hsdp"])
def test_whole_matrix(strategy, n, delays, recomputes, ep, world):
    """With `ep` ranks alone, and "hsdp" on twice as many."""
    replicas = 2 if strategy == "hsdp" else 1
    if world != ep * replicas:
        pytest.skip("for another number of ranks")

    def made():
        model = make("qwen3_moe")
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        options = {} if strategy == "hsdp" else dict(strategy=strategy)
        return sharded(model, ep, replicas, grads_in_place=True, **options).train()

    ours = trained(late if delays else overlap_microbatches, made(), n)
    expect_equal(ours, trained(plain, made(), n))


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
    """By the plan: between the start of an exchange and the wait for it."""
    seen = []
    start, wait = overlap.Transfer.__init__, overlap.Transfer.wait
    backward = overlap._backward

    def started(self, *arguments):
        seen.append("start")
        start(self, *arguments)

    def waited(self):
        seen.append("wait")
        return wait(self)

    def computed(ends):
        seen.append("backward")
        backward(ends)

    monkeypatch.setattr(overlap.Transfer, "__init__", started)
    monkeypatch.setattr(overlap.Transfer, "wait", waited)
    monkeypatch.setattr(overlap, "_backward", computed)
    model = sharded(make("mixtral"), ep)
    overlap_microbatches(model, batches_of(0, 2))
    # Two microbatches in two layers, four exchanges each.
    assert seen.count("start") == seen.count("wait") == 16
    text = " ".join(seen)
    # B0.combine F1.dispatch; B0.experts; B0.dispatch; F1.experts; F1.combine; B0.attend.
    assert "start start wait backward start wait start wait backward" in text, text


def qwen_with_six_layers():
    config = transformers.Qwen3MoeConfig(
        **{**SHAPE, "num_hidden_layers": 6},
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    )
    return on_device(transformers.Qwen3MoeForCausalLM(config))


def test_collectives_are_those_of_the_schedule_on_all_ranks(ep, world, monkeypatch):
    if world == 1:
        pytest.skip("nothing is gathered on one rank")
    monkeypatch.setenv("FLATSHARD_TRACE_STEPS", "1")
    model = sharded(qwen_with_six_layers(), ep)
    for step in range(2):  # the second one knows the order
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
    # Both microbatches compute, each with a layer ahead; none is gathered on demand.
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
    start, count = overlap.Transfer.__init__, iter(range(100))

    def started(self, *arguments):
        start(self, *arguments)
        if next(count) == when:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(overlap.Transfer, "__init__", started)
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
    with pytest.raises(ValueError, match="at least one, got none"):
        overlap_microbatches(model, [])
    with pytest.raises(ValueError, match="loss_of: expected a call of the model"):
        overlap_microbatches(model, batches, lambda model, batch: torch.ones(()))
    with pytest.raises(ValueError, match="found none in FSDPMixtralForCausalLM"):
        overlap_microbatches(sharded(make("mixtral"), 1, spread=False), batches)
    mesh = named_mesh(ep=dist.get_world_size())
    if dist.get_world_size() < 3:
        whole = expert_parallel(make("mixtral"), mesh["ep"], overlap=True)
        with pytest.raises(ValueError, match="layer 0 is no unit"):
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
