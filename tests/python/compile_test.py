"""torch.compile over and inside sharded modules: the graphs contain no trace of
sharding, so they are compiled once and give the results of eager code."""

import copy
import itertools

import pytest
import torch
from torch._dynamo.utils import counters

import flatshard
from bench.harness.steps import counted_recordings
from flatshard._fsdp.forward import root_of
from flatshard.diagnostics import parameter_norms
from tests.python import float8_models
from tests.python.device import DEVICE, IS_WHOLE_MATRIX, on_device
from tests.python.models import Mlp, llama
from tests.python.sum_order import SMALL_MODEL
from bench.harness.options import fully_shard
from tests.python.training import distance, full_state, shard

STEPS = 5


def case_id(value):
    return {False: "blocks", True: "model"}.get(value) or getattr(
        value, "__name__", str(value)
    ).lower()


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


# Each value of a column with each value of any other.
PAIRWISE = [
    (Mlp, False, "before"),
    (Mlp, True, "after"),
    (llama, False, "after"),
    (llama, True, "before"),
]
WHOLE = list(itertools.product([Mlp, llama], [False, True], ["before", "after"]))


@pytest.mark.parametrize(
    "make, whole, order", WHOLE if IS_WHOLE_MATRIX else PAIRWISE, ids=case_id
)
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
    assert found == pytest.approx(expected, rel=SMALL_MODEL)
    assert graphs[-1] > 0, "nothing was compiled"
    assert graphs[2] == graphs[-1], "compiled again after the third step"


def test_what_torch_compile_returns_is_accepted_as_the_model(folder, mesh):
    torch.manual_seed(0)
    model = shard(Mlp(), fully_shard, mesh=mesh)
    other = shard(Mlp(), fully_shard, mesh=mesh)
    compiled, other_compiled = (
        torch.compile(one, backend="eager") for one in (model, other)
    )
    assert distance(full_state(model), full_state(other)) > 0
    flatshard.checkpoint.save(folder, 1, compiled)
    flatshard.checkpoint.load(folder, other)
    assert distance(full_state(model), full_state(other)) == 0
    flatshard.checkpoint.load(folder, other_compiled)
    names = [name for name, _ in flatshard.weights.stream(model)]
    assert [name for name, _ in flatshard.weights.stream(compiled)] == names
    assert list(flatshard.weights.changed(compiled)) == []
    norms = parameter_norms(model)
    assert parameter_norms(compiled) == norms and norms


# -- mode="reduce-overhead": torch's own CUDA graphs ---------------------------------------


def arena(model, mesh, **options):
    for unit in model.units():
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh, buffers_on_demand=False, **options)


def test_addresses_repeat_in_the_arena(mesh, rank):
    model = arena(Mlp(), mesh)
    steps = []

    def note(module, args):
        steps[-1] += [p.data_ptr() for p in module.parameters()]

    for unit in model.units():
        unit.register_forward_pre_hook(note)
    for unit in model.units()[1:]:  # the first one's input needs no gradient
        unit.register_full_backward_pre_hook(note)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for step in range(6):
        steps.append([])
        model.loss(torch.Generator().manual_seed(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(on_device(torch.empty(100 * step)))  # allocations in between
    assert steps[2] and steps[2] == steps[3] == steps[4] == steps[5]


def test_reduce_overhead_records_once(mesh, rank):
    if DEVICE != "cuda":
        pytest.skip("CUDA graphs want a GPU")
    pytest.importorskip("triton")
    torch._dynamo.reset()
    plain = Mlp()
    model = copy.deepcopy(plain)
    for unit in plain.units():
        unit.compile()
    arena(plain, mesh)
    for unit in model.units():
        unit.compile(mode="reduce-overhead")
    arena(model, mesh)

    expected, _ = losses(plain, plain.loss, rank)
    with counted_recordings() as seen:
        found, recordings = [], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        for number in range(3 * STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            seed = 10 * (number % STEPS) + rank
            loss = model.loss(torch.Generator().manual_seed(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            recordings.append(len(seen))
    assert recordings[-1] >= 2 * len(model.units()), "nothing was recorded"
    assert recordings[STEPS] == recordings[-1], f"recorded again: {recordings}"
    assert found[:STEPS] == pytest.approx(expected, rel=SMALL_MODEL)


def test_buffers_on_demand_are_refused_by_name(mesh, monkeypatch):
    with pytest.raises(
        ValueError, match="buffers_on_demand: expected True, False or None"
    ):
        fully_shard(Mlp(), mesh=mesh, buffers_on_demand=0)
    model = arena(Mlp(), mesh)
    with pytest.raises(NotImplementedError, match="buffers_on_demand=False"):
        model.set_reduce_scatter_max_input_buffers(2)
    runtime = root_of(model).runtime
    with pytest.raises(flatshard.Error, match="an arena is planned"):
        runtime.set_max_grad_slots(3)
    monkeypatch.setenv("FLATSHARD_EMULATE_CUDA_GRAPHS", "1")
    model = Mlp()
    fully_shard(model.blocks[0], mesh=mesh, cuda_graph=True)
    fully_shard(model, mesh=mesh, buffers_on_demand=True)
    with pytest.raises(ValueError, match="buffers_on_demand: .* with cuda_graph=True"):
        model.loss(torch.Generator())


# -- FP8 weights under it -------------------------------------------------------------------


def fp8_blocks(mesh, mode):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = float8_models.Mlp()
    for unit in model.units():
        unit.compile(mode=mode)
    options = {"mesh": mesh, "mp_policy": float8_models.BF16}
    for unit in model.units():
        fully_shard(unit, fp8=float8_models.policy("rowwise"), **options)
    return fully_shard(model, buffers_on_demand=False, **options)


def test_graphs_of_torch_leave_fp8_products_out():
    """They would capture the planes of one step: torch has to run around them."""
    for name in ("float8_linear", "float8_linear_backward"):
        operator = getattr(torch.ops.flatshard, name).default
        assert torch.Tag.cudagraph_unsafe in operator.tags


def test_reduce_overhead_with_fp8(mesh, rank):
    if DEVICE != "cuda":
        pytest.skip("CUDA graphs want a GPU")
    pytest.importorskip("triton")
    model = fp8_blocks(mesh, "reduce-overhead")
    with pytest.raises(RuntimeError, match="down.weight is stored in FP8 .*cuda_graph"):
        for number in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            model.loss(torch.Generator().manual_seed(10 * number + rank)).backward()
