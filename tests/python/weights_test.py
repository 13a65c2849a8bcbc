"""flatshard.weights: full tensors for inference engines, and their changes."""

import copy
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatshard
from flatshard import MixedPrecisionPolicy, load_hf, weights
from flatshard._fsdp.forward import root_of
from flatshard.weights.source import _plans
from tests.python import experts_mesh_test as experts
from tests.python.device import DEVICE, named_mesh, on_device
from tests.python.float8_models import policy as float8_policy
from tests.python.load_hf_test import MODELS, kind_of
from tests.python.models import Mlp
from tests.python.parallel_models import make as make_parallel
from tests.python.parallel_models import parallel
from tests.python.parallel_models import shard as shard_parallel
from tests.python.parallel_models import values as values_of_parallel
from tests.python.placement_test import Net, largest_dim
from tests.python.training import STRATEGIES, adamw, full_state, shard, train
from bench.harness.options import fully_shard

BF16 = torch.bfloat16


def taken(stream):
    return {name: tensor.clone() for name, tensor in stream}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def check_metadata(model, **options):
    seen = [
        (name, tensor.dtype, tuple(tensor.shape))
        for name, tensor in weights.stream(model, **options)
    ]
    assert weights.metadata(model, **options) == seen


def mlp(mesh, strategy="optim_grads_params", **options):
    torch.manual_seed(0)
    return shard(Mlp(), fully_shard, mesh=mesh, strategy=strategy, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("compute", [None, BF16])
def test_equals_full_tensors(strategy, compute, mesh, rank):
    policy = MixedPrecisionPolicy(param_dtype=compute)
    model = mlp(mesh, strategy, mp_policy=policy)
    for _ in range(2):  # before the first step, and after it
        state = full_state(model)
        narrow = {name: t.to(BF16) for name, t in state.items()}
        check_equal(taken(weights.stream(model)), narrow if compute else state)
        check_equal(taken(weights.stream(model, dtype=BF16)), narrow)
        check_equal(taken(weights.stream(model, dtype=torch.float32)), state)
        check_metadata(model)
        train(model, rank, steps=1)


@pytest.mark.parametrize("strategy", ["hsdp", "zero3"])
def test_two_axes(strategy, mesh_2d, rank):
    model = shard(Mlp(), fully_shard, mesh=mesh_2d)
    train(model, rank, steps=1)
    check_equal(taken(weights.stream(model)), full_state(model))


def test_dimensions_other_than_the_first(mesh):
    plain = on_device(Net())
    model = copy.deepcopy(plain)
    fully_shard(model.deep, mesh=mesh, shard_placement_fn=largest_dim)
    fully_shard(model, mesh=mesh, shard_placement_fn=largest_dim)
    check_equal(taken(weights.stream(model)), plain.state_dict())
    check_metadata(model)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_tensor_parallelism(grid, world):
    if grid[0] * grid[1] != world:
        pytest.skip(f"needs {grid[0] * grid[1]} ranks")
    expected = {
        name: t.detach().clone() for name, t in make_parallel().named_parameters()
    }
    mesh = named_mesh(dp=grid[0], tp=grid[1])
    model = make_parallel()
    parallel(model, mesh["tp"])
    shard_parallel(model, fully_shard, mesh=mesh["dp"])
    check_equal(taken(weights.stream(model)), expected)
    changes = weights.changed(model)
    before = taken(weights.stream(model))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    apply(before, changes)
    check_equal(before, taken(weights.stream(model)))
    assert values_of_parallel(model).keys() == expected.keys()


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 1, 4), (2, 1, 2)])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_experts_on_a_part_of_the_mesh(shape, strategy, world):
    if world != 4:
        pytest.skip("needs 4 ranks")
    expected = {n: t.detach() for n, t in experts.made().named_parameters()}
    model = experts.sharded(experts.made(), experts.mesh_of(*shape), strategy=strategy)
    changes = weights.changed(model)
    found = taken(weights.stream(model))
    check_equal(found, expected)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    assert apply(found, changes) == sum(t.numel() for t in expected.values())
    check_equal(found, {n: t * 1.5 for n, t in expected.items()})


