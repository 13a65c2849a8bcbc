"""The Python side of one unit: where its parameters live, and its options.

A parameter has two faces. The shard is an `nn.Parameter` over a DTensor: what
`parameters()`, optimizers and checkpoints see. The whole one is a plain
`nn.Parameter` without memory of its own that the core points at gathered memory
while the unit computes. The core swaps them in the modules' `_parameters`.
"""

import weakref
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.weak import WeakIdKeyDictionary

from flatshard import _C
from flatshard._graphs.checks import DEFAULT_WARMUP_STEPS
from flatshard._tensor.meta_shards import mark_of_meta
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.sharded_tensor import ShardedTensor, become, with_local
from flatshard._tensor.writes import writes
from flatshard.torch_versions import default_reduce_dtype

# Where a parameter went, kept on the tensor that the user had: meeting it again
# in another unit means that two units share it.
_OWNER = "_flatshard_owner"
num_marked = 0


_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Where a sharded parameter lives.
_places = WeakIdKeyDictionary()


def unit_of(parameter):
    """(UnitState, index in its core) of a sharded parameter, or None."""
    place = _places.get(parameter)
    if place is None or place[0]() is None:
        return None
    return place[0](), place[1]


@dataclass
class Policy:
    """What the setters of FSDPModule change."""

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: list | None = None
    backward_prefetch: list | None = None
    sync_gradients: bool = True
    all_reduce: bool = True


@dataclass
class Parameter:
    """One parameter of a unit."""

    sites: list  # (module, name) of every place in the unit, the first is main
    whole: nn.Parameter
    shard: nn.Parameter = None
    index: int = -1  # in the core's unit
    names: list = field(default_factory=list)  # in the model, once that is known
    trainable: bool = True
    on_meta: bool = False
    digest: torch.Tensor | None = None  # of the whole values, see _tensor/same_values.py
    label: str = ""  # its name below the modules given to fully_shard
    float8: bool = False
    why_not_float8: str = ""
    shared_by: object = None  # the DeviceMesh of ranks with equal values; None: all
    hooks: dict = field(default_factory=dict)  # see hooks_of
    shown_dtype: torch.dtype | None = None  # of the shard, as the core made it

    @property
    def title(self):
        """For messages."""
        return self.sites[0][1] if self.sites else self.label

    def is_as_sharded(self):
        """Nobody changed requires_grad or the dtype since the core has it."""
        same_dtype = self.shard.dtype == self.shown_dtype
        return same_dtype and self.shard.requires_grad == self.trainable

    def is_shown(self):
        """Some module has it."""
        shown = [m._parameters.get(n) for r, n in self.sites if (m := r()) is not None]
        return any(tensor is self.shard or tensor is self.whole for tensor in shown)


