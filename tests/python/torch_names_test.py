"""Names of torch that are not public: where they are used, and that they are as Flatshard
expects. A failure names what another torch changed."""

import ast
import functools
import inspect
import pathlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import torch_versions
from flatshard._tensor import reported_collectives, shard_calls, shard_operations
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.row_spec import RowSpec
from flatshard._tensor.shard_views import ShardedView
from flatshard._tensor.sharded_tensor import ShardedTensor
from tests.python.device import DEVICE, named_mesh

# In a build folder it consists of links. rglob does not follow them.
PACKAGE = pathlib.Path(flatshard.__file__).resolve().parent
# Private names of Python's own library.
_PYTHONS = {"_exit", "_getframe"}


# -- what is expected of each name -------------------------------------------------------

CHECKS = {}


def expects(*names):
    """Registers a function that raises unless `names` are as the package needs them."""

    def register(check):
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register


def parameters_of(function):
    return list(inspect.signature(function).parameters)


@expects(
    "torch.distributed._composable.contract.REGISTRY_KEY",
    "torch.distributed._composable.contract.RegistryItem",
)
def registry_of_composable_functions(mesh):
    from torch.distributed._composable import replicate
    from torch.distributed._composable.contract import _get_registry

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(DEVICE)
    flatshard.fully_shard(model[0], mesh=mesh)
    assert list(_get_registry(model[0])) == ["fully_shard"]
    model(torch.ones(1, 2, device=DEVICE))
    replicate(model)
    model(torch.ones(1, 2, device=DEVICE)).sum().backward()
    assert isinstance(model[0].weight.grad, DTensor)
    assert type(model[1].weight.grad) is torch.Tensor


@expects("_unsafe_preserve_version_counter")
def writes_that_autograd_does_not_count(mesh):
    tensor = torch.ones(2)
    with torch_versions.keeps_version(tensor):
        tensor.add_(1)
    assert tensor.eq(2).all() and tensor._version == 0


