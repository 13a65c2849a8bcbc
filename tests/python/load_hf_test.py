"""load_hf: folders that transformers wrote, read into models on the meta device."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatshard
from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, load_hf
from tests.python.device import on_device
from tests.python.models import SIZES

transformers = pytest.importorskip("transformers")

SHAPE = dict(SIZES, vocab_size=64)
MODELS = {
    "llama": ("Llama", dict(SHAPE)),
    "qwen2, tied": ("Qwen2", dict(SHAPE, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(SHAPE, head_dim=8)),
    "gpt2": (
        "GPT2",
        dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ),
    "mixtral": ("Mixtral", dict(SHAPE, num_local_experts=4)),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            SHAPE,
            head_dim=8,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
        ),
    ),
}


def kind_of(family):
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name), getattr(transformers, f"{family}Config")


@pytest.fixture
def folder(tmp_path_factory, rank, world):
    """One for all ranks."""
    path = [str(tmp_path_factory.mktemp("hf"))] if rank == 0 else [None]
    if world > 1:
        dist.broadcast_object_list(path)
    yield path[0]
    if world > 1:
        dist.barrier()
    if rank == 0:
        shutil.rmtree(path[0])


def written(name, folder, rank, world, **options):
    """Returns the model of one process. Rank 0 also writes it to the folder."""
    family, sizes = MODELS[name]
    model_class, config_class = kind_of(family)
    torch.manual_seed(0)
    model = model_class(config_class(**sizes))
    if rank == 0:
        model.save_pretrained(folder, **options)
    if world > 1:
        dist.barrier()
    return model


def on_meta(name):
    family, sizes = MODELS[name]
    model_class, config_class = kind_of(family)
    with torch.device("meta"):
        return model_class(config_class(**sizes))


def shard(model, mesh, **options):
    classes = set(model._no_split_modules)
    for module in list(model.modules()):
        if type(module).__name__ in classes:
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def logits(model):
    tokens = torch.arange(24).view(2, 12) % 64
    model.eval()  # GPT-2 has dropout
    with torch.no_grad():
        return model(input_ids=on_device(tokens), use_cache=False).logits


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_folders_model(name, files, folder, mesh, rank, world):
    size = {} if files == "one" else {"max_shard_size": "20KB"}
    expected = on_device(written(name, folder, rank, world, **size))
    model = shard(on_meta(name), mesh)
    assert load_hf(model, folder) == []
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)
    tokens = on_device(torch.arange(24).view(2, 12) % 64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_into_what_torch_compile_returns(folder, mesh, rank, world):
    expected = on_device(written("llama", folder, rank, world))
    model = shard(on_meta("llama"), mesh)
    assert load_hf(torch.compile(model, backend="eager"), folder) == []
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)


def test_each_rank_reads_its_rows_alone(folder, mesh, rank, world, monkeypatch):
    written("llama", folder, rank, world)
    model = shard(on_meta("llama"), mesh)
    read = []
    from flatshard.checkpoint import hf

    rows = hf._One.rows
    monkeypatch.setattr(
        hf._One,
        "rows",
        lambda one, begin, end: read.append((end - begin) / one.shape[0])
        or rows(one, begin, end),
    )
    load_hf(model, folder)
    own = sum(p.to_local().numel() for p in model.parameters())
    assert own < 1.2 * sum(p.numel() for p in model.parameters()) / world
    if world > 1:
        assert sum(read) < 0.8 * len(list(model.parameters()))


@pytest.mark.parametrize(
    "options",
    [
        {"offload_policy": CPUOffloadPolicy()},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"strategy": "zero1"},
    ],
)
def test_with_other_options(options, folder, mesh, rank, world):
    expected = written("llama", folder, rank, world)
    model = shard(on_meta("llama"), mesh, **options)
    load_hf(model, folder)
    for (name, p), q in zip(model.named_parameters(), expected.parameters()):
        torch.testing.assert_close(p.full_tensor().cpu(), q, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_on_other_ranks(name, folder, rank, world):
    if world not in (1, 2, 4):
        pytest.skip("needs 1, 2 or 4 ranks")
    expected = on_device(written(name, folder, rank, world))
    model = flatshard.shard_moe(on_meta(name), ep=min(world, 2))
    load_hf(model, folder)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)


def test_over_values_that_are_there(folder, mesh, rank, world):
    expected = on_device(written("llama", folder, rank, world))
    family, sizes = MODELS["llama"]
    torch.manual_seed(1)
    model = shard(on_device(kind_of(family)[0](kind_of(family)[1](**sizes))), mesh)
    before = logits(model)
    load_hf(model, folder)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)
    assert not torch.equal(before, logits(model))


def test_names_and_what_is_left(folder, mesh, rank, world):
    """A base model of a folder of a model with a head; other names."""
    written("llama", folder, rank, world)
    family, sizes = MODELS["llama"]
    with torch.device("meta"):
        base = transformers.LlamaModel(transformers.LlamaConfig(**sizes))
    assert load_hf(shard(base, mesh), folder) == ["lm_head.weight"]

    with torch.device("meta"):
        norm = nn.RMSNorm(32)
    rest = load_hf(fully_shard(norm, mesh=mesh), folder, rename="model.norm.{}".format)
    assert "model.norm.weight" not in rest and len(rest) > 10


def test_what_does_not_fit_is_named(folder, mesh, rank, world, tmp_path):
    written("llama", folder, rank, world)
    model = shard(on_meta("qwen3"), mesh)
    with pytest.raises(ValueError, match="none for 4: model.layers.0.self_attn.k_norm"):
        load_hf(model, folder)
    with pytest.raises(FileNotFoundError, match="expected model.safetensors or"):
        load_hf(model, tmp_path)
    family, sizes = MODELS["llama"]
    with torch.device("meta"):
        other = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**sizes, "vocab_size": 65})
        )
    with pytest.raises(ValueError, match=r"expected a tensor \[65, 32\], found \[64"):
        load_hf(shard(other, mesh), folder)
