"""Parameters of tensor subclasses with fsdp_pre_all_gather and fsdp_post_all_gather."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import MixedPrecisionPolicy, fully_shard
from tests.python.device import named_mesh, on_device
from tests.python.training import backward_both, inputs_of

# Rows that every number of ranks up to 4 divides.
ROWS = 12


class Rounded(torch.Tensor):
    """Float32 that is all-gathered as bfloat16. Operations compute with the float32
    values."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.data_, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, result)

    def fsdp_pre_all_gather(self, mesh):
        assert mesh.ndim == 1
        return (self.data_.to(torch.bfloat16),), ("made by", mesh.get_local_rank())

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        assert gathered.dtype == torch.bfloat16 and metadata[0] == "made by"
        if out is not None:
            out.copy_(gathered)
            return None
        whole = gathered.to(param_dtype)
        return whole, (gathered, whole)


class Int8(torch.Tensor):
    """Frozen weights: codes of a byte, and a scale for each row."""

    calls = []

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scales.dtype, device=codes.device
        )

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, weight):
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scales).round().to(torch.int8), scales)

    def dequantize(self):
        return self.codes.to(self.scales.dtype) * self.scales

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        first, rest = args[0], args[1:]
        if name in ("detach", "alias", "clone", "slice"):
            return cls(func(first.codes, *rest), func(first.scales, *rest))
        if name == "split":
            pairs = zip(func(first.codes, *rest), func(first.scales, *rest))
            return [cls(*pair) for pair in pairs]
        if name == "new_zeros":
            rows = rest[0][0]
            return cls(func(first.codes, rest[0]), func(first.scales, (rows, 1)))
        if name == "copy_":
            first.codes.copy_(rest[0].codes)
            first.scales.copy_(rest[0].scales)
            return first
        raise NotImplementedError(name)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        Int8.calls.append((outer_size, outer_stride, module, mp_policy))
        return (self.codes, self.scales), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        codes, scales = outputs
        whole = codes.to(param_dtype) * scales.to(param_dtype)
        if out is not None:
            out.copy_(whole)
            return None
        return whole, (codes, scales, whole)


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx, grad):
        return grad


class RoundedLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, Round.apply(self.weight), self.bias)


def nets(kind, make):
    """Returns a model of layers of `kind` whose weights are replaced by `make`, and the
    model with the same values before that."""
    torch.manual_seed(1)
    plain = nn.Sequential(kind(6, ROWS), nn.Tanh(), kind(ROWS, ROWS), kind(ROWS, ROWS))
    plain = on_device(plain)
    model = nn.Sequential(*(nn.Tanh() for _ in plain))
    for i, layer in enumerate(plain):
        if isinstance(layer, nn.Linear):
            model[i] = nn.Linear(layer.in_features, layer.out_features)
            model[i].bias = nn.Parameter(layer.bias.detach().clone())
            made = make(layer.weight.detach().clone())
            trains = made.dtype == torch.float32 and type(made) is Rounded
            model[i].weight = nn.Parameter(made, requires_grad=trains)
    return model, plain


def wrap(model, units, **options):
    if units == "layers":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, **options)
    return fully_shard(model, **options)


def train_both(model, plain, rank, world):
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    inputs = inputs_of(world, 2, 6)
    for step in range(4):
        for _ in range(1 + step % 2):  # two microbatches in every other step
            backward_both(model, plain, inputs, rank)
        for p, q in zip(model.parameters(), plain.parameters()):
            if p.requires_grad:
                assert not isinstance(p.grad._local_tensor, (Rounded, Int8))
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("units", ["root", "layers"])
def test_a_trained_subclass(units, reshard, mesh, rank, world):
    model, plain = nets(RoundedLinear, Rounded)
    wrap(model, units, mesh=mesh, reshard_after_forward=reshard)
    weight = model[0].weight
    assert type(weight._local_tensor) is Rounded and weight.shape == (ROWS, 6)
    assert weight._local_tensor.shape[0] == ROWS // world
    train_both(model, plain, rank, world)
    for p, q in zip(model.parameters(), plain.parameters()):
        local = p._local_tensor
        local = local.data_ if isinstance(local, Rounded) else local
        whole = q.detach() if type(p._local_tensor) is not Rounded else None
        if whole is None:
            rows = ROWS // world
            whole = q.detach()[rank * rows : (rank + 1) * rows]
            torch.testing.assert_close(local, whole)
        else:
            torch.testing.assert_close(p.full_tensor(), whole)


def test_hsdp(rank, world):
    if world != 4:
        pytest.skip("a mesh of two by two")
    mesh = named_mesh(replicas=2, shards=2)
    model, plain = nets(RoundedLinear, Rounded)
    wrap(model, "layers", mesh=mesh)
    assert model[0].weight._local_tensor.shape[0] == ROWS // 2
    train_both(model, plain, rank, world)


