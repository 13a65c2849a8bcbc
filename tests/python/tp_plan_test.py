"""transformers' own tensor parallelism (tp_plan), then fully_shard."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    modeling_utils,
)

from flatshard import fully_shard
from tests.python.device import named_mesh
from tests.python.sum_order import SMALL_MODEL
from tests.python.training import train_batches

VOCAB = 32


def saved(folder, rank, tied):
    """A folder with a small Llama, and that model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    if rank == 0:
        model.save_pretrained(folder)
    torch.distributed.barrier()
    return model


def load(folder, tp, monkeypatch):
    options = {"tp_plan": "auto", "dtype": torch.float32}
    if hasattr(modeling_utils, "initialize_tensor_parallelism"):
        # transformers 4 uses the number of a CPU as the number of a GPU.
        cpu = torch.device("cpu")
        monkeypatch.setattr(
            modeling_utils,
            "initialize_tensor_parallelism",
            lambda tp_plan, **_: (tp_plan, cpu, tp, tp.size()),
        )
    else:
        options["device_mesh"] = tp
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def train(model, seeds):
    def loss_of(step, seed):
        generator = torch.Generator().manual_seed(100 * step + seed)
        ids = torch.randint(0, VOCAB, (2, 8), generator=generator)
        return model(input_ids=ids, labels=ids).loss

    return train_batches(loss_of, torch.optim.SGD(model.parameters(), lr=0.5), seeds)


def whole(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


@pytest.mark.parametrize("tied", [False, True])
def test_loads_and_trains_like_one_process(tied, world, rank, folder, monkeypatch):
    if world not in (2, 4):
        pytest.skip("needs 2 or 4 ranks")
    expected = saved(folder, rank, tied)
    mesh = named_mesh(dp=world // 2, tp=2)
    model = load(folder, mesh["tp"], monkeypatch)
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p), expected.get_parameter(name), msg=name)
    own = mesh.get_local_rank("dp")
    found, wanted = train(model, [own]), train(expected, range(world // 2))
    if world == 2:
        assert found == pytest.approx(wanted, rel=SMALL_MODEL)
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            whole(p), expected.get_parameter(name), rtol=1e-4, atol=1e-5, msg=name
        )
