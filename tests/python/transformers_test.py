"""Hugging Face models the way people start and use them: made on the meta device,
evaluated and asked to generate while they are trained."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import flatshard
from flatshard import fully_shard
from tests.python.device import DEVICE, on_device
from tests.python.models import Mlp, gpt2, llama, t5
from tests.python.training import full_state, shard

GENERATORS = {
    "llama": llama,
    "llama tied": lambda: llama(tied=True),
    "gpt2": gpt2,  # tied
    "t5": t5,  # tied, encoder and decoder
}


def shard_inner(wrapper, mesh, **options):
    """The transformers model is the root, as in most scripts."""
    for unit in wrapper.units():
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(wrapper.model, mesh=mesh, **options)
    return wrapper


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_generate_between_steps(name, reshard, mesh, rank, world):
    wrapper = GENERATORS[name]()
    single = copy.deepcopy(wrapper)
    shard_inner(wrapper, mesh, reshard_after_forward=reshard)
    if name == "t5":  # generate() calls the encoder, which is below the root
        flatshard.register_fsdp_forward_method(wrapper.model, "generate")
    ours = torch.optim.SGD(wrapper.parameters(), lr=0.5)
    theirs = torch.optim.SGD(single.parameters(), lr=0.5)
    ids = on_device(torch.tensor([[3, 1, 2], [5, 4, 7]]))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    seen = []
    for step in range(3):
        wrapper.loss(torch.Generator().manual_seed(10 * step + rank)).backward()
        for r in range(world):
            generator = torch.Generator().manual_seed(10 * step + r)
            (single.loss(generator) / world).backward()
        found = wrapper.model.generate(ids, **options)
        expected = single.model.generate(ids, **options)
        assert torch.equal(found, expected)
        seen.append(expected)
        # A forward without gradients between backward and step does not change them.
        for a, b in zip(wrapper.parameters(), single.parameters()):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad)
        ours.step(), ours.zero_grad()
        theirs.step(), theirs.zero_grad()
    if name == "llama":
        assert not torch.equal(seen[0], seen[-1]), "training changed nothing to see"


@pytest.mark.parametrize("cache", [False, True])
def test_generate_with_sampling_is_the_same_on_all_ranks(cache, mesh):
    wrapper = shard_inner(llama(tied=True), mesh)
    torch.manual_seed(7)
    found = wrapper.model.generate(
        on_device(torch.tensor([[1, 2]])),
        max_new_tokens=5,
        do_sample=True,
        use_cache=cache,
        pad_token_id=0,
    )
    all_found = [None] * mesh.size()
    torch.distributed.all_gather_object(all_found, found.tolist())
    assert all(other == found.tolist() for other in all_found)


def test_tied_parameters_stay_one(mesh, rank):
    wrapper = shard_inner(llama(tied=True), mesh)
    model = wrapper.model
    for _ in range(2):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        wrapper.loss(torch.Generator().manual_seed(rank)).backward()
    names = [name for name, _ in model.named_parameters()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    model.tie_weights()  # transformers calls it after loading
    assert model.lm_head.weight is model.model.embed_tokens.weight
    wrapper.loss(torch.Generator().manual_seed(rank)).backward()


@pytest.fixture
def meta_by_default():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_default_device_meta(meta_by_default, mesh, rank):
    """All of it, also what fully_shard makes itself, under the default."""
    model = Mlp()
    assert all(p.is_meta for p in model.parameters())
    shard(model, fully_shard, mesh=mesh)
    flatshard.reset_parameters(model, seed=3)
    assert not any(p.to_local().is_meta for p in model.parameters())
    torch.set_default_device(None)
    other = shard(Mlp(), fully_shard, mesh=mesh)
    flatshard.reset_parameters(other, seed=3)
    expected = full_state(other)
    for name, value in full_state(model).items():
        assert torch.equal(value, expected[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    optimizer.step()
    assert all(torch.isfinite(v).all() for v in full_state(model).values())


def test_default_device_meta_without_a_mesh(meta_by_default):
    model = fully_shard(Mlp())
    flatshard.reset_parameters(model)
    assert all(p.to_local().device.type == DEVICE for p in model.parameters())


def test_transformers_model_from_meta(mesh, rank, world):
    """The model has its own initialization, and buffers are made again."""
    with torch.device("meta"):
        wrapper = llama()
    shard_inner(wrapper, mesh)
    model = wrapper.model
    flatshard.reset_parameters(model, seed=5, init_fn=model._init_weights)
    model.model.rotary_emb = on_device(LlamaRotaryEmbedding(model.config))
    state = full_state(model)
    assert 0.01 < state["model.layers.0.mlp.up_proj.weight"].std() < 0.03
    assert (state["model.norm.weight"] == 1).all()
    single = llama()
    single.model.load_state_dict(state)
    expected = 0
    for r in range(world):
        loss = single.loss(torch.Generator().manual_seed(r)) / world
        loss.backward()
        expected = loss * world if r == rank else expected
    loss = wrapper.loss(torch.Generator().manual_seed(rank))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for a, b in zip(model.parameters(), single.model.parameters()):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def test_to_empty_and_first_values_by_hand(mesh, rank):
    """FSDP2's way: to_empty(), then the model's own initialization of shards."""
    with torch.device("meta"):
        wrapper = llama()
    shard_inner(wrapper, mesh)
    model = wrapper.model
    model.to_empty(device=DEVICE)
    model.model.rotary_emb = on_device(LlamaRotaryEmbedding(model.config))
    with torch.no_grad():
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
    assert all((v == 0.5).all() for v in full_state(model).values())
    wrapper.loss(torch.Generator().manual_seed(rank)).backward()
    assert all(torch.isfinite(p.grad.to_local()).all() for p in model.parameters())
