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
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from flatshard import checkpoint
from tests.python.device import DEVICE, named_mesh, on_device
from bench.harness.options import fully_shard

DIM, HIDDEN, VOCAB = 12, 20, 16
SHAPES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (1, 4), (4, 1)]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make():
    torch.manual_seed(0)
    return on_device(Model())


def parallel(model, tp, sequence=False):
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(block, tp, plan)
    split = Shard(1) if sequence else Replicate()
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
            "head": ColwiseParallel(input_layouts=split, output_layouts=Replicate()),
        },
    )
    return model


def shard(model, function, **options):
    for block in model.blocks:
        function(block, **options)
    return function(model, **options)


def meshes(world):
    if world not in SHAPES:
        pytest.skip("needs 1, 2 or 4 ranks")
    for dp, tp in SHAPES[world]:
        yield dp, tp, named_mesh(dp=dp, tp=tp)


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = on_device(torch.randint(0, VOCAB, (2, 8), generator=generator))
    logits = model(tokens)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens.roll(1, 1).flatten()
    )


def train(model, seeds, steps=3, optimizer=None):
    """`seeds`: of the batches of a step, one for each data-parallel rank."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in range(steps):
        for seed in seeds:
            loss = loss_of(model, 100 * step + seed) / len(seeds)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def values(model):
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "zero0"])
def test_trains_like_one_process(strategy, sequence, world):
    for dp, tp, mesh in meshes(world):
        reference = make()
        model = parallel(make(), mesh["tp"], sequence)
        shard(model, fully_shard, mesh=mesh["dp"], strategy=strategy)
        own = mesh.get_local_rank("dp")
        theirs = train(reference, range(dp))
        ours = train(model, [own])
        assert ours == pytest.approx(
            [dp * theirs[dp * step + own] for step in range(3)], rel=1e-4
        )
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


def test_clipping_and_norms(world):
    for dp, _, mesh in meshes(world):
        reference, model = make(), parallel(make(), mesh["tp"])
        shard(model, fully_shard, mesh=mesh["dp"])
        for seed in range(dp):
            (loss_of(reference, seed) / dp).backward()
        loss_of(model, mesh.get_local_rank("dp")).backward()
        parts = [
            [p for name, p in model.named_parameters() if (".norm." in name) == plain]
            for plain in (False, True)
        ]
        total = torch.stack(
            [
                norm.full_tensor() if isinstance(norm, DTensor) else norm
                for norm in (
                    torch.nn.utils.get_total_norm([p.grad for p in part])
                    for part in parts
                )
            ]
        ).norm()
        expected = torch.nn.utils.get_total_norm(
            [p.grad for p in reference.parameters()]
        )
        torch.testing.assert_close(total, expected)


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
            train(read, seeds, 2, new), rel=1e-5
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
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_what_is_not_supported_is_named(world, mesh, tmp_path):
    grid = named_mesh(dp=world, tp=1)
    model = parallel(make(), grid["tp"])
    with pytest.raises(ValueError, match="DTensor over .*expected other dimensions"):
        fully_shard(parallel(make(), grid["dp"]), mesh=grid["dp"])
    others = init_device_mesh(DEVICE, (world,), mesh_dim_names=("others",))
    if world > 1:
        with pytest.raises(ValueError, match="expected dimensions of one mesh"):
            fully_shard(parallel(make(), others), mesh=grid["dp"])
    shard(model, fully_shard, mesh=grid["dp"])
    loss_of(model, 0)
    with pytest.raises(NotImplementedError, match="has tensor parallelism"):
        checkpoint.save(tmp_path, 1, model)
