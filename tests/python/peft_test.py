"""LoRA through the peft library: adapters are put in first, then the model is
sharded."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)

from flatshard import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from tests.python.device import on_device
from tests.python.models import llama, with_adapters
from tests.python.training import adamw, full_state, train_batches

peft = pytest.importorskip("peft", reason="wants requirements.txt")

VOCABULARY = 67


def adapted():
    torch.manual_seed(0)
    return with_adapters(llama())


def shard(model, mesh, **options):
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = on_device(torch.randint(VOCABULARY, (2, 10), generator=generator))
    return model(input_ids=ids, labels=ids).loss


def train(model, ranks, steps=3):
    return train_batches(
        lambda step, rank: loss_of(model, rank, step), adamw(model), ranks, steps
    )


@pytest.mark.parametrize("checkpoints", [False, True])
def test_lora_trains_like_one_process(checkpoints, mesh, world, rank):
    model = adapted()
    if checkpoints:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    single = copy.deepcopy(model)
    before = full_state(single)
    shard(model, mesh)
    train(model, [rank])
    train(single, range(world))
    found, expected = full_state(model), full_state(single)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
        assert ("lora_" in name) != torch.equal(value, before[name]), name
    for p in model.parameters():
        assert p.requires_grad or p.grad is None


def test_state_of_the_adapters(mesh, rank, folder):
    model = shard(adapted(), mesh)
    train(model, [rank], steps=1)
    whole = full_state(model)

    state = peft.get_peft_model_state_dict(model)
    assert len(state) == 2 * 3 * 2 and all("lora_" in name for name in state)
    for name, value in state.items():
        inside = name.replace(".weight", ".default.weight")
        assert torch.equal(value.full_tensor(), whole[inside])

    # torch's way: only trained parameters, unsharded on rank 0.
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
    )
    trained = get_model_state_dict(model, options=options)
    if rank == 0:
        assert trained.keys() == {n for n in whole if "lora_" in n}
        assert all(torch.equal(trained[name], whole[name].cpu()) for name in trained)

    # And sharded, to files and into another model.
    dcp.save(state, checkpoint_id=folder)
    other = shard(adapted(), mesh)
    with torch.no_grad():
        for name, p in other.named_parameters():
            if "lora_" in name:
                p.zero_()
    loaded = peft.get_peft_model_state_dict(other)
    dcp.load(loaded, checkpoint_id=folder)
    result = peft.set_peft_model_state_dict(other, loaded)
    assert not result.unexpected_keys
    for name, value in full_state(other).items():
        assert torch.equal(value, whole[name]), name


def test_generation_and_the_model_without_adapters(mesh):
    model = adapted()
    single = copy.deepcopy(model)
    shard(model, mesh)
    # peft calls the model inside, below what is wrapped.
    register_fsdp_forward_method(model, "generate")
    ids = on_device(torch.tensor([[1, 2, 3]]))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = single.generate(input_ids=ids, **options)
        assert torch.equal(model.generate(input_ids=ids, **options), expected)
    with model.disable_adapter(), single.disable_adapter(), torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, single(input_ids=ids).logits)


def test_bf16_backbone_with_float32_adapters(mesh, rank):
    """peft leaves a model that was loaded in bf16 like this: two dtypes in one unit."""
    model = adapted()
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.bfloat16()
    shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = full_state(model)
    train(model, [rank], steps=1)
    for name, value in full_state(model).items():
        adapter = "lora_" in name
        assert value.dtype == (torch.float32 if adapter else torch.bfloat16), name
        assert adapter != torch.equal(value, before[name]), name
