"""flatshard.optim.Muon computes what torch.optim.Muon computes in one process, on any
number of ranks and in any grid."""

import copy
import pickle
import zlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import flatshard
from bench.harness.options import fully_shard
from flatshard import checkpoint
from flatshard._tensor.memory import local_of
from flatshard._tensor.pieces import piece_of
from tests.python.device import DEVICE, named_mesh, on_device
from tests.python.models import Mlp
from tests.python.training import STRATEGIES, distance, full_state, shard

DIM, EXPERTS = 16, 4
LR, DECAY = 0.02, 0.1
# The rows of the matrices of parameters that have several.
SPLIT = {"qkv.weight": (32, 32, 32), "gate_up": (32, 32), "down_stack": (16,)}
# A stack is multiplied as a batch, by other kernels in bfloat16: 2^-8 in each of the
# iterations, and updates are near 1 times lr.
BATCHED = 2e-2
# torch fuses a multiplication and an addition only in kernels for AVX, and on GPUs
# matmuls depend on the alignment of matrices: an error of 2^-8 as above, at most 0.05
# times three.
FUSES = DEVICE == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX")
UNFUSED = 5e-3


class Block(nn.Module):
    """Matrices of two to one, because then Newton-Schulz brings all singular values of a
    random matrix near 1."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 96, bias=False)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)


class Experts(nn.Module):
    def __init__(self, number=EXPERTS):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(number, 64, DIM))
        self.down_stack = nn.Parameter(torch.randn(number, DIM, 32))


class Net(nn.Module):
    def __init__(self, stacks=False):
        super().__init__()
        self.embed = nn.Embedding(10, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tiny = nn.Linear(6, 3, bias=False)  # some ranks have nothing of it
        if stacks:
            self.experts = Experts()
        on_device(self)

    def units(self):
        return [*self.blocks, self.tiny]

    def forward(self, x):
        return self.tiny(x)  # gradients are given


def is_matrix(name, parameter):
    return parameter.dim() > 1 and not name.startswith("embed")


def matrices(model):
    return [(n, p) for n, p in model.named_parameters() if is_matrix(n, p)]


def split_of(name):
    return next((sizes for end, sizes in SPLIT.items() if name.endswith(end)), None)


def groups_of(model, options):
    """A group for the parameters of each value of split_sizes."""
    of = {}
    for name, parameter in matrices(model):
        of.setdefault(split_of(name), []).append(parameter)
    return [
        {"params": parameters, "split_sizes": sizes, **options[i % len(options)]}
        for i, (sizes, parameters) in enumerate(of.items())
    ]


def muon(model, *options):
    return flatshard.optim.Muon(
        groups_of(model, options or [{}]), lr=LR, weight_decay=DECAY
    )


def drawn(name, shape, step):
    generator = torch.Generator().manual_seed(1000 * step + zlib.crc32(name.encode()))
    return on_device(torch.randn(shape, generator=generator))


def give(parameter, whole):
    """Gives a sharded parameter a gradient: the same on any number of ranks."""
    grad = torch.zeros_like(parameter.detach())
    local_of(grad).copy_(piece_of(parameter, whole))
    parameter.grad = grad


def step(model, optimizers, number, names=None):
    for name, parameter in model.named_parameters():
        if names is None or name in names:
            give(parameter, drawn(name, parameter.shape, number))
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


class Reference:
    """torch.optim.Muon in one process, with a parameter for each matrix."""

    def __init__(self, model, *options):
        options = options or [{}]
        self.pieces, self.shapes, of = {}, {}, {}
        for name, parameter in matrices(model):
            sizes = split_of(name)
            entries = parameter.detach().clone()
            entries = entries if entries.dim() == 3 else entries[None]
            pieces = [
                nn.Parameter(piece.clone())
                for entry in entries
                for piece in entry.split(sizes or entry.shape[0])
            ]
            self.pieces[name], self.shapes[name] = pieces, parameter.shape
            of.setdefault(sizes, []).extend(pieces)
        self.optimizer = torch.optim.Muon(
            [
                {"params": pieces, **options[i % len(options)]}
                for i, pieces in enumerate(of.values())
            ],
            lr=LR,
            weight_decay=DECAY,
        )

    def step(self, number, names=None):
        for name, pieces in self.pieces.items():
            if names is not None and name not in names:
                for piece in pieces:
                    piece.grad = None
                continue
            whole = drawn(name, self.shapes[name], number)
            rows = whole.flatten(0, -2).split([len(piece) for piece in pieces])
            for piece, grad in zip(pieces, rows):
                piece.grad = grad.clone()
        self.optimizer.step()

    def whole(self, name, pieces):
        return torch.cat([p.detach() for p in pieces]).view(self.shapes[name])

    def values(self):
        return {name: self.whole(name, of) for name, of in self.pieces.items()}

    def momentum(self):
        state = self.optimizer.state
        return {
            name: self.whole(name, [state[p]["momentum_buffer"] for p in pieces])
            for name, pieces in self.pieces.items()
        }


def assert_same(name, ours, theirs):
    if name.endswith(("gate_up", "down_stack")):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5 * LR * 2 * BATCHED)
    elif FUSES:
        assert torch.equal(ours, theirs), (name, (ours - theirs).abs().max())
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=UNFUSED)


def assert_equal(model, optimizer, reference):
    wholes, momentum = reference.values(), reference.momentum()
    for name, parameter in matrices(model):
        assert_same(name, parameter.full_tensor(), wholes[name])
        own = optimizer.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(own.full_tensor(), momentum[name], rtol=1e-6, atol=0)
        assert torch.equal(own.full_tensor(), momentum[name]) or not FUSES


def reference_of(*options, stacks=False):
    torch.manual_seed(0)
    return Reference(Net(stacks), *options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_torch(strategy, mesh):
    torch.manual_seed(0)
    model = shard(Net(stacks=True), fully_shard, mesh=mesh, strategy=strategy)
    optimizer, reference = muon(model), reference_of(stacks=True)
    for number in range(3):
        step(model, [optimizer], number)
        reference.step(number)
    assert_equal(model, optimizer, reference)


def test_equals_torch_with_replicas(mesh_2d):
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh_2d)
    optimizer, reference = muon(model), reference_of()
    for number in range(2):
        step(model, [optimizer], number)
        reference.step(number)
    assert_equal(model, optimizer, reference)


# Options of two groups, and what they change to.
OPTIONS = (
    {"lr": 0.05, "momentum": 0.5, "nesterov": False, "ns_steps": 3},
    {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "ns_coefficients": (2.0, -1.5, 0.5),
        "eps": 1e-2,
        "adjust_lr_fn": "match_rms_adamw",
    },
)
CHANGED = (
    {"lr": 0.01, "momentum": 0.9, "ns_coefficients": (3.0, -3.2, 1.2)},
    {"weight_decay": 0.3, "momentum": 0.7, "nesterov": False, "adjust_lr_fn": None},
)


@pytest.mark.parametrize("way", ["assigned", "loaded", "checkpoint"])
def test_each_group_has_its_options(way, mesh, folder):
    """Groups that both have parameters of each unit. Their options change between two
    steps."""
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    optimizer, reference = muon(model, *OPTIONS), reference_of(*OPTIONS)

    def change(groups):
        for group, changed in zip(groups, CHANGED):
            group.update(copy.deepcopy(changed))

    for number in range(2):
        step(model, [optimizer], number)
        reference.step(number)
    change(reference.optimizer.param_groups)
    if way == "assigned":
        change(optimizer.param_groups)
    elif way == "loaded":
        state = copy.deepcopy(optimizer.state_dict())
        change(state["param_groups"])
        optimizer.load_state_dict(state)
    else:
        before = copy.deepcopy(optimizer.param_groups)
        change(optimizer.param_groups)
        run_once(model)
        checkpoint.save(folder, 2, model, optimizer)
        for group, former in zip(optimizer.param_groups, before):
            group.update({k: v for k, v in former.items() if k != "params"})
        checkpoint.load(folder, model, optimizer)
    for number in range(2, 4):
        step(model, [optimizer], number)
        reference.step(number)
    assert_equal(model, optimizer, reference)


def test_a_tensor_as_lr_and_a_scheduler(mesh):
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    optimizer, reference = muon(model), reference_of()
    both = optimizer, reference.optimizer
    for one in both:
        for group in one.param_groups:
            group["lr"] = torch.tensor(LR)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in both]
    for number in range(3):
        step(model, [optimizer], number)
        reference.step(number)
        for scheduler in schedulers:
            scheduler.step()
    assert_equal(model, optimizer, reference)


def test_updates_have_singular_values_near_one(mesh):
    torch.manual_seed(0)
    model = shard(Net(stacks=True), fully_shard, mesh=mesh)
    before = {name: p.full_tensor().clone() for name, p in matrices(model)}
    step(model, [muon(model)], 1)
    found = 0
    for name, parameter in matrices(model):
        if name.startswith("tiny"):
            continue
        sizes = split_of(name) or (parameter.shape[-2],)
        moved = before[name] * (1 - LR * DECAY) - parameter.full_tensor()
        for matrix in moved.view(-1, parameter.shape[-1]).split(
            sizes * (moved.numel() // (sum(sizes) * moved.shape[-1]))
        ):
            factor = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
            values = torch.linalg.svdvals(matrix / (LR * factor))
            assert 0.6 < values.min() and values.max() < 1.2, name
            found += 1
    assert found == 2 * (3 + 1 + 1) + EXPERTS * (2 + 1)


def test_the_iterations_leave_the_momentum(mesh):
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    optimizer = muon(model, {"nesterov": False})
    step(model, [optimizer], 1)
    for name, parameter in matrices(model):
        own = optimizer.state[parameter]["momentum_buffer"]
        expected = torch.zeros(parameter.shape, device=own.device).lerp_(
            drawn(name, parameter.shape, 1), 1 - 0.95
        )
        torch.testing.assert_close(own.full_tensor(), expected, rtol=1e-6, atol=0)


def test_units_without_gradients_are_left_alone(mesh):
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    optimizer = muon(model)
    before = {name: p.full_tensor().clone() for name, p in matrices(model)}
    used = [n for n, _ in model.named_parameters() if n.startswith("blocks.0")]
    step(model, [optimizer], 1, used)
    for name, parameter in matrices(model):
        changed = not torch.equal(before[name], parameter.full_tensor())
        momentum = optimizer.state[parameter]["momentum_buffer"].full_tensor()
        assert changed == bool(momentum.any()) == (name in used), name


def test_parameters_without_gradients_are_left_alone(mesh):
    """Also where others of their unit have gradients. torch's step is the reference."""
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    optimizer, reference = muon(model), reference_of()
    names = [name for name, _ in model.named_parameters()]
    for number, without in enumerate(["", "up.", "qkv.", "blocks.1.down", ""]):
        used = [n for n in names if not without or without not in n]
        step(model, [optimizer], number, used)
        reference.step(number, used)
    assert_equal(model, optimizer, reference)


