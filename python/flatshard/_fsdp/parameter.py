"""One parameter of a unit, and what its shard copies from the user's tensor.

A parameter has two faces. The shard is an `nn.Parameter` over a DTensor: what
`parameters()`, optimizers and checkpoints see. The unsharded one is a plain `nn.Parameter`
without memory. The core points it at all-gathered memory while the unit computes, and
swaps them in the modules' `_parameters`.
"""

import weakref
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard._fsdp.former import OWNER
from flatshard._tensor.memory import local_of
from flatshard._tensor.pieces import piece_of
from flatshard._tensor.watched_tensor import refuse_joint_hook
from flatshard.torch_versions import (
    parameters_of,
    set_hooks_of_tensor,
)

# The Parameter of each tensor that modules show from a forward to its backward, by id.
_of_whole: weakref.WeakValueDictionary[int, "Parameter"] = weakref.WeakValueDictionary()

# Kinds of parameters. The core has separate groups for them. GATHERED: what a subclass of
# a tensor returns for the all-gather. FROZEN_LATER: after fully_shard, as peft's
# disable_adapter does.
TRAINED, FROZEN, GATHERED, FROZEN_LATER = range(4)


@dataclass
class Parameter:
    """One parameter of a unit."""

    sites: list  # (module, name) of every place in the unit, the first is main
    whole: nn.Parameter
    shard: nn.Parameter | None = None
    dim: int = 0  # that is cut; the core stores it first
    granularity: str = "dim0"  # of the core, for that dimension
    index: int = -1  # in the core's unit
    names: list = field(default_factory=list)  # in the model, once that is known
    trainable: bool = True  # the core has gradients for it
    apart: int = 0  # TRAINED and so on: different numbers share no group
    dtype: torch.dtype | None = None  # of the user's tensor, see make_core
    param_dtype: torch.dtype | None = None  # that is gathered; None: its own
    on_meta: bool = False  # it has no values yet
    # The core's shard of a parameter on meta, while `shard` shows one without memory.
    rows: DTensor | None = None
    digest: torch.Tensor | None = None  # of the values, see same_values.py
    label: str = ""  # its name below the modules given to fully_shard
    float8: bool = False
    why_not_float8: str = ""
    shared_by: object = None  # the DeviceMesh of ranks with equal values; None: all
    hooks: dict = field(default_factory=dict)  # of the user
    former: object = None  # a weak reference to the user's tensor, see former.py
    shown_dtype: torch.dtype | None = None  # of the shard, as the core made it
    extension: object = None  # of a subclass: its Extension, see extension.py
    parallel: object = (
        None  # of a DTensor: its TensorParallel, see _tensor/tensor_parallel.py
    )

    @property
    def title(self):
        """Returns the name for messages."""
        return self.sites[0][1] if self.sites else self.label

    def is_embedding(self):
        """Returns whether it is the weight of an embedding, possibly tied."""
        return any(
            name == "weight" and isinstance(m, (nn.Embedding, nn.EmbeddingBag))
            for module, name in self.sites
            if (m := module()) is not None
        )

    def fits(self, keeps_rows):
        """Returns whether the core can train it as it is now: with its dtype, and with
        gradients where it is not frozen. Unless the unit keeps its rows, one that was
        frozen is to have no gradients."""
        is_trained = self.shard.requires_grad
        fits = is_trained == self.trainable or (keeps_rows and not is_trained)
        return fits and self.has_dtype()

    def has_dtype(self):
        """Returns whether the dtype of the shard is unchanged since the core has it."""
        return self.shard.dtype == self.shown_dtype

    def stored(self, value):
        """Returns `value` of the unsharded parameter as the core stores it."""
        return value.movedim(self.dim, 0).contiguous() if self.dim else value

    @property
    def stored_shard(self):
        """Returns the DTensor over the core's memory."""
        return self.shard if self.rows is None else self.rows

    @torch.no_grad()
    def write(self, tensor):
        """Writes this rank's piece of `tensor`, plain or a DTensor, to the shard.
        Collective when the tensor has other placements."""
        shard = self.stored_shard
        local_of(shard).copy_(piece_of(shard, tensor))

    @property
    def shown(self):
        """Returns the holder of the tensor that modules see in place of `whole`; None:
        they see `whole`. So does an FP8 layer, because it does not read its weight."""
        return self.extension or (None if self.float8 else self.parallel)

    def is_shown(self):
        """Returns whether some module has it."""
        shown = [
            parameters_of(m).get(n) for r, n in self.sites if (m := r()) is not None
        ]
        return any(self.is_face(tensor) for tensor in shown)

    def faces(self):
        """Returns the tensor that modules show, sharded or unsharded."""
        shown = self.extension.tensor if self.extension else None
        if self.parallel is not None:
            shown = self.parallel.made
        return [t for t in (self.shard, self.whole, shown) if t is not None]

    def is_face(self, tensor):
        return any(tensor is face for face in self.faces())


def copy_attributes(source, target):
    for name, value in vars(source).items():
        if name != OWNER and not isinstance(value, _OfShard):
            setattr(target, name, value)


def plain_like(tensor, is_subclass):
    """Returns the object with the attributes of the user's tensor, for a subclass its
    own."""
    return nn.Parameter(torch.empty(0, device="meta")) if is_subclass else tensor


def whole_parameter(shape, dtype, requires_grad, dim, former):
    """Returns the tensor that modules compute with; without memory.

    Args:
        dim: that is stored first.
        former: the one before, from which attributes are copied.
    """
    stored = [shape[dim], *shape[:dim], *shape[dim + 1 :]] if dim else shape
    memory = torch.empty(stored, dtype=dtype, device="meta").movedim(0, dim)
    whole = nn.Parameter(memory, requires_grad)
    copy_attributes(former, whole)
    return whole


def put_hooks(p):
    """Puts the hooks that the parameter had before it was sharded on its shard. They run
    on the reduced gradient."""
    for hooks in p.hooks.values():
        for hook in hooks.values():
            refuse_joint_hook(hook)
    if p.shard.requires_grad:
        set_hooks_of_tensor(p.shard, p.hooks)


class _OfShard:
    """A DTensor's method that an unsharded parameter has, too: programs that read
    parameters work the same before and after the forward."""

    def __init__(self, p, function):
        self._p = weakref.ref(p)
        self._function = function

    def __call__(self):
        return self._function(self._p())


def note_whole(p):
    """Notes a tensor that modules may show instead of the shard, for
    parameter_of_whole."""
    for tensor in p.faces():
        if tensor is not p.shard:
            _of_whole[id(tensor)] = p
    p.whole.full_tensor = _OfShard(p, lambda p: p.whole)
    p.whole.to_local = _OfShard(p, lambda p: p.shard.to_local())


def parameter_of_whole(tensor):
    """Returns the Parameter whose unsharded values `tensor` has, or None."""
    p = _of_whole.get(id(tensor))
    is_whole = p is not None and p.is_face(tensor) and tensor is not p.shard
    return p if is_whole else None


def subclass_of(tensor):
    """Returns the subclass of a tensor, or of a DTensor's local tensor; "" for plain
    ones."""
    if isinstance(tensor, DTensor):
        tensor = local_of(tensor)
    plain = (torch.Tensor, nn.Parameter)
    is_other = isinstance(tensor, torch.Tensor) and type(tensor) not in plain
    return type(tensor).__name__ if is_other else ""
