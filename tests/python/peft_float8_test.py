"""LoRA through the peft library on a base whose weights are FP8."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flatshard
from flatshard.diagnostics import take_trace
from flatshard.float8.linear import Float8Linear
from tests.python.device import DEVICE, on_device
from tests.python.float8_models import BF16, KINDS, llama, one_rank, policy
from bench.harness.options import fully_shard
from tests.python.training import distance, full_state, train_batches
from tests.python.models import with_adapters

peft = pytest.importorskip("peft", reason="wants requirements.txt")

VOCABULARY = 67
ROWS, COLUMNS = 1, 2


def is_base(module, name):
    return "lora_" not in name


def sharded(mesh, kind, recomputes=False, rank_of_adapters=16, filters=True):
    torch.manual_seed(0)
    model = with_adapters(llama(), rank_of_adapters)
    if recomputes:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fp8 = None
    if kind is not None:
        fp8 = policy(*KINDS[kind], module_filter_fn=is_base if filters else None)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BF16, fp8=fp8)
    return fully_shard(model, mesh=mesh, mp_policy=BF16)


def ids_of(number):
    generator = torch.Generator().manual_seed(number)
    return on_device(torch.randint(VOCABULARY, (2, 16), generator=generator))


def train(model, batches, steps=3):
    """Losses by step and microbatch."""

    def loss_of(step, number):
        return model(input_ids=ids_of(number), labels=ids_of(number)).loss

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = flatshard.optim.AdamW(trained, lr=1e-2)
    return train_batches(loss_of, optimizer, batches, steps)


def logits_of_the_base(model):
    with model.disable_adapter(), torch.no_grad():
        return model(input_ids=ids_of(77)).logits


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise stored", "mxfp8"])
def test_it_trains_as_one_rank_does(kind, recomputes, mesh, rank, world):
    if world not in (1, 2, 4):
        pytest.skip("a power of two divides gradients exactly")
    many, one = (
        sharded(m, kind, recomputes, rank_of_adapters=3)
        for m in (mesh, one_rank(world))
    )
    found = flatshard.float8.describe(many)
    assert len(found.float8) == 2 * 7 and not any("lora_" in n for n in found.float8)
    before, base = full_state(many), logits_of_the_base(many)
    losses = [None] * world
    torch.distributed.all_gather_object(losses, train(many, [rank]))
    expected = train(one, range(world))
    in_order = [loss for step in zip(*losses) for loss in step]
    after = full_state(many)
    if DEVICE == "cpu" and world <= 2:
        assert in_order == expected
        assert distance(after, full_state(one)) == 0
    else:
        assert in_order == pytest.approx(expected, abs=2e-2)
    assert in_order[-1] < in_order[0]
    for name, value in after.items():
        assert ("lora_" in name) != torch.equal(value, before[name]), name
    # And so are the planes that are made of them.
    assert torch.equal(logits_of_the_base(many), base)
    assert all(p.requires_grad or p.grad is None for p in many.parameters())
    # It is FP8, and near to bfloat16.
    plain = train(sharded(one_rank(world), None, rank_of_adapters=3), range(world))
    assert plain != expected and plain == pytest.approx(expected, abs=0.1)


def test_the_base_is_gathered_as_fp8_and_made_once(mesh, rank, world, monkeypatch):
    """Rows for the forward, columns for the backward, none recreated by a step."""
    monkeypatch.setenv("FLATSHARD_TRACE_STEPS", "1")
    model = sharded(mesh, "rowwise stored")
    train(model, [rank], steps=1)
    take_trace(model)
    train(model, [rank], steps=1)
    found = {}
    for a in take_trace(model):
        if a.kind == "gather" and ".layers." in a.unit:
            key = a.phase, a.plane
            found[key] = found.get(key, 0) + a.nbytes
    assert found.get(("forward", COLUMNS), 0) == found.get(("backward", ROWS), 0) == 0
    if world > 1:
        weights = sum(
            p.numel() for n, p in model.named_parameters() if "base_layer" in n
        )
        assert found[("forward", ROWS)] > weights
        assert found[("forward", ROWS)] == pytest.approx(
            found[("backward", COLUMNS)], rel=0.1
        )


def test_adapters_are_saved_and_loaded(mesh, rank, folder):
    kind = "rowwise"
    model = sharded(mesh, kind)
    train(model, [rank], steps=2)
    state = peft.get_peft_model_state_dict(model)
    assert len(state) == 2 * 3 * 2 and all("lora_" in name for name in state)
    dcp.save(state, checkpoint_id=f"{folder}/adapters")
    flatshard.checkpoint.save(f"{folder}/all", 1, model)
    by_peft, by_flatshard = sharded(mesh, kind), sharded(mesh, "mxfp8 stored")
    loaded = peft.get_peft_model_state_dict(by_peft)
    dcp.load(loaded, checkpoint_id=f"{folder}/adapters")
    assert not peft.set_peft_model_state_dict(by_peft, loaded).unexpected_keys
    flatshard.checkpoint.load(f"{folder}/all", by_flatshard)
    expected = full_state(model)
    for other in (by_peft, by_flatshard):
        assert distance(full_state(other), expected) == 0
    assert train(model, [rank]) == train(by_peft, [rank])


def test_adapters_may_be_fp8_themselves(mesh, rank):
    """Adapters have a rank that the recipe divides, and no filter applies."""
    model = sharded(mesh, "rowwise", filters=False)
    found = flatshard.float8.describe(model).float8
    assert sum("lora_" in name for name in found) == 2 * 3 * 2
    losses = train(model, [rank], steps=4)
    assert losses[-1] < losses[0]
    layer = model.base_model.model.model.layers[0]
    assert type(layer.self_attn.q_proj.base_layer) is Float8Linear


def test_merging_names_what_it_reads(mesh):
    """peft adds adapters to the weights of the base. A forward does not have them."""
    model = sharded(mesh, "rowwise")
    layer = model.base_model.model.model.layers[0]
    model.unshard(), layer.unshard()
    with pytest.raises(Exception, match="q_proj.base_layer.weight is stored in FP8"):
        layer.self_attn.q_proj.merge()
    layer.reshard(), model.reshard()