@pytest.mark.parametrize("units", ["root", "layers"])
def test_frozen_codes_beside_what_is_trained(units, mesh, rank, world):
    Int8.calls.clear()
    model, plain = nets(nn.Linear, Int8.of)
    policy = MixedPrecisionPolicy()
    kinds = {type(m.weight) for m in model if isinstance(m, nn.Linear)}
    assert kinds == {Int8}
    values = [m.weight.dequantize() for m in model if isinstance(m, nn.Linear)]
    for layer, value in zip([plain[0], plain[2], plain[3]], values):
        layer.weight = nn.Parameter(value, requires_grad=False)
    wrap(model, units, mesh=mesh, mp_policy=policy)
    shard = model[0].weight
    assert shard._local_tensor.codes.dtype == torch.int8
    assert shard._local_tensor.codes.shape == (ROWS // world, 6)
    assert not shard.requires_grad
    train_both(model, plain, rank, world)
    assert model[0].weight is shard
    assert Int8.calls[0] == ((ROWS, 6), (6, 1), model[0], policy)


def test_what_modules_and_parameters_show(mesh, rank, world):
    model, plain = nets(nn.Linear, Int8.of)
    seen = []
    model[2].register_forward_pre_hook(lambda m, args: seen.append(m.weight))
    value = model[2].weight.dequantize()
    wrap(model, "layers", mesh=mesh)
    shard = model[2].weight
    model(inputs_of(world, 2, 6)[rank]).sum().backward()
    (whole,) = seen
    assert (
        model[2].weight is shard and dict(model.named_parameters())["2.weight"] is shard
    )
    assert type(whole) is nn.Parameter and whole.shape == (ROWS, ROWS)
    if world > 1:
        assert whole.untyped_storage().nbytes() == 0  # not kept between steps
    model[2].unshard()
    assert torch.equal(model[2].weight, value)
    model[2].reshard()
    assert model[2].weight is shard


def test_writes_are_gathered(mesh, rank, world):
    model, _ = nets(RoundedLinear, Rounded)
    wrap(model, "layers", mesh=mesh)
    x = inputs_of(world, 2, 6)[rank]
    model(x)
    with torch.no_grad():
        model[3].weight.zero_()
    with torch.no_grad():
        assert model(x).eq(model[3].bias.full_tensor()).all()
        model[3].weight._local_tensor.data_.fill_(1)
        model[3].weight.to_local()
        assert model(x).ne(model[3].bias.full_tensor()).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant, mesh, rank, world):
    class Recomputed(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=reentrant)

    model, plain = nets(RoundedLinear, Rounded)
    model[2], model[3] = Recomputed(model[2]), Recomputed(model[3])
    for layer in (model[2].layer, model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train_both(model, plain, rank, world)


def test_made_on_meta(mesh, rank, world):
    class Pair(Rounded):
        pass

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, ROWS), nn.Linear(ROWS, ROWS))
    for layer in model:
        layer.weight = nn.Parameter(Pair(layer.weight.detach()))
    wrap(model, "layers", mesh=mesh)
    assert model[0].weight._local_tensor.is_meta
    model.to_empty(device=mesh.device_type)
    assert type(model[0].weight._local_tensor) is Pair
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    y = model(inputs_of(world, 2, 6)[rank] * 0 + 1)
    assert y.eq(0.5 + ROWS * 0.5 * (0.5 + 6 * 0.5)).all()


def test_mixed_precision(mesh, rank, world):
    model, _ = nets(RoundedLinear, Rounded)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    seen = []
    model[0].register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    wrap(model, "layers", mesh=mesh, mp_policy=policy)
    model(inputs_of(world, 2, 6)[rank]).float().sum().backward()
    assert seen == [torch.bfloat16]
    assert model[0].weight.grad.dtype == torch.float32


def test_a_deleted_model_is_gone(mesh, rank, world):
    model, _ = nets(RoundedLinear, Rounded)
    wrap(model, "layers", mesh=mesh)
    model(inputs_of(world, 2, 6)[rank]).sum().backward()
    alive = weakref.ref(model), weakref.ref(model[0].weight)
    del model
    assert [ref() for ref in alive] == [None, None]


class Nothing(Rounded):
    fsdp_pre_all_gather = property()


def test_functions_of_a_piece(mesh, rank, world):
    """They are put on the pieces after fully_shard, as on plain tensors of a class."""
    layer = nn.Linear(6, ROWS, bias=False)
    value = layer.weight.detach().clone()
    layer.weight = nn.Parameter(Nothing(value))
    fully_shard(layer, mesh=mesh)
    piece = layer.weight._local_tensor
    calls = []

    class Later(Nothing):
        def fsdp_pre_all_gather(self, mesh):
            calls.append(mesh)
            return (self.data_,), None

        def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
            return None if out is not None else (outputs[0], outputs)

    piece.__class__ = Later
    x = on_device(torch.ones(1, 6))
    for _ in range(2):
        torch.testing.assert_close(layer(x), F.linear(x, on_device(value)))
    assert calls


def test_refusals(mesh, rank, world, tmp_path):
    def model():
        return nets(RoundedLinear, Rounded)[0]

    def refused(text):
        return pytest.raises(NotImplementedError, match=text)

    plain_subclass = nn.Linear(6, ROWS)
    plain_subclass.weight = nn.Parameter(Nothing(plain_subclass.weight.detach()))
    fully_shard(plain_subclass, mesh=mesh)
    with refused("weight: its piece is a Nothing without fsdp_pre_all_gather"):
        plain_subclass(inputs_of(world, 2, 6)[rank])
    with refused("strategy: this value"):
        fully_shard(model(), mesh=mesh, strategy="zero2")
    with refused("offload_policy: this value"):
        policy = flatshard.CPUOffloadPolicy(pin_memory=False)
        fully_shard(model(), mesh=mesh, offload_policy=policy)
    made = fully_shard(model(), mesh=mesh)
    made(inputs_of(world, 2, 6)[rank])
    with refused("flatshard.checkpoint: parameter 0.weight"):
        flatshard.checkpoint.save(tmp_path, 1, made)
    with refused("AdamW: a parameter of shape"):
        flatshard.optim.AdamW(made.parameters(), lr=1)
    with refused("parameter_norms: parameter 0.weight"):
        flatshard.diagnostics.parameter_norms(made)
    with refused("reset_parameters: parameter"):
        flatshard.reset_parameters(made)
    with refused("cannot change its dtype"):
        made.double()
    made[0].weight.requires_grad_(False)
    with refused("requires_grad of parameter 0.weight, a tensor of a subclass"):
        made(inputs_of(world, 2, 6)[rank])
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(made)