@pytest.mark.parametrize("kind", MODELS)
def test_names_and_values_of_a_folder(kind, mesh, rank, folder):
    from safetensors.torch import load_file

    family, config = MODELS[kind]
    cls, config_class = kind_of(family)
    torch.manual_seed(0)
    plain = cls(config_class(**config))
    if rank == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    model = on_device(plain)
    for layer in getattr(model, model.base_model_prefix).children():
        if isinstance(layer, nn.ModuleList):
            for block in layer:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    expected = {
        n: on_device(t) for n, t in load_file(f"{folder}/model.safetensors").items()
    }
    check_equal(taken(weights.stream(model)), expected)
    check_metadata(model, dtype=BF16)


class PackedExperts(nn.Module):
    """As in transformers 5."""

    def __init__(self, number=4, width=6, dim=8):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(number, 2 * width, dim))
        self.down_proj = nn.Parameter(torch.randn(number, dim, width))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.mlp = nn.Module()
            layer.mlp.experts = PackedExperts()
        on_device(self)


def packed(mesh):
    torch.manual_seed(0)
    model = Packed()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_packed_experts_are_single_tensors(mesh, rank, folder):
    from safetensors.torch import save_file

    model = packed(mesh)
    state = full_state(model)
    single = taken(weights.stream(model))
    assert len(single) == 2 * 4 * 3
    gate_up = state["layers.1.mlp.experts.gate_up_proj"]
    down = state["layers.1.mlp.experts.down_proj"]
    prefix = "layers.1.mlp.experts.2"
    assert torch.equal(single[f"{prefix}.gate_proj.weight"], gate_up[2, :6])
    assert torch.equal(single[f"{prefix}.up_proj.weight"], gate_up[2, 6:])
    assert torch.equal(single[f"{prefix}.down_proj.weight"], down[2])
    check_metadata(model)
    check_equal(taken(weights.stream(model, split_experts=False)), state)
    # The way back.
    if rank == 0:
        save_file(
            {n: t.cpu() for n, t in single.items()}, f"{folder}/model.safetensors"
        )
    dist.barrier()
    other = packed(mesh)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert load_hf(other, folder) == []
    check_equal(full_state(other), state)


def test_mixtral_has_its_own_names():
    shapes = {
        "model.layers.0.mlp.experts.gate_up_proj": (2, 6, 4),
        "model.layers.0.mlp.experts.down_proj": (2, 4, 3),
    }
    from flatshard.checkpoint.hf import mixtral_name
    from flatshard.weights.names import Names

    names = Names(shapes, mixtral_name, split_experts=True)
    found = [e.name for name in shapes for e in names.of(name)]
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert found == [
        f"{prefix}.{e}.{part}.weight" for e in (0, 1) for part in ("w1", "w3")
    ] + [f"{prefix}.{e}.w2.weight" for e in (0, 1)]


def test_wrappers_and_rename(mesh):
    model = Mlp()
    model.blocks[0].up = torch.compile(model.blocks[0].up)
    fully_shard(model, mesh=mesh)
    assert {m.name for m in weights.metadata(model)} == set(Mlp().state_dict())
    renamed = weights.metadata(model, rename=lambda name: f"model.{name}")
    assert all(m.name.startswith("model.") for m in renamed)


def test_a_model_of_another_dtype(mesh, rank):
    model = mlp(mesh)
    source, changes = weights.vllm_source(model), weights.changed(model)
    train(model, rank, steps=1)
    model.to(BF16)
    with pytest.raises(RuntimeError, match="was changed; run a forward first"):
        source.metadata()
    with torch.no_grad():
        model(on_device(torch.randn(2, 13, dtype=BF16)))
    check_equal(taken(source), full_state(model))
    assert {meta.dtype for meta in source.metadata()} == {BF16}
    with pytest.raises(RuntimeError, match=r"send all weights, and call changed\(\)"):
        list(changes)


def test_keeps_no_model(mesh):
    model = mlp(mesh)
    model.register_buffer("steps", on_device(torch.tensor(3)))
    taken(weights.stream(model))
    freed = weakref.ref(model)
    del model
    assert freed() is None


def test_many_renames_keep_few_plans(mesh):
    model = mlp(mesh)
    changes = weights.changed(model)
    for number in range(9):
        names = weights.metadata(model, rename=lambda name: f"{number}.{name}")
        assert all(meta.name.startswith(f"{number}.") for meta in names)
    (plans,) = [plans for root, plans in _plans.items() if root is root_of(model)]
    assert len(plans) == 4
    assert list(changes) == []


