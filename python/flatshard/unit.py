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
from flatshard.row_shard import RowShard
from flatshard.sharded_tensor import ShardedTensor, mark_of_meta, writes

# Where a parameter went, kept on the tensor that the user had: meeting it again
# in another unit means that two units share it.
_OWNER = "_flatshard_owner"


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


@dataclass(eq=False, repr=False)
class UnitState:
    """One call of fully_shard."""

    modules: list  # weak references
    core: _C.Unit
    mesh: _C.Mesh
    device_mesh: object
    parameters: list
    mp_policy: object
    prefetch: int
    copies: bool
    policy: Policy = field(default_factory=Policy)
    grads: _C.GradViews = None
    root: object = None  # Root, once known
    id: int = -1
    name: str = ""
    initialized: bool = True  # False: parameters that were on meta have no values
    running: set = field(default_factory=set)  # modules of a list still to run

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
            _copy_attributes(p.whole, p.shard)
            _places[p.shard] = (weakref.ref(self), i)
            self.show(p, p.shard)
        self.parameters.sort(key=lambda p: p.index)
        self.grads = _C.GradViews(
            self.core,
            [p.shard for p in self.parameters],
            ShardedTensor.beside,
            ShardedTensor.rows_of,
        )
        storages = {
            p.shard._local_tensor.untyped_storage()._cdata for p in self.parameters
        }
        writes.storages |= storages
        mark_of_meta(
            {
                p.shard._local_tensor.untyped_storage()._cdata
                for p in self.parameters
                if p.on_meta
            },
            self,
        )
        weakref.finalize(self, writes.storages.difference_update, storages)

    def _wrap(self, p, local):
        cuts = self.core.cuts(p.index)
        mesh = self.device_mesh
        if not cuts:
            placements = [Replicate()] * mesh.ndim
        elif mesh.ndim == 1:
            placements = [RowShard(cuts, self.core.shard_of_ranks(p.index))]
        else:
            placements = [Replicate(), RowShard(cuts)]
        return ShardedTensor.wrap(local, mesh, placements, p.whole.shape)

    @staticmethod
    def show(p, tensor):
        for module, name in p.sites:
            module()._parameters[name] = tensor

    def adopt_replaced(self):
        """Takes the values of parameters that somebody put in place of a shard
        (`load_state_dict(assign=True)`), and puts the shard back."""
        for p in self.parameters:
            for module, name in p.sites:
                found = module()._parameters[name]
                if found is p.shard or found is p.whole or found is None:
                    continue
                if found.shape != p.shard.shape:
                    raise ValueError(
                        f"parameter {name} was replaced by one of shape "
                        f"{tuple(found.shape)}, expected {tuple(p.shard.shape)}"
                    )
                with torch.no_grad():
                    p.shard._local_tensor.copy_(p.shard.rows_of(found))
            self.show(p, p.shard)
        writes.count += 1

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
                    f"requires_grad of parameter {p.sites[0][1]} of unit {self.name} "
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
            "place before fully_shard, or name it in ignored_params"
        )
    if tensor.requires_grad and tensor.dtype not in _TRAINABLE:
        raise ValueError(
            f"parameter {name} is of type {tensor.dtype} and trainable; expected one of "
            f"{', '.join(map(str, _TRAINABLE))}. Freeze it (requires_grad_(False)), or "
            "name it in ignored_params"
        )


def whole_parameter(tensor):
    """What modules compute with instead of `tensor`; without memory."""
    whole = nn.Parameter(
        torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
        requires_grad=tensor.requires_grad,
    )
    _copy_attributes(tensor, whole)
    return whole


def mark_owner(tensor, name):
    setattr(tensor, _OWNER, name)


def former_name(tensor):
    """The name of the parameter that `tensor` was before fully_shard, or None."""
    return getattr(tensor, _OWNER, None)