@dataclass(eq=False, repr=False)
class UnitState:
    """One call of fully_shard."""

    modules: list  # weak references
    core: _C.Unit
    mesh: _C.Mesh
    device_mesh: object
    parameters: list
    mp_policy: object
    fp8: object  # Float8Policy or None
    prefetch: int | None
    copy_engines: bool
    core_options: object  # _C.UnitOptions
    cuda_graph: bool = False
    main_grads: bool = False  # modules write some of its gradients, see main_grad.py
    slots_on_demand: bool | None = None
    max_padding: float = 0.05
    graph_warmup_steps: int = DEFAULT_WARMUP_STEPS
    policy: Policy = field(default_factory=Policy)
    grads: _C.GradViews = None
    root: object = None  # Root, once known
    id: int = -1
    name: str = ""
    num_writes: int = 0  # that others made to its parameters
    num_looks: int = 0  # at their memory
    seen_writes: tuple = ()  # Writes.count, num_writes, num_looks
    check_same_values: bool = False
    seen_list_writes: int = field(default_factory=lambda: writes.lists)
    ignored: list = field(default_factory=list)  # places of ignored_params
    loads_by_assign: bool = False  # the load_state_dict that runs
    initialized: bool = True  # False: parameters that were on meta have no values
    running: set = field(default_factory=set)  # ids of a list's modules still to run
    # On a part of the model's mesh its parameters are slices of larger tensors: how
    # many there are, and which. None: on all of it.
    slices: tuple | None = None
    joined: list = field(default_factory=list)  # UnitStates whose parameters it has

    # -- parameters ----------------------------------------------------------------

    def make_shards(self):
        """Replaces the parameters in the modules by their shards."""
        by_tensor = {id(p.whole): p for p in self.parameters}
        for i in range(self.core.num_parameters):
            p = by_tensor[id(self.core.whole(i))]
            p.index = i
            p.trainable = self.core.trainable(i)
            data = self._wrap(p, self.core.shard(i))
            p.shard = nn.Parameter(data, requires_grad=p.trainable)
            p.shown_dtype = data.dtype
            _copy_attributes(p.whole, p.shard)
            put_hooks(p)
            _places[p.shard] = (weakref.ref(self), i)
            self.show(p, p.shard)
        self.parameters.sort(key=lambda p: p.index)
        self.make_grads()
        self._watch_shards()

    def _watch_shards(self):
        writes.add(self, [p.shard for p in self.parameters])
        mark_of_meta(
            {
                p.shard._local_tensor.untyped_storage()._cdata
                for p in self.parameters
                if p.on_meta
            },
            self,
        )

    def is_as_sharded(self):
        return all(p.is_as_sharded() for p in self.parameters)

    def shard_again(self):
        """The core groups parameters by requires_grad and dtype: makes it anew, with
        what they are now. The shards stay the same objects. Before the first forward,
        collective."""
        self._check_may_change()
        for p in self.parameters:
            if p.shard.dtype == p.shown_dtype:
                p.whole.requires_grad_(p.shard.requires_grad)
            else:
                p.whole = whole_parameter(p.shard, p.whole)
        values = [
            torch.empty_like(p.whole)
            if p.on_meta
            else p.shard.detach().full_tensor().to(p.whole.dtype)
            for p in self.parameters
        ]
        writes.remove([p.shard for p in self.parameters])
        self.core = make_core(
            self.parameters, values, self.mp_policy, self.mesh, self.core_options
        )
        by_tensor = {id(p.whole): p for p in self.parameters}
        for i in range(self.core.num_parameters):
            p = by_tensor[id(self.core.whole(i))]
            p.index = i
            p.trainable = self.core.trainable(i)
            data = self._wrap(p, self.core.shard(i))
            become(p.shard, data)
            p.shown_dtype = data.dtype
            _places[p.shard] = (weakref.ref(self), i)
        self.parameters.sort(key=lambda p: p.index)
        self._watch_shards()

    def _check_may_change(self):
        changed = next(p for p in self.parameters if not p.is_as_sharded())
        what, now = "requires_grad", changed.shard.requires_grad
        if changed.shard.dtype != changed.shown_dtype:
            what, now = "the dtype", changed.shard.dtype
        why = None
        if self.joined:
            why = "whose parameters rest on a part of the model's mesh"
        elif self.core.offloads:
            why = "which has CPUOffloadPolicy"
        elif what == "the dtype" and (changed.float8 or self.main_grads):
            why = "whose modules have FP8 weights or write to main_grad"
        if why is not None:
            raise NotImplementedError(
                f"{what} of parameter {changed.title} was changed to {now} after "
                f"fully_shard, which is not supported for a unit {why}: change it before "
                "fully_shard"
            )

    def forget_digests(self):
        """The values are others now."""
        for p in self.parameters:
            p.digest = None

    def make_grads(self):
        self.grads = _C.GradViews(
            self.core,
            [p.shard for p in self.parameters],
            ShardedTensor.beside,
            ShardedTensor.rows_of,
        )

    def take(self, p, tensor):
        """Makes `tensor`, a DTensor like p's shard, that shard. Collective."""
        local = p.shard._local_tensor
        if tensor.dtype != p.shard.dtype:  # until shard_again
            local = torch.empty_like(local, dtype=tensor.dtype)
        if tensor._local_tensor.is_meta:
            p.on_meta = True
        else:
            with torch.no_grad():
                local.copy_(p.shard.rows_of(tensor))
            p.on_meta = False
        p.digest = None
        _places.pop(p.shard)
        same = tensor.dtype == p.shard.dtype
        spec = (p.shard if same else with_local(p.shard, local))._spec
        tensor._local_tensor, tensor._spec = local, spec
        tensor.__class__ = ShardedTensor
        p.shard = tensor
        _places[tensor] = (weakref.ref(self), p.index)
        writes.count += 1

    def _wrap(self, p, local):
        cuts = self.core.cuts(p.index)
        mesh = self.device_mesh
        inner = mesh.size(mesh.ndim - 1)
        if not cuts:
            placements = [Replicate()] * mesh.ndim
        else:
            pieces = self.core.shard_of_ranks(p.index)[:inner]
            outer = [Replicate()] * (mesh.ndim - 1)
            placements = [*outer, RowShard(cuts, pieces)]
        return ShardedTensor.wrap(local, mesh, placements, p.whole.shape)

    @staticmethod
    def show(p, tensor):
        for module, name in p.sites:
            module()._parameters[name] = tensor

    def check_initialized(self):
        for p in self.parameters:
            if p.on_meta and not self.initialized:
                raise RuntimeError(
                    f"parameter {p.names[0]} was on the meta device when it was "
                    "sharded and has no values yet: call "
                    "flatshard.reset_parameters(model), or load a checkpoint"
                )

    def check_trainable(self):
        for p in self.parameters:
            if p.shard.requires_grad != p.trainable:
                raise RuntimeError(
                    f"requires_grad of parameter {p.title} of unit {self.name} "
                    "was changed after fully_shard, which groups parameters by it: "
                    "freeze or unfreeze before fully_shard"
                )