def test_parameters_and_buffers_outside_units(mesh):
    model = Mlp()
    model.register_buffer("steps", torch.tensor(3))
    model.register_buffer("columns", torch.arange(6.0).view(2, 3).T)
    model.extra = nn.Parameter(on_device(torch.randn(3)))
    fully_shard(model, mesh=mesh, ignored_params={model.extra})
    found = taken(weights.stream(model, dtype=BF16))
    assert found["steps"] == 3
    assert torch.equal(found["extra"], model.extra.detach().to(BF16))
    assert torch.equal(found["columns"], model.columns)
    assert all(tensor.is_contiguous() for _, tensor in weights.stream(model))
    check_metadata(model, dtype=BF16)


def test_buffers_that_come_change_and_go(mesh):
    model = mlp(mesh)
    source = weights.vllm_source(model)
    changes = weights.changed(model)
    for size in (3, 5):
        model.register_buffer("steps", on_device(torch.arange(float(size))))
        assert taken(source)["steps"].tolist() == list(range(size))
        check_metadata(model)
    with pytest.raises(RuntimeError, match="the shape of a buffer was changed"):
        list(changes)
    model.steps = None
    assert "steps" not in taken(weights.stream(model))


class Linears(nn.Module):
    """Names as in blocks of language models."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(130, 140, bias=False)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.model.layers:
            layer.up_proj = nn.Linear(130, 200)
        on_device(self)


@pytest.mark.parametrize("compute", [None, BF16])
def test_fp8_blocks(compute, mesh):
    model = Linears()
    for layer in model.model.layers:
        fully_shard(
            layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=compute)
        )
    fully_shard(model, mesh=mesh)
    state = full_state(model)
    found = taken(weights.stream(model, format="fp8_block"))
    assert len(found) == len(state) + 2
    assert torch.equal(found["embed.weight"], state["embed.weight"].to(BF16))
    assert found["model.layers.1.up_proj.bias"].dtype == BF16
    data = found["model.layers.1.up_proj.weight"]
    scales = found["model.layers.1.up_proj.weight_scale_inv"]
    assert data.dtype == torch.float8_e4m3fn and scales.shape == (2, 2)
    weight = state["model.layers.1.up_proj.weight"]
    block = weight[128:, :128]
    torch.testing.assert_close(scales[1, 0], block.abs().max() / 448)
    expected = (block / scales[1, 0]).to(torch.float8_e4m3fn)
    assert torch.equal(data[128:, :128].float(), expected.float())
    check_metadata(model, format="fp8_block")


def test_fp8_blocks_leave_out_what_the_run_does(mesh):
    model = Linears()
    for layer in model.model.layers:
        layer.up_proj = nn.Linear(128, 256, bias=False)
    on_device(model.bfloat16())
    last = model.model.layers[1].up_proj
    policy = float8_policy("rowwise", module_filter_fn=lambda m, _: m is not last)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, fp8=policy)
    fully_shard(model, mesh=mesh)
    found = taken(weights.stream(model, format="fp8_block"))
    assert found["model.layers.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert found["model.layers.1.up_proj.weight"].dtype == BF16
    assert "model.layers.1.up_proj.weight_scale_inv" not in found
    check_metadata(model, format="fp8_block")


def test_weights_in_float8(mesh):
    torch.manual_seed(0)
    model = Mlp(dim=16, hidden=32)
    for unit in model.units():
        policy = MixedPrecisionPolicy(param_dtype=BF16)
        fully_shard(unit, mesh=mesh, mp_policy=policy, fp8=float8_policy("tensorwise"))
    fully_shard(model, mesh=mesh)
    state = full_state(model)
    check_equal(taken(weights.stream(model, dtype=torch.float32)), state)
    narrow = {n: t.to(BF16) if "blocks" in n else t for n, t in state.items()}
    check_equal(taken(weights.stream(model)), narrow)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_does_not_see_it(strategy, mesh, rank):
    results = []
    for streams in (False, True):
        policy = MixedPrecisionPolicy(param_dtype=BF16)
        model = mlp(mesh, strategy, mp_policy=policy)
        optimizer = adamw(model)
        losses = []
        changes = weights.changed(model) if streams else ()
        for _ in range(3):
            losses += train(model, rank, steps=2, optimizer=optimizer)
            if streams:
                taken(weights.stream(model))
                for _ in changes:
                    pass
        results.append((losses, full_state(model)))
    assert results[0][0] == results[1][0]
    check_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("by_group", [False, True])
def test_a_rank_that_stops_early_leaves_the_others_running(by_group, mesh, rank):
    model = mlp(mesh)
    source = weights.vllm_source(model)
    seen = 0
    try:
        for _ in source.iter_groups() if by_group else source:
            seen += 1
            if rank == 0 and seen == 2:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    total = 4 if by_group else len(source.metadata())
    assert seen == (2 if rank == 0 else total)
    losses = train(model, rank, steps=2)
    assert losses == train(mlp(mesh), rank, steps=2)
    check_equal(taken(source), full_state(model))


@pytest.mark.parametrize("begins", [False, True])
def test_a_with_block_ends_with_the_other_ranks(begins, mesh, rank):
    model = mlp(mesh)
    caught = None
    try:
        with weights.stream(model) as tensors:
            if rank == 0 and not begins:
                raise KeyboardInterrupt
            for _ in tensors:
                if rank == 0:
                    raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        caught = error  # its traceback keeps the stream
    losses = train(model, rank, steps=2)
    assert losses == train(mlp(mesh), rank, steps=2)
    assert (caught is not None) == (rank == 0)


def test_changes_that_nobody_reads_do_not_count(mesh):
    model = mlp(mesh)
    changes = weights.changed(model)
    before = taken(weights.stream(model))
    train(model, 0, steps=1)
    iter(changes).close()
    assert apply(before, changes) > 0
    check_equal(before, taken(weights.stream(model)))


def apply(tensors, changes):
    """Returns the number of elements."""
    number = 0
    for name, indices, values, shape in changes:
        assert indices.dtype == torch.int32
        assert (indices.diff() > 0).all()
        assert tensors[name].shape == shape
        tensors[name].view(-1)[indices.long()] = values
        number += len(indices)
    return number


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [None, BF16])
def test_old_and_changes_are_new(strategy, dtype, mesh, rank):
    model = mlp(mesh, strategy)
    changes = weights.changed(model, dtype=dtype)
    tensors = taken(weights.stream(model, dtype=dtype))
    assert apply(tensors, changes) == 0
    for _ in range(2):
        train(model, rank, steps=1)
        assert apply(tensors, changes) > 0
        check_equal(tensors, taken(weights.stream(model, dtype=dtype)))
        assert apply(tensors, changes) == 0
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    assert apply(tensors, changes) == 5
    assert apply(tensors, changes) == 0  # NaN equals NaN


def test_changes_along_other_dimensions(mesh):
    model = on_device(Net())
    fully_shard(model, mesh=mesh, shard_placement_fn=largest_dim)
    changes = weights.changed(model)
    tensors = taken(weights.stream(model))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    apply(tensors, changes)
    check_equal(tensors, taken(weights.stream(model)))


def test_changes_of_experts(mesh):
    model = packed(mesh)
    changes = weights.changed(model)
    tensors = taken(weights.stream(model))
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.experts.gate_up_proj.mul_(2)
    assert apply(tensors, changes) == 2 * 4 * 12 * 8
    check_equal(tensors, taken(weights.stream(model)))


def test_changes_of_buffers(mesh):
    model = mlp(mesh)
    model.register_buffer("steps", on_device(torch.zeros(3)))
    changes = weights.changed(model)
    model.steps[1] = 2
    for seen in changes:
        assert seen.name == "steps" and seen.indices.tolist() == [1]
        break  # does not count
    (patch,) = changes
    assert patch.values.tolist() == [2] and patch.full_shape == (3,)
    assert list(changes) == []


def test_one_iteration_over_changes_at_a_time(mesh):
    model = mlp(mesh)
    changes = weights.changed(model)
    with torch.no_grad():
        model.head.bias.add_(1)
    first = iter(changes)
    assert next(first).name == "head.bias"
    with pytest.raises(RuntimeError, match="an earlier iteration is still open"):
        next(iter(changes))
    first.close()
    assert [patch.name for patch in changes] == ["head.bias"]


def test_an_iteration_that_one_rank_leaves_does_not_count(mesh, rank):
    model = mlp(mesh)
    changes = weights.changed(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    for seen, _ in enumerate(changes):
        if rank == 0 and seen == 2:
            break
    names = [patch.name for patch in changes]
    assert names == [m.name for m in weights.metadata(model)]
    assert list(changes) == []


@pytest.mark.parametrize("nbytes", [1, 3000, 1 << 20])
def test_sglang_buckets(nbytes, mesh):
    model = mlp(mesh)
    model.register_buffer("steps", on_device(torch.tensor(3)))
    model.register_buffer("every_second", on_device(torch.arange(9.0))[::2])
    found = {}
    for bucket in weights.sglang_buckets(model, nbytes=nbytes):
        flat = bucket.flattened_tensor
        assert flat.dtype == torch.uint8
        assert flat.numel() <= nbytes or len(bucket.metadata) == 1
        assert bucket.names == [info.name for info in bucket.metadata]
        for info, dtype, shape in zip(bucket.metadata, bucket.dtypes, bucket.shapes):
            assert info.numel == info.end_idx - info.start_idx
            part = flat[info.start_idx : info.end_idx]
            found[info.name] = part.view(getattr(torch, dtype)).view(shape)
    check_equal(found, taken(weights.stream(model)))


def test_groups_are_units(mesh):
    model = mlp(mesh)
    source = weights.vllm_source(model)
    groups = [[name for name, _ in group] for group in source.iter_groups()]
    assert len(groups) == 4
    assert list(itertools.chain(*groups)) == [m.name for m in source.metadata()]
    assert all(name.startswith("blocks.1.") for name in groups[2])


def receive(connection):
    """An engine on the same GPU: answers each unit with the sums of its tensors."""
    while (group := connection.recv()) is not None:
        tensors = [function(*arguments) for function, arguments in group]
        connection.send([tensor.double().sum().item() for tensor in tensors])


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [None, BF16])
def test_another_process_opens_ipc_handles(dtype, mesh):
    model = mlp(mesh)
    expected = taken(weights.stream(model, dtype=dtype))
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    context = torch.multiprocessing.get_context("spawn")
    connection, of_engine = context.Pipe()
    engine = context.Process(target=receive, args=(of_engine,))
    engine.start()
    names = []
    for group in weights.ipc_handles(model, dtype=dtype):
        connection.send([tensor.handle[uuid] for tensor in group])
        for tensor, total in zip(group, connection.recv()):
            own = expected[tensor.name]
            assert tensor.shape == tuple(own.shape) and tensor.dtype == own.dtype
            assert total == own.double().sum().item()
            names.append(tensor.name)
    connection.send(None)
    engine.join()
    assert engine.exitcode == 0
    assert names == [meta.name for meta in weights.metadata(model, dtype=dtype)]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_two_units_at_a_time(mesh):
    torch.manual_seed(0)
    model = shard(Mlp(dim=1024, hidden=4096, blocks=6), fully_shard, mesh=mesh)
    unit = 2 * 1024 * 4096 * 2  # bytes in bfloat16
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in weights.stream(model, dtype=BF16):
        pass
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2.2 * unit


def test_errors_name_the_option(mesh, monkeypatch):
    model = mlp(mesh)
    with pytest.raises(
        ValueError, match="format: expected None or 'fp8_block', got 'x'"
    ):
        weights.stream(model, format="x")
    with pytest.raises(
        ValueError, match="dtype: expected None with format='fp8_block'"
    ):
        weights.metadata(model, format="fp8_block", dtype=BF16)
    for send in (weights.stream, weights.changed):
        for dtype in (torch.int8, "bfloat16"):
            with pytest.raises(ValueError, match="dtype: expected None or a floating-"):
                send(model, dtype=dtype)
        with pytest.raises(ValueError, match="rename: expected None or a function"):
            send(model, rename="x")
        with pytest.raises(
            ValueError,
            match="rename: expected another name for each tensor, got 'x' for",
        ):
            send(model, rename=lambda _: "x")
    with pytest.raises(ValueError, match="nbytes: expected at least 1, got 0"):
        weights.sglang_buckets(model, nbytes=0)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="expected a model on a GPU"):
            weights.ipc_handles(model)
    else:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        with pytest.raises(ValueError, match="leave expandable_segments out"):
            weights.ipc_handles(model)
    with pytest.raises(ValueError, match="expected the outermost module"):
        weights.stream(nn.Linear(2, 2))
    model = Linears()
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model.model.layers[0].up_proj.weight.fill_(float("inf"))
    with pytest.raises(
        flatshard.Error, match="not finite.*send the weights of an earlier"
    ):
        taken(weights.stream(model, format="fp8_block"))
