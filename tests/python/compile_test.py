"""torch.compile over and inside sharded modules: the graphs hold no trace of
sharding, so they are compiled once and give what eager code gives."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from flatshard import fully_shard
from tests.python.models import Mlp, llama
from tests.python.training import shard

STEPS = 5


def losses(model, call, rank):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    result, graphs = [], []
    for step in range(STEPS):
        loss = call(torch.Generator().manual_seed(10 * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return result, graphs


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
@pytest.mark.parametrize("make", [Mlp, llama], ids=["mlp", "llama"])
def test_compiled_trains_like_eager(make, whole, order, mesh, rank):
    torch._dynamo.reset()
    counters.clear()
    eager = make()
    compiled = copy.deepcopy(eager)
    shard(eager, fully_shard, mesh=mesh)
    expected, _ = losses(eager, eager.loss, rank)

    def compile_blocks():
        for unit in compiled.units():
            unit.compile(backend="aot_eager")

    if not whole and order == "before":
        compile_blocks()
    if whole and order == "before":
        compiled.compile(backend="aot_eager")
    shard(compiled, fully_shard, mesh=mesh)
    if not whole and order == "after":
        compile_blocks()
    if whole and order == "after":
        compiled.compile(backend="aot_eager")
    counters.clear()
    found, graphs = losses(compiled, compiled.loss, rank)
    assert found == pytest.approx(expected, rel=1e-5)
    assert graphs[-1] > 0, "nothing was compiled"
    assert graphs[2] == graphs[-1], "compiled again after the third step"
