"""Parameters that are DTensors over another mesh dimension: parallelize_module, then
fully_shard, compared with FSDP2 and with one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import flatshard
from tests.python.device import DEVICE, named_mesh, on_device
from tests.python.parallel_models import (
    DIM,
    HIDDEN,
    Model,
    loss_of,
    make,
    meshes,
    parallel,
    shard,
    train,
    values,
    whole,
)
from tests.python.sum_order import SMALL_MODEL
from bench.harness.options import fully_shard


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "zero0"])
def test_trains_like_one_process(strategy, sequence, world):
    for dp, tp, mesh in meshes(world):
        reference = make()
        model = parallel(make(), mesh["tp"], sequence)
        shard(model, fully_shard, mesh=mesh["dp"], strategy=strategy)
        own = mesh.get_local_rank("dp")
        theirs = train(reference, range(dp))
        assert train(model, [own]) == pytest.approx(theirs[own::dp], rel=1e-4)
        expected = values(reference)
        for name, value in values(model).items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-3, atol=1e-4, msg=f"{name} {dp} {tp}"
            )


def test_parameters_and_gradients_are_those_of_fsdp2(world):
    for _, _, mesh in meshes(world):
        pair = [
            shard(parallel(make(), mesh["tp"]), function, mesh=mesh["dp"])
            for function in (fully_shard, fsdp2)
        ]
        for model in pair:
            loss_of(model, mesh.get_local_rank("dp")).backward()
        for (name, p), q in zip(pair[0].named_parameters(), pair[1].parameters()):
            assert (p.shape, p.stride(), p.dtype) == (q.shape, q.stride(), q.dtype)
            if ".norm." not in name:  # those are cut by their own rows
                assert p.device_mesh == q.device_mesh, name
                if mesh["dp"].size() > 1:
                    assert p.placements == q.placements, name
                assert p.to_local().shape == q.to_local().shape, name
                torch.testing.assert_close(p.to_local(), q.to_local(), rtol=0, atol=0)
                assert p.grad.placements == p.placements
                torch.testing.assert_close(p.grad.to_local(), q.grad.to_local())
            torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor())


def test_modules_see_dtensors_over_tp(world):
    for _, _, mesh in meshes(world):
        model = parallel(make(), mesh["tp"])
        shard(model, fully_shard, mesh=mesh["dp"])
        seen = []

        def look(module, args, seen=seen):
            weight = module.up.weight
            seen.append((weight.device_mesh, weight.placements, tuple(weight.shape)))
            assert isinstance(weight, nn.Parameter)

        model.blocks[0].register_forward_pre_hook(look)
        loss_of(model, 0).backward()
        assert seen == [(mesh["tp"], (Shard(0),), (HIDDEN, DIM))]


def gradients_of_both(dp, mesh, sequence):
    """The model in one process and sharded, with gradients of the same samples."""
    reference, model = make(), parallel(make(), mesh["tp"], sequence)
    shard(model, fully_shard, mesh=mesh["dp"])
    for seed in range(dp):
        (loss_of(reference, seed) / dp).backward()
    loss_of(model, mesh.get_local_rank("dp")).backward()
    return reference, model


def test_clipping(world):
    """Elements count once, even if several ranks store them."""
    for dp, _, mesh in meshes(world):
        reference, model = gradients_of_both(dp, mesh, True)
        norms = [
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            for m in (reference, model)
        ]
        torch.testing.assert_close(whole(norms[1]), norms[0])
        for p, q in zip(reference.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def test_norms_of_plain_parameters_and_dtensors(world):
    """Without SequenceParallel they are on two meshes, and torch supports one at a
    time."""
    for dp, _, mesh in meshes(world):
        reference, model = gradients_of_both(dp, mesh, False)
        parts = [
            [
                p.grad
                for name, p in model.named_parameters()
                if (".norm." in name) == plain
            ]
            for plain in (False, True)
        ]
        norms = [whole(torch.nn.utils.get_total_norm(part)) for part in parts]
        expected = torch.nn.utils.get_total_norm(
            [p.grad for p in reference.parameters()]
        )
        torch.testing.assert_close(torch.stack(norms).norm(), expected)


@pytest.mark.parametrize("sequence", [False, True])
def test_norms_of_parameters(sequence, world):
    for dp, _, mesh in meshes(world):
        reference, model = gradients_of_both(dp, mesh, sequence)
        found = {n.name: n for n in flatshard.diagnostics.parameter_norms(model)}
        assert len(found) == len(list(reference.parameters()))
        for name, p in reference.named_parameters():
            assert found[name].weight == pytest.approx(p.norm().item(), rel=SMALL_MODEL)
            assert found[name].grad == pytest.approx(p.grad.norm().item(), rel=1e-4)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4),
    "core": lambda p: flatshard.optim.AdamW(p, lr=1e-2, eps=1e-4),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer, world):
    """The updates, and the full state, equal the results of one process."""
    for dp, _, mesh in meshes(world):
        reference, model = make(), parallel(make(), mesh["tp"], sequence=True)
        shard(model, fully_shard, mesh=mesh["dp"])
        theirs = OPTIMIZERS[optimizer.replace("core", "adamw")](reference.parameters())
        ours = OPTIMIZERS[optimizer](model.parameters())
        train(reference, range(dp), 3, theirs)
        train(model, [mesh.get_local_rank("dp")], 3, ours)
        for p, q in zip(reference.parameters(), model.parameters()):
            torch.testing.assert_close(q.full_tensor(), p, rtol=1e-3, atol=1e-4)
            state = theirs.state[p]
            assert ours.state[q].keys() == state.keys()
            for name, value in ours.state[q].items():
                torch.testing.assert_close(
                    whole(value), state[name], rtol=1e-3, atol=1e-4, msg=name
                )


def test_G10_a_block_is_reduced_before_the_next_backward(world, monkeypatch):
    """In each step, also where its DTensors were made in an earlier one."""
    monkeypatch.setenv("FLATSHARD_TRACE_STEPS", "1")
    for dp, _, mesh in meshes(world):
        if dp == 1:
            continue
        model = shard(parallel(make(), mesh["tp"], True), fully_shard, mesh=mesh["dp"])
        for step in range(3):
            loss_of(model, step).backward()
            trace = [(a.kind, a.unit) for a in flatshard.diagnostics.take_trace(model)]
            reduced = trace.index(("reduce", "blocks.1"))
            assert reduced < trace.index(("acquire_grads", "blocks.0")), step
            model.zero_grad()


@pytest.mark.parametrize("first", ["compile", "shard"])
def test_compiled_blocks_are_one_graph_each(first, world):
    """Also with the hooks that parallelize_module puts on their modules."""
    _, _, mesh = next(meshes(world))
    losses = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = parallel(make(), mesh["tp"], sequence=True)
        if compiles and first == "compile":
            compile_blocks(model)
        shard(model, fully_shard, mesh=mesh["dp"])
        if compiles and first == "shard":
            compile_blocks(model)
        losses.append(train(model, [mesh.get_local_rank("dp")]))
    assert losses[1] == pytest.approx(losses[0], rel=SMALL_MODEL)


def compile_blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)


def test_loss_by_vocabulary(world):
    """loss_parallel: the logits stay sharded over the vocabulary."""
    for dp, _, mesh in meshes(world):
        reference, model = make(), parallel(make(), mesh["tp"], True, logits="cut")
        shard(model, fully_shard, mesh=mesh["dp"])
        for seed in range(dp):
            (loss_of(reference, seed) / dp).backward()
        with loss_parallel():
            loss = loss_of(model, mesh.get_local_rank("dp"))
            loss.backward()
        expected = loss_of(reference, mesh.get_local_rank("dp"))
        torch.testing.assert_close(whole(loss), expected)
        for p, q in zip(reference.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)


@pytest.mark.parametrize("function", [fully_shard, fsdp2])
def test_state_dicts_go_both_ways(function, world, tmp_path_factory, rank):
    """Written by one library, read by the other, with the optimizer's state."""
    for _, _, mesh in meshes(world):
        path = [str(tmp_path_factory.mktemp("dcp"))]
        if world > 1:
            dist.broadcast_object_list(path)
        other = fsdp2 if function is fully_shard else fully_shard
        written = shard(parallel(make(), mesh["tp"]), function, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(written.parameters(), lr=1e-2)
        train(written, [mesh.get_local_rank("dp")], 2, optimizer)
        dcp.save(
            dict(zip("mo", get_state_dict(written, optimizer))), checkpoint_id=path[0]
        )
        read = shard(parallel(on_device(Model()), mesh["tp"]), other, mesh=mesh["dp"])
        new = torch.optim.AdamW(read.parameters(), lr=1e-2)
        state = dict(zip("mo", get_state_dict(read, new)))
        dcp.load(state, checkpoint_id=path[0])
        set_state_dict(
            read, new, model_state_dict=state["m"], optim_state_dict=state["o"]
        )
        expected = values(written)
        for name, value in values(read).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
        seeds = [mesh.get_local_rank("dp")]
        assert train(written, seeds, 2, optimizer) == pytest.approx(
            train(read, seeds, 2, new), rel=SMALL_MODEL
        )


def test_whole_state_dicts(world):
    options = StateDictOptions(full_state_dict=True)
    for _, _, mesh in meshes(world):
        reference, model = make(), parallel(on_device(Model()), mesh["tp"])
        shard(model, fully_shard, mesh=mesh["dp"])
        set_model_state_dict(
            model, copy.deepcopy(reference.state_dict()), options=options
        )
        for name, value in get_model_state_dict(model, options=options).items():
            torch.testing.assert_close(value, reference.state_dict()[name], msg=name)
        torch.testing.assert_close(loss_of(model, 0), loss_of(reference, 0))


def test_on_the_meta_device(world):
    for _, _, mesh in meshes(world):
        with torch.device("meta"):
            model = Model()
        shard(parallel(model, mesh["tp"]), fully_shard, mesh=mesh["dp"])
        model.to_empty(device=DEVICE)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, make().state_dict(), options=options)
        torch.testing.assert_close(loss_of(model, 0), loss_of(make(), 0))


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"reshard_after_forward": False},
        {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 else None},
        {"granularity": "chunk"},
    ],
)
def test_other_options(options, world):
    for dp, _, mesh in meshes(world):
        model = parallel(make(), mesh["tp"])
        if dp == 4 and "shard_placement_fn" in options:
            continue  # 12 / 4 / 4
        theirs = {k: v for k, v in options.items() if k != "granularity"}
        reference = shard(
            parallel(make(), mesh["tp"]), fsdp2, mesh=mesh["dp"], **theirs
        )
        shard(model, fully_shard, mesh=mesh["dp"], **options)
        seeds = [mesh.get_local_rank("dp")]
        assert train(model, seeds) == pytest.approx(train(reference, seeds), rel=1e-2)