@expects("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
def tables_of_modules(mesh):
    module = nn.BatchNorm1d(2)
    module.register_buffer("kept", None)
    module.register_buffer("left_out", torch.zeros(1), persistent=False)
    assert list(module._parameters) == ["weight", "bias"]
    assert module._parameters["weight"] is module.weight
    assert module._buffers["kept"] is None
    assert module._non_persistent_buffers_set == {"left_out"}
    assert nn.Sequential(module)._modules == {"0": module}
    other = module._parameters["weight"] = nn.Parameter(torch.zeros(2))
    assert module.weight is other and module.state_dict()["weight"].sum() == 0


@expects(
    "_compiled_call_impl",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
)
def arguments_of_compiled_modules(mesh):
    value = torch.ones(2, requires_grad=True)
    under_way = AsyncCollectiveTensor(value)
    module = nn.Linear(2, 2)
    assert torch_versions.wait_for_collectives(module, (under_way,))[0] is under_way
    module.compile(backend="eager")
    waited, other = torch_versions.wait_for_collectives(module, (under_way, 1))
    assert type(waited) is torch.Tensor and waited.equal(value) and other == 1
    assert waited.requires_grad


@expects("_forward_hooks", "_forward_pre_hooks")
@expects("_backward_hooks", "_backward_pre_hooks")
def hooks_of_modules(mesh):
    module = nn.Linear(1, 1)
    tables = {name: getattr(module, name) for name in HOOKS.values()}
    for way, name in HOOKS.items():
        handle = getattr(module, way)(lambda *_: None)
        assert list(tables[name]) == [handle.id] and getattr(module, name)
        handle.remove()
        assert not tables[name]


HOOKS = {
    "register_forward_hook": "_forward_hooks",
    "register_forward_pre_hook": "_forward_pre_hooks",
    "register_full_backward_hook": "_backward_hooks",
    "register_full_backward_pre_hook": "_backward_pre_hooks",
}


@expects("_global_forward_hooks", "_global_forward_pre_hooks")
@expects("_global_backward_hooks", "_global_backward_pre_hooks")
def hooks_of_all_modules(mesh):
    ways = nn.modules.module
    for way in (
        ways.register_module_forward_pre_hook,
        ways.register_module_forward_hook,
        ways.register_module_full_backward_pre_hook,
        ways.register_module_full_backward_hook,
    ):
        handle = way(lambda *_: None)
        found = [handle.id in hooks for hooks in torch_versions.GLOBAL_HOOKS]
        handle.remove()
        assert found.count(True) == 1, way.__name__
        assert not any(handle.id in hooks for hooks in torch_versions.GLOBAL_HOOKS)


@expects("_apply")
def conversions_of_modules(mesh):
    seen = []

    class Watched(nn.Linear):
        def _apply(self, fn, recurse=True):
            seen.append(fn(torch.zeros(1)).dtype)
            return super()._apply(fn, recurse)

    module = Watched(1, 1)
    for convert in (module.to, lambda dtype: module.double(), lambda _: module.cpu()):
        convert(torch.float64)
    module.to_empty(device="cpu")
    assert len(seen) == 4 and seen[0] == torch.float64


@expects("_post_accumulate_grad_hooks")
def hooks_of_tensors(mesh):
    calls = []
    user, shard = (torch.zeros(1, requires_grad=True) for _ in range(2))
    user.register_hook(lambda _: calls.append("gradient"))
    handle = user.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    torch_versions.set_hooks_of_tensor(shard, torch_versions.hooks_of_tensor(user))
    (2 * shard).backward()
    assert calls == ["gradient", "after"]
    handle.remove()
    (2 * shard).backward()
    assert calls == ["gradient", "after", "gradient"]


@expects("_version")
def versions(mesh):
    tensor = torch.zeros(1)
    before = tensor._version
    tensor.add_(1)
    tensor.detach().add_(1)
    assert tensor._version == before + 2


@expects("_cdata")
def storages(mesh):
    tensor = torch.empty(4)
    storage = tensor.untyped_storage()
    assert storage._cdata == tensor[1:].untyped_storage()._cdata
    assert storage._cdata != torch.empty(4).untyped_storage()._cdata
    empty = torch.empty(4, device="meta")
    assert empty.untyped_storage()._cdata == empty[1:].untyped_storage()._cdata


def seen():
    """Returns a subclass of Tensor, and the list that its calls are added to."""
    calls = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            calls.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    return Seen, calls


@expects("_C")
def attributes_of_subclasses(mesh):
    Seen, calls = seen()
    tensor = torch.ones(2).as_subclass(Seen)
    with torch_versions.plain_attributes():
        assert tensor.grad is None and not tensor.requires_grad
    assert not calls
    assert tensor.grad is None and calls == [torch.Tensor.grad.__get__]


@expects("_set_storage_data_ptr_access_error_msg")
def errors_of_reads(mesh):
    tensor = torch.empty(4)
    torch_versions.drop_values(tensor, "nothing is here")
    with pytest.raises(RuntimeError, match="nothing is here"):
        tensor.sum()


@expects("_current_graph_task_id")
def engine_runs(mesh):
    assert not torch_versions.in_backward()
    x = torch.ones(1, requires_grad=True)
    seen = []
    x.register_hook(lambda _: seen.append(torch_versions.in_backward()))
    (2 * x).backward()
    assert seen == [True] and not torch_versions.in_backward()


@expects("_autograd", "_top_saved_tensors_default_hooks")
def saved_tensor_hooks(mesh):
    seen = []

    def forward(x):
        seen.append(torch_versions.has_saved_tensor_hooks())
        return 2 * x

    assert not torch_versions.has_saved_tensor_hooks()
    checkpoint(forward, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen == [True] and not torch_versions.has_saved_tensor_hooks()


@expects("_concatenate")
def meshes_of_two_dimensions(mesh):
    from torch.distributed.device_mesh import DeviceMesh

    grid = named_mesh(dp=1, tp=mesh.size())
    both = DeviceMesh._concatenate([grid["dp"], grid["tp"]])
    assert both.mesh_dim_names == ("dp", "tp") and both == grid


@expects("torch.distributed.tensor.placement_types._StridedShard", "_is_param")
def parameters_of_tensor_parallelism(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    grid = named_mesh(dp=1, tp=mesh.size())
    layer = nn.Linear(2, 4 * mesh.size()).to(DEVICE)
    parallelize_module(layer, grid["tp"], ColwiseParallel())
    flatshard.fully_shard(layer, mesh=grid["dp"])
    seen = []
    layer.register_forward_pre_hook(lambda m, _: seen.append(m.weight))
    layer(torch.ones(1, 2, device=DEVICE)).sum().backward()
    assert isinstance(seen[0], nn.Parameter) and isinstance(seen[0], DTensor)
    assert layer.weight.full_tensor().shape == (4 * mesh.size(), 2)


@expects("_len_torch_dispatch_stack")
def dispatch_modes(mesh):
    from torch.utils.flop_counter import FlopCounterMode

    assert not torch_versions.has_dispatch_mode()
    with FlopCounterMode(display=False):
        assert torch_versions.has_dispatch_mode()


@expects(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch._disable_current_modes",
)
def debug_modes(mesh):
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils.flop_counter import FlopCounterMode

    assert torch_versions.comm_debug_modes() == []
    with torch_versions.without_dispatch_modes():
        assert not torch_versions.has_dispatch_mode()
    with CommDebugMode() as outer, FlopCounterMode(display=False):
        with CommDebugMode() as inner:
            assert torch_versions.comm_debug_modes() == [outer, inner]
            with torch_versions.without_dispatch_modes():
                assert not torch_versions.has_dispatch_mode()
                dist.barrier()
    assert outer.get_total_counts() == inner.get_total_counts() == 0


@expects("_allgather_base_", "_reduce_scatter_base_", "_c10d_functional")
def operators_that_are_counted(mesh):
    from torch.distributed.tensor.debug import CommDebugMode

    mine = torch.ones(2, device=DEVICE)
    all_of_them = mine.new_empty(2 * mesh.size())
    with CommDebugMode() as real:
        dist.all_gather_into_tensor(all_of_them, mine)
        dist.reduce_scatter_tensor(mine, all_of_them)
        dist.all_reduce(mine)
        DTensor.from_local(mine, mesh, [Partial()]).full_tensor()
    expected = {
        reported_collectives.ALL_GATHER.overloadpacket: 1,
        reported_collectives.REDUCE_SCATTER.overloadpacket: 1,
        reported_collectives.ALL_REDUCE.overloadpacket: 1,
    }
    counts = real.get_comm_counts()
    assert expected.items() <= counts.items()
    ran = [o.default for o in expected]
    if mesh.size() > 1:  # a DTensor on one rank sends nothing
        ran.append(reported_collectives.DTENSORS_ALL_REDUCE)
    with CommDebugMode() as counted:
        reported_collectives.report([counted], ran)
    assert counted.get_comm_counts() == counts


@expects("_execution_engine")
def callbacks_of_a_backward(mesh):
    """A callback may queue another one. That runs after all callbacks queued before
    it."""
    seen = []

    def hook(grad):
        torch_versions.queue_callback(
            lambda: torch_versions.queue_callback(lambda: seen.append("last"))
        )
        torch_versions.queue_callback(lambda: seen.append("first"))

    x = torch.ones(1, requires_grad=True)
    x.register_hook(hook)
    (2 * x).backward()
    assert seen == ["first", "last"]


@expects("_functorch")
def batches(mesh):
    seen = []
    x = torch.ones(2, requires_grad=True)

    def see(tensor):
        seen.append(torch_versions.is_batched(tensor))
        return tensor

    x.register_hook(see)
    torch.autograd.grad(x * 2, x, torch.eye(2), is_grads_batched=True)
    torch.vmap(see)(torch.eye(2))
    assert seen == [True, True] and not torch_versions.is_batched(x)


@expects("_are_functorch_transforms_active")
def functions_of_torch_func(mesh):
    seen = []

    def function(x):
        seen.append(torch_versions.in_functorch())
        return x.sum()

    torch.func.grad(function)(torch.ones(1))
    assert seen == [True] and not torch_versions.in_functorch()


@expects("_dynamo", "_FrameAction", "_FrameExecStrategy", "_torchdynamo_disable")
def frames_of_dynamo(mesh):
    seen = []

    def inner(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    assert not torch_versions.is_compiled_around()
    for decorate, compiles in (
        (torch_versions.outside_of_graphs, True),
        (torch_versions.never_compiled, False),
    ):

        @decorate
        def outer(x):
            seen.append(torch_versions.is_compiled_around())
            seen.append(torch.compiler.is_compiling())
            return inner(x)

        seen.clear()
        torch.compile(outer, backend="eager")(torch.ones(1))
        assert seen == [compiles, False, compiles], decorate.__name__
        torch._dynamo.reset()


@expects("torch.library._register_effectful_op", "torch._library.effects.EffectType")
def effects(mesh):
    from torch._library.effects import EffectType
    from torch.library import _register_effectful_op

    assert parameters_of(_register_effectful_op)[:2] == ["op", "effect"]
    assert EffectType.ORDERED is not None


@expects("torch.utils._pytree.tree_flatten", "torch.utils._pytree.tree_unflatten")
@expects("torch.utils._pytree.tree_map", "torch.utils._pytree.tree_leaves")
def nested_arguments(mesh):
    from transformers.modeling_outputs import BaseModelOutput

    one = torch.ones(1)
    tree = {"a": [one, 2], "b": BaseModelOutput(last_hidden_state=one)}
    leaves, structure = torch_versions.tree_flatten(tree)
    assert leaves[0] is one and leaves[1:] == [2, one]
    assert torch_versions.tree_leaves(tree)[2] is one
    assert torch_versions.tree_unflatten(leaves, structure) == tree
    mapped = torch_versions.tree_map(lambda leaf: leaf + 1, tree)
    assert mapped["a"] == [torch.full((1,), 2.0), 3]
    assert structure == torch_versions.tree_flatten(mapped)[1]


# -- DTensor -----------------------------------------------------------------------------


@expects("_local_tensor", "_spec")
@expects("torch.distributed.tensor._dtensor_spec.DTensorSpec")
@expects("torch.distributed.tensor._dtensor_spec.TensorMeta")
def inside_of_dtensors(mesh):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    assert TensorMeta._fields == ("shape", "stride", "dtype")
    local = torch.ones(2, 3, device=DEVICE)
    placements = (Replicate(),) * mesh.ndim
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    tensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    assert tensor._spec is spec and spec.mesh is mesh and tensor.dtype == local.dtype
    assert tensor.placements == spec.placements == placements
    assert tensor._local_tensor is local and tensor.shape == local.shape
    tensor.__class__ = ShardedTensor
    tensor._local_tensor = torch.zeros(2, 3, device=DEVICE)
    assert tensor.to_local().sum() == 0
    assert set(DTensor.__slots__) == {"_local_tensor", "_spec"}


@expects("_local_shard_size_and_offset", "_to_replicate_tensor", "_replicate_to_shard")
def methods_of_shard(mesh):
    for name in (
        "_local_shard_size_and_offset",
        "_to_replicate_tensor",
        "_replicate_to_shard",
    ):
        theirs = parameters_of(getattr(Shard, name))
        ours = parameters_of(getattr(RowShard, name))
        assert len(theirs) == len(ours), f"{name} takes {theirs}"


@expects("_get_root_mesh", "_flatten_mapping", "_flatten")
def meshes(mesh):
    from torch.distributed.device_mesh import init_device_mesh

    whole = init_device_mesh(DEVICE, (1, mesh.size()), mesh_dim_names=("a", "b"))
    flat = whole["a", "b"]._flatten("ab")
    assert flat.size() == mesh.size() and flat.ndim == 1
    assert whole["b"]._get_root_mesh() == whole
    assert list(whole._get_root_mesh()._flatten_mapping) == ["ab"]


@expects("_get_default_store", "_get_default_timeout")
def default_group(mesh):
    store = dist.distributed_c10d._get_default_store()
    store.set(f"torch names {dist.get_rank()}", "here")
    assert store.get(f"torch names {dist.get_rank()}") == b"here"
    backend = dist.Backend(dist.get_backend())
    assert dist.distributed_c10d._get_default_timeout(backend).total_seconds() > 0


@expects("_device_types")
def devices_of_groups(mesh):
    kinds = {device.type for device in mesh.get_group(0)._device_types}
    assert mesh.device_type in kinds


# -- operations --------------------------------------------------------------------------


@expects("_schema")
def schemas(mesh):
    traits = shard_calls.traits_of(torch.ops.aten.add_.Tensor)
    assert (traits.name, traits.overload) == ("add_", "Tensor")
    assert traits.arguments == ["self", "other", "alpha"]
    assert traits.defaults == {"alpha": 1} and traits.written == {"self"}
    assert shard_calls.traits_of(torch.ops.aten.t.default).shows_argument
    assert "indices" in shard_calls.traits_of(torch.ops.aten.max.dim).returns


@expects("_dispatch_get_all_op_names", "torch._library.simple_registry.singleton")
def rules_of_operations(mesh):
    from torch._library.simple_registry import singleton

    assert "aten::add.Tensor" in torch._C._dispatch_get_all_op_names()
    rules = singleton.find("aten::add.Tensor").torch_dispatch_rules
    assert rules.find(ShardedTensor) is shard_operations.dispatch
    with pytest.raises(RuntimeError, match="registered"):
        rules.register(ShardedTensor, None)


@expects("torch.utils._mode_utils.no_dispatch")
def shapes_change_below_dispatch(mesh):
    local = torch.ones(2, 3, device=DEVICE)
    tensor = ShardedTensor.wrap(local, mesh, [Replicate()] * mesh.ndim, (2, 3))
    tensor.t_()
    assert tensor.shape == (3, 2) and torch.equal(tensor.to_local(), local.t())


@expects("torch.utils._foreach_utils", "_foreach_supported_types")
def types_of_clipping(mesh):
    from torch.utils import _foreach_utils

    types = _foreach_utils._foreach_supported_types
    assert ShardedTensor in types and torch.Tensor in types
    local = torch.ones(2, device=DEVICE)
    assert _foreach_utils._has_foreach_support([local], local.device)


@expects("_foreach_norm")
def norms_of_lists(mesh):
    first, second = torch._foreach_norm([torch.ones(4), torch.ones(9)], 2)
    assert (first.item(), second.item()) == (2, 3)


@expects("_amp_foreach_non_finite_check_and_unscale_")
def unscaling(mesh):
    Seen, calls = seen()
    gradient = torch.ones(2, device=DEVICE).as_subclass(Seen)
    name = "_amp_foreach_non_finite_check_and_unscale_"
    getattr(torch, name)(
        [gradient], torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
    )
    assert calls == [getattr(torch, name)]


# -- where they are used -----------------------------------------------------------------


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def parsed():
    """{path in the package: its syntax tree}"""
    files = PACKAGE.rglob("*.py")
    return {str(f.relative_to(PACKAGE)): ast.parse(f.read_text()) for f in files}


@functools.cache
def own_names():
    """Returns the names that the package defines itself."""
    names = set(_PYTHONS)
    for node in (n for tree in parsed().values() for n in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and is_own(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # a member of a class that is made, `_flatshard...`
    return names - CHECKS.keys()


def is_own(value):
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def torchs_names(tree):
    """(name, line) of each private name of torch in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in own_names() and not is_own(node.value):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and node.value in CHECKS:
            yield node.value, node.lineno  # of getattr or attrgetter
        elif isinstance(node, ast.ImportFrom) and (node.module or "")[:5] == "torch":
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                if any(map(is_private, name.split("."))):
                    yield name, node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any(map(is_private, alias.name.split("."))):
                    yield alias.name, node.lineno


def overridden():
    """Private methods of torch's classes that the package's have, too."""
    for kind in (ShardedTensor, ShardedView, RowShard, RowSpec, flatshard.FSDPModule):
        theirs = (*kind.__mro__, nn.Module)
        for name in filter(is_private, vars(kind)):
            if any(name in vars(t) for t in theirs if t.__module__[:5] == "torch"):
                yield name


def may_use_them(file):
    return file == "torch_versions.py" or file.startswith("_tensor/")


def test_private_names_of_torch_are_used_in_two_places():
    found = [
        f"{file}:{line}: {name}"
        for file, tree in parsed().items()
        if not may_use_them(file)
        for name, line in torchs_names(tree)
    ]
    assert not found, (
        "private names of torch outside of _tensor/ and torch_versions.py; give them a "
        f"function there, with the reason, and a check here: {found}"
    )


def used():
    """{name: the file that uses it}"""
    names = {
        name: file
        for file, tree in parsed().items()
        if may_use_them(file)
        for name, _ in torchs_names(tree)
    }
    return names | dict.fromkeys(overridden(), "a class of the package")


def test_each_private_name_has_a_check():
    names = used().keys()
    unchecked, unused = sorted(names - CHECKS.keys()), sorted(CHECKS.keys() - names)
    assert not unchecked and not unused


@pytest.mark.parametrize("name", CHECKS)
def test_torch_has(name, mesh):
    try:
        CHECKS[name](mesh)
    except Exception as error:
        where = used().get(name, "torch_versions.py")
        pytest.fail(
            f"torch {torch.__version__} changed {name}, which {where} uses "
            f"(docs/reference/compatibility.md, Versions): {error!r}"
        )