def _copy_attributes(source, target):
    for name, value in vars(source).items():
        if name != _OWNER:
            setattr(target, name, value)


# -- collecting what a unit owns -----------------------------------------------------


def modules_of_unit(modules, is_unit):
    """The modules whose parameters belong to a unit of `modules`: all below
    them but what other units hold. Each once."""
    found = {}
    for module in modules:
        _walk(module, is_unit, found)
    return list(found.values())


# Not a function inside: one that calls itself is a cycle, which would keep the model
# until the garbage collector runs.
def _walk(module, is_unit, found):
    if id(module) in found or is_unit(module):
        return
    found[id(module)] = module
    for child in module.children():
        _walk(child, is_unit, found)


def collect_parameters(modules, owned, ignored):
    """The parameters to shard, each once with all its places.

    Args:
        modules: those given to fully_shard, for names in messages.
        owned: modules_of_unit(modules).
        ignored: ids of parameters to leave alone.
    """
    names = {}
    for number, root in enumerate(modules):
        prefix = str(number) if len(modules) > 1 else ""
        for name, module in root.named_modules(prefix=prefix):
            names.setdefault(id(module), name)
    found = {}
    for module in owned:
        prefix = names[id(module)]
        for name, tensor in module._parameters.items():
            if tensor is None or id(tensor) in ignored:
                continue
            full = f"{prefix}.{name}" if prefix else name
            found.setdefault(id(tensor), (tensor, full, []))[2].append(
                (weakref.ref(module), name)
            )
    for tensor, name, _ in found.values():
        _check_parameter(tensor, name)
    return list(found.values())


def _check_parameter(tensor, name):
    if hasattr(tensor, _OWNER):
        raise ValueError(
            f"parameter {name} is shared with a unit that was wrapped before, as "
            f"{getattr(tensor, _OWNER)}; wrap one module that holds both, and do not "
            "wrap them inside it"
        )
    if isinstance(tensor, ShardedTensor):
        raise ValueError(f"parameter {name} is sharded already, by another unit")
    if hasattr(tensor, "placements"):
        raise ValueError(
            f"parameter {name} is a DTensor; tensor parallelism under fully_shard is "
            "not supported yet"
        )
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise ValueError(
            f"parameter {name} has no shape yet ({type(tensor).__name__}): run the "
            "module once before fully_shard"
        )
    if type(tensor) is not nn.Parameter:
        raise NotImplementedError(
            f"parameter {name} is a {type(tensor).__name__}, a subclass that sharding "
            "would turn into a plain tensor: put nn.Parameter(its plain values) in its "
            f"place before fully_shard, or name it in ignored_params{_instead(tensor)}"
        )
    if tensor.requires_grad and tensor.dtype not in _TRAINABLE:
        raise ValueError(
            f"parameter {name} is of type {tensor.dtype} and trainable; expected one of "
            f"{', '.join(map(str, _TRAINABLE))}. Freeze it (requires_grad_(False)), or "
            "name it in ignored_params"
        )


def _instead(tensor):
    library = type(tensor).__module__.split(".")[0]
    if library not in ("torchao", "transformer_engine"):
        return ""
    return f". For FP8 weights give fp8=Float8Policy(...) and not {library}'s"


def whole_parameter(tensor, former=None):
    """What modules compute with instead of `tensor`; without memory.

    Args:
        former: the one before, from which attributes are copied. None: `tensor`.
    """
    whole = nn.Parameter(
        torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
        requires_grad=tensor.requires_grad,
    )
    _copy_attributes(tensor if former is None else former, whole)
    return whole


def make_core(parameters, values, mp_policy, mesh, options):
    """The core's unit of `parameters`.

    Args:
        values: of each, whole.
        mesh: _C.Mesh of the model.
        options: _C.UnitOptions.
    """
    members = []
    for p, value in zip(parameters, values):
        reduce_dtype = mp_policy.reduce_dtype or default_reduce_dtype(
            mp_policy.param_dtype, value.dtype
        )
        members.append((p.label, p.whole, value, reduce_dtype, p.float8))
    return _C.Unit(members=members, mesh=mesh, options=options)


# Dictionaries of hooks, from which the handles that users have remove theirs.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(tensor):
    """Those that somebody put on a parameter before it was sharded."""
    found = {name: getattr(tensor, name) for name in _HOOKS}
    return {name: hooks for name, hooks in found.items() if hooks}


def put_hooks(p):
    """They run on the reduced gradient of the shard."""
    for name, hooks in p.hooks.items():
        if p.shard.requires_grad:
            setattr(p.shard, name, hooks)


def mark_owner(tensor, name):
    global num_marked
    num_marked += 1
    setattr(tensor, _OWNER, name)


def former_name(tensor):
    """The name of the parameter that `tensor` was before fully_shard, or None."""
    return getattr(tensor, _OWNER, None)