def test_replicas(world):
    if world != 4:
        pytest.skip("needs 4 ranks")
    mesh = named_mesh(replicate=2, shard=1, tp=2)
    pair = [
        shard(parallel(make(), mesh["tp"]), function, mesh=mesh["replicate", "shard"])
        for function in (fully_shard, fsdp2)
    ]
    seeds = [mesh.get_local_rank("replicate")]
    ours, theirs = (train(model, seeds) for model in pair)
    assert ours == pytest.approx(theirs, rel=SMALL_MODEL)


def test_what_is_not_supported_is_named(world):
    grid = named_mesh(dp=world, tp=1)
    model = parallel(make(), grid["tp"])
    with pytest.raises(ValueError, match="DTensor over .*expected other dimensions"):
        fully_shard(parallel(make(), grid["dp"]), mesh=grid["dp"])
    others = init_device_mesh(DEVICE, (world,), mesh_dim_names=("others",))
    if world > 1:
        with pytest.raises(ValueError, match="expected dimensions of one mesh"):
            fully_shard(parallel(make(), others), mesh=grid["dp"])
    with pytest.raises(NotImplementedError, match="outer.*DTensors"):
        fully_shard(model.blocks[0], mesh=named_mesh(a=1, b=world), outer="optim")


def test_dimensions_flatten_after_the_last_fully_shard(world):
    """Before, it means that their ranks have different experts."""
    mesh = named_mesh(data=1, cut=world)  # other tests have other names
    expected = shard(parallel(make(), mesh["cut"]), fully_shard, mesh=mesh["data"])
    model = shard(parallel(make(), mesh["cut"]), fully_shard, mesh=mesh["data"])
    mesh["data", "cut"]._flatten("all")
    assert train(model, [0]) == train(expected, [0])

    early = r"\['cut'\] were flattened.*parameter norm.weight is a DTensor"
    cut = parallel(make(), mesh["cut"], sequence=True)
    with pytest.raises(ValueError, match=early):
        fully_shard(cut.blocks[0], mesh=mesh["data"])
    if world == 1:  # no other rank that could have different experts
        return
    plain = make()
    fully_shard(plain.blocks[0], mesh=mesh["data"])
    with pytest.raises(ValueError, match="flatten after the last fully_shard"):
        fully_shard(plain, mesh=mesh["data"])
    with pytest.raises(RuntimeError, match="flatten after the last fully_shard"):
        loss_of(fully_shard(make(), mesh=mesh["data"]), 0)


def replaced(model, how):
    """Puts a DTensor with doubled values in the place of each parameter, as loaders
    do."""
    for name, p in list(model.named_parameters()):
        if how == "own":
            value = DTensor.from_local(
                2 * p.to_local().detach(),
                p.device_mesh,
                p.placements,
                shape=p.shape,
                stride=p.stride(),
            )
        else:
            whole = 2 * p.full_tensor().detach()
            value = distribute_tensor(whole, p.device_mesh, p.placements)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(value))


@pytest.mark.parametrize("how", ["own", "distributed"])
def test_parameters_that_are_replaced(how, world):
    for dp, tp, mesh in meshes(world):
        if how == "distributed" and min(dp, tp) > 1:
            continue  # torch distributes no _StridedShard as it cuts one
        reference = make()
        with torch.no_grad():
            for p in reference.parameters():
                p.mul_(2)
        model = parallel(make(), mesh["tp"])
        shard(model, fully_shard, mesh=mesh["dp"])
        replaced(model, how)
        own = mesh.get_local_rank("dp")
        theirs = train(reference, range(dp))
        assert train(model, [own]) == pytest.approx(theirs[own::dp], rel=1e-4)
        expected = values(reference)
        for name, value in values(model).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
