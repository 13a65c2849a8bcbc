"""The memory of a shard, as libraries query it: an address that no other parameter has,
and a storage with its rows only, also where a rank has none."""

import io

import pytest
import torch
from torch import nn

from flatshard import fully_shard
from tests.python.device import DEVICE, on_device
from tests.python.models import Mlp
from tests.python.training import shard, train


def small():
    """Parameters without rows on some rank."""
    return on_device(
        nn.Sequential(
            nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 64), nn.Linear(64, 1)
        )
    )


def made(mesh, strategy="zero3"):
    return fully_shard(small(), mesh=mesh, strategy=strategy)


def storage_key(tensor):
    """As transformers and safetensors find tensors that share memory."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "zero0"])
def test_each_shard_has_an_address(strategy, mesh, rank, world):
    model = made(mesh, strategy)
    parameters = list(model.parameters())
    if world > 1 and strategy == "zero3":
        count = torch.tensor(sum(p.to_local().numel() == 0 for p in parameters))
        torch.distributed.all_reduce(count)
        assert count > 0
    for ask in (
        lambda p: p.data_ptr(),
        lambda p: p.untyped_storage().data_ptr(),
        lambda p: p.to_local().untyped_storage().data_ptr(),
        lambda p: storage_key(p.to_local()),
        lambda p: storage_key(p),
    ):
        assert len({ask(p) for p in parameters}) == len(parameters)
        assert [ask(p) for p in parameters] == [ask(p) for p in parameters]
    for p in parameters:
        local = p.to_local()
        assert p.data_ptr() != 0
        if local.numel():
            assert p.data_ptr() == local.data_ptr()
        assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


def test_tied_parameters_have_one_address(mesh):
    model = small()
    model[1].weight = model[0].weight
    fully_shard(model, mesh=mesh)
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr()
    keys = {storage_key(t.to_local()) for t in model.state_dict().values()}
    assert len(keys) == len(list(model.parameters()))


def end(tensor):
    """The address after the last element, as transformers and safetensors compute it."""
    return tensor.view(-1)[-1].data_ptr() + tensor.element_size()


def test_addresses_of_views_are_those_of_the_shard(mesh, world):
    model = small()
    model[1].weight = model[0].weight
    fully_shard(model, mesh=mesh)
    for p in model.parameters():
        local = p.to_local()
        last = p.view(-1)[-1]
        assert storage_key(last) == storage_key(p)
        assert storage_key(p.t()) == storage_key(p)
        assert p.t().data_ptr() == p.data_ptr()
        assert end(p) == end(p.detach())
        # The last row is on one rank.
        nbytes = local.numel() * local.element_size()
        ends = [None] * world
        torch.distributed.all_gather_object(ends, (end(p) - p.data_ptr(), nbytes))
        assert any(found == size for found, size in ends if size)
        assert all(0 < found <= max(size, p.element_size()) for found, size in ends)
    tied = [p.detach() for p in (model[0].weight, model[1].weight)]
    assert end(tied[0]) == end(tied[1])


def test_optimizers_find_their_parameters_by_address(mesh, rank):
    """As accelerate does when it prepares a model a second time."""
    model = shard(Mlp(), fully_shard, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, rank, steps=1, optimizer=optimizer)
    names = {p.data_ptr(): name for name, p in model.named_parameters()}
    found = [names[p.data_ptr()] for p in optimizer.param_groups[0]["params"]]
    assert found == [name for name, _ in model.named_parameters()]
    moments = [s["exp_avg"].to_local() for s in optimizer.state.values()]
    model(on_device(torch.ones(1, 13))).sum().backward()
    gradients = [p.grad.to_local() for p in model.parameters()]
    for tensors in (moments, gradients):
        sized = [t for t in tensors if t.numel()]
        assert len({storage_key(t) for t in sized}) == len(sized)


def test_a_saved_shard_is_no_larger_than_its_rows(mesh):
    model = shard(Mlp(hidden=1000), fully_shard, mesh=mesh)
    for p in model.parameters():
        for saved in (p, p.to_local(), p.detach()):
            file = io.BytesIO()
            torch.save(saved, file)
            nbytes = p.to_local().numel() * p.element_size()
            assert nbytes <= len(file.getvalue()) < nbytes + 5000
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            local = loaded if saved is not p and type(saved) is torch.Tensor else None
            local = loaded.to_local() if local is None else local
            assert torch.equal(local, p.to_local())


def test_shared_memory_is_refused(mesh):
    """torch would end the process, or give the optimizer other memory than the core has."""
    model = made(mesh)
    weight = model[0].weight
    for share in (
        model.share_memory,
        model[1].share_memory,
        weight.share_memory_,
        weight.detach().share_memory_,
    ):
        with pytest.raises(NotImplementedError, match="share a copy, parameter.to_loc"):
            share()
    if DEVICE == "cpu":
        assert not any(p.to_local().is_shared() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_all_ranks_save_a_model_of_transformers(tied, mesh, folder, rank):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        tie_word_embeddings=tied,
    )
    model = on_device(transformers.LlamaForCausalLM(config))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.save_pretrained(f"{folder}/{rank}")
    loaded = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/{rank}")
    for name, value in loaded.state_dict().items():
        assert torch.equal(on_device(value), before[name]), name