def test_bfloat16_parameters_do_not_depend_on_the_ranks(mesh, rank, world):
    results = []
    alone = [DeviceMesh(DEVICE, [r]) for r in range(world)][rank]
    for of in (mesh, alone):
        torch.manual_seed(0)
        model = shard(Net().to(torch.bfloat16), fully_shard, mesh=of)
        optimizer = muon(model)
        for number in range(2):
            step(model, [optimizer], number)
        momentum = next(iter(optimizer.state.values()))["momentum_buffer"]
        assert momentum.dtype == torch.float32
        results.append(full_state(model))
    assert distance(*results) == 0


# -- states ----------------------------------------------------------------------------


def test_state_dicts_of_one_load_into_the_other(mesh):
    torch.manual_seed(0)
    models = [shard(Net(), fully_shard, mesh=mesh) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    groups = [[p for n, p in matrices(m) if split_of(n) is None] for m in models]
    ours = flatshard.optim.Muon(groups[0], lr=LR)
    theirs = torch.optim.Muon(groups[1], lr=0.5)
    step(models[0], [ours], 0)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    models[1].load_state_dict(models[0].state_dict())
    again = flatshard.optim.Muon(groups[1], lr=0.7)
    again.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert again.param_groups[0]["lr"] == LR
    assert "split_sizes" not in again.param_groups[0]
    for number in (1, 2):
        step(models[0], [ours], number)
        step(models[1], [again], number)
    assert distance(*map(full_state, models)) == 0


@pytest.mark.parametrize("how", ["cleared", "dropped", "replaced", "values"])
def test_a_changed_state_takes_effect(how, mesh):
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    optimizer, reference = muon(model), reference_of()
    step(model, [optimizer], 0)
    reference.step(0)
    if how == "cleared":
        optimizer.state.clear()
    for name, parameter in matrices(model):
        if how == "dropped":
            del optimizer.state[parameter]
        elif how == "replaced":
            half = torch.full_like(parameter.detach(), 0.5)
            optimizer.state[parameter]["momentum_buffer"] = half
        elif how == "values":
            optimizer.state[parameter]["momentum_buffer"].mul_(2.0)
        for piece in reference.pieces[name]:
            momentum = reference.optimizer.state[piece]["momentum_buffer"]
            if how == "values":
                momentum.mul_(2.0)
            else:
                momentum.fill_(0.5 if how == "replaced" else 0.0)
    step(model, [optimizer], 1)
    reference.step(1)
    assert_equal(model, optimizer, reference)


def run_once(model):
    """A checkpoint is of a model that has run."""
    with torch.no_grad():
        model(on_device(torch.zeros(2, 6)))


def both(model):
    rest = [p for n, p in model.named_parameters() if not is_matrix(n, p)]
    return [muon(model), flatshard.optim.AdamW(rest, lr=LR)]


def test_several_optimizers_resume_on_half_of_the_ranks(mesh, world, folder):
    if world % 2:
        pytest.skip("needs an even number of ranks")
    torch.manual_seed(0)
    a = shard(Net(), fully_shard, mesh=mesh)
    optimizers = both(a)
    for number in range(2):
        step(a, optimizers, number)
    run_once(a)
    checkpoint.save(folder, 2, a, optimizers)
    half = named_mesh(pair=2, dp=world // 2)["dp"]
    b = shard(Net(), fully_shard, mesh=half)
    others = both(b)
    for group in others[0].param_groups:
        group["lr"] = 1.0
    run_once(b)
    checkpoint.load(folder, b, others)
    assert others[0].param_groups[0]["lr"] == LR
    assert all(float(s["step"]) == 2 for s in others[1].state.values())
    for number in range(2, 4):
        step(a, optimizers, number)
        step(b, others, number)
    assert distance(full_state(a), full_state(b)) == 0
    with pytest.raises(ValueError, match="has the optimizers Muon, AdamW"):
        checkpoint.load(folder, b, others[::-1])
    with pytest.raises(TypeError, match="several of flatshard.optim, got a torch"):
        checkpoint.save(
            folder, 3, b, [others[0], torch.optim.AdamW(b.embed.parameters())]
        )


def test_two_optimizers_of_a_class_are_not_exchanged(mesh, folder):
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    named = list(model.named_parameters())
    pair = [
        flatshard.optim.AdamW([p for n, p in named if is_matrix(n, p) == own], lr=lr)
        for own, lr in ((True, LR), (False, 2 * LR))
    ]
    step(model, pair, 0)
    run_once(model)
    checkpoint.save(folder, 1, model, pair)
    checkpoint.load(folder, model, pair)
    with pytest.raises(ValueError, match=r"is in parameter group 0 .* and in 1 here"):
        checkpoint.load(folder, model, pair[::-1])
    assert [one.param_groups[0]["lr"] for one in pair] == [LR, 2 * LR]


def test_states_have_only_their_own_elements(mesh):
    """An AdamW of norms does not pay for the matrices of their units."""
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    for optimizer in both(model):
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if name != "step":
                    assert value.shape == parameter.shape
                    assert value.placements == parameter.placements
    norm = list(model.blocks[0].norm.parameters())
    with pytest.raises(ValueError, match="AdamW updates 2 of .* or float32 states for"):
        flatshard.optim.AdamW(norm, state_dtype=torch.bfloat16)
    # They are small, so they keep float32.
    small = flatshard.optim.AdamW(norm, state_dtype=torch.int8)
    assert small.state[norm[0]]["exp_avg"].dtype == torch.float32


# -- with a backward -------------------------------------------------------------------


class Trained(Mlp):
    """Hidden matrices for Muon; the head, and biases, for AdamW."""

    def split(self):
        named = list(self.named_parameters())
        chosen = [p for n, p in named if p.dim() == 2 and not n.startswith("head")]
        return chosen, [p for _, p in named if not any(p is c for c in chosen)]


def test_two_optimizers_train_like_torchs_in_one_process(mesh, rank, world):
    torch.manual_seed(0)
    one = Trained()
    many = shard(copy.deepcopy(one), fully_shard, mesh=mesh)
    theirs = [
        kind(parameters, lr=1e-2)
        for kind, parameters in zip(
            (torch.optim.Muon, torch.optim.AdamW), one.split(), strict=True
        )
    ]
    ours = [
        kind(parameters, lr=1e-2)
        for kind, parameters in zip(
            (flatshard.optim.Muon, flatshard.optim.AdamW), many.split(), strict=True
        )
    ]
    for number in range(3):
        many.loss(torch.Generator().manual_seed(10 * number + rank)).backward()
        for r in range(world):
            loss = one.loss(torch.Generator().manual_seed(10 * number + r)) / world
            loss.backward()
        for model, optimizers in ((many, ours), (one, theirs)):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    # Gradients are summed in another order, and an iteration in bfloat16 has errors of
    # 2^-8, times lr and steps.
    for name, value in full_state(many).items():
        torch.testing.assert_close(
            value, one.state_dict()[name], rtol=0, atol=3 * 1e-2 * 2**-5, msg=name
        )


# -- grids -----------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_tensor_parallelism(replicas, world):
    if world < 2 * replicas or world % (2 * replicas):
        pytest.skip("needs two ranks for each replica")
    if replicas == 1:
        mesh = named_mesh(dp=world // 2, tp=2)
        data = mesh["dp"]
    else:
        mesh = named_mesh(outer=replicas, dp=world // 2 // replicas, tp=2)
        data = mesh["outer", "dp"]
    # Another mesh of the same ranks, with other names.
    other = named_mesh(rows=world // 2, columns=2)["rows"]
    fully_shard(nn.Linear(2, 2), mesh=other)
    torch.manual_seed(0)
    model = Net()
    reference = Reference(model)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    shard(model, fully_shard, mesh=data)
    optimizer = muon(model)
    for number in range(2):
        step(model, [optimizer], number)
        reference.step(number)
    assert_equal(model, optimizer, reference)


def test_expert_parallelism(world):
    if world not in (2, 4):
        pytest.skip("needs 2 or 4 ranks")
    mesh = named_mesh(edp=world // 2, ep=2)
    dp = mesh["edp", "ep"]._flatten("dp")
    torch.manual_seed(0)
    model = Net(stacks=True)
    reference = Reference(model)
    own = mesh["ep"].get_local_rank()
    for name, parameter in list(model.experts.named_parameters()):
        half = parameter.detach().chunk(2)[own].clone()
        setattr(model.experts, name, nn.Parameter(half))
    fully_shard(model.experts, mesh=mesh["edp"])
    shard(model, fully_shard, mesh=dp)
    optimizer = muon(model)
    for number in range(2):
        step(model, [optimizer], number)
        reference.step(number)
    assert_equal(model, optimizer, reference)


# -- errors ----------------------------------------------------------------------------


def test_parameters_that_are_not_matrices(mesh):
    torch.manual_seed(0)
    model = shard(Net(stacks=True), fully_shard, mesh=mesh)
    with pytest.raises(
        ValueError,
        match=r"only supports 2D parameters.*size: torch.Size\(\[16\]\); pass it to "
        "flatshard.optim.AdamW",
    ):
        flatshard.optim.Muon(model.blocks[0].parameters())
    with pytest.raises(ValueError, match=r"stack of matrices.*split_sizes=\(64,\)"):
        flatshard.optim.Muon([model.experts.gate_up])
    with pytest.raises(ValueError, match="split_sizes: expected.*with the sum 96"):
        flatshard.optim.Muon([model.blocks[0].qkv.weight], split_sizes=(32, 32))
    with pytest.raises(ValueError, match="that fully_shard sharded"):
        flatshard.optim.Muon([nn.Parameter(torch.ones(3, 3))]).step()
    with pytest.raises(ValueError, match="only supports 2D parameters"):
        flatshard.optim.Muon([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    "name, value",
    [
        ("lr", -1.0),
        ("weight_decay", -0.1),
        ("momentum", 1.0),
        ("eps", 0.0),
        ("ns_steps", 100),
        ("ns_steps", 2.5),
        ("ns_coefficients", (1.0, 2.0)),
        ("adjust_lr_fn", "rms"),
    ],
)
def test_options_out_of_range(name, value, mesh):
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    parameters = [model.blocks[0].up.weight]
    with pytest.raises(ValueError, match=f"{name}: expected"):
        flatshard.optim.Muon(parameters, **{name: value})
    optimizer = flatshard.optim.Muon(parameters)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name}: expected"):
        step(model, [optimizer], 0)


def test_split_sizes_stay(mesh):
    torch.manual_seed(0)
    model = shard(Net(), fully_shard, mesh=mesh)
    optimizer = flatshard.optim.Muon([model.blocks[0].qkv.weight])
    optimizer.param_groups[0]["split_sizes"] = [32, 64]
    with pytest.raises(ValueError, match="cannot change from None to .32, 64."):
        step(model, [optimizer], 0)
    optimizer.param_groups[0]["split_sizes"] = None
    optimizer.add_param_group(
        {"params": [model.blocks[1].qkv.weight], "split_sizes": [48, 48]}
    )
    step(model, [optimizer], 0)
    again = flatshard.optim.Muon(optimizer.param_groups)
    assert again.param_groups[1]["split_sizes"] == [48, 48]
    with pytest.raises(TypeError, match="cannot be copied"):
        pickle.dumps(optimizer)


def test_placements_that_are_not_supported(mesh, world):
    linear = on_device(nn.Linear(16, 32, bias=False))
    fully_shard(linear, mesh=mesh, offload_policy=CPUOffloadPolicy())
    with pytest.raises(NotImplementedError, match="offloaded to the CPU"):
        flatshard.optim.Muon(linear.parameters())
    if world == 1:
        return  # nothing is sharded
    linear = on_device(nn.Linear(4 * world, 32, bias=False))
    fully_shard(linear, mesh=mesh, shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(NotImplementedError, match="along dimension 1"):
        flatshard.optim.Muon(linear.parameters())
