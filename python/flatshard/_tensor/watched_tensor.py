"""The common part of the two kinds of shards: ShardedTensor and EvenShard."""

import copy
import inspect
import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard._tensor.reported_collectives import reported
from flatshard._tensor.shard_gradients import cut_as
from flatshard._tensor.shard_values import base_of
from flatshard.torch_versions import has_dispatch_mode, plain_attributes

_set_data = inspect.getattr_static(torch.Tensor, "data").__set__
_grad = inspect.getattr_static(torch.Tensor, "grad")
_get_grad, _set_grad = _grad.__get__, _grad.__set__
# The place of a shard without values. torch cannot move a tensor to or from meta, so the
# wrapper stays where the values will be.
_ON_META = {
    "device": torch.device("meta"),
    "is_meta": True,
    "is_cpu": False,
    "is_cuda": False,
}
# Calls a function as if the tensors were of no subclass.
_plainly = DTensor.__torch_function__


def _is_asked_by_torch():
    """Returns whether torch called the function that calls this one."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] == "torch"


def refuse_joint_hook(hook):
    """Refuses a hook that counts which of several tensors the engine will reach: a shard is
    not part of autograd's graph."""
    name = getattr(hook, "__qualname__", "")
    if name.startswith("register_multi_grad_hook.") and "inner_hook" in name:
        raise NotImplementedError(
            "register_multi_grad_hook(mode='all') is not supported for sharded "
            "parameters, because their gradients arrive when their units are reduced: use "
            "mode='any', register_post_accumulate_grad_hook, or code after backward()"
        )


def refuse_to_share():
    raise NotImplementedError(
        "sharded parameters in shared memory (share_memory_) are not supported, because "
        "their unit owns the memory; share a copy, parameter.to_local().clone()"
    )


class WatchedTensor(DTensor):
    """A DTensor over memory of the core.

    A kind has `_compute(function, name, args, kwargs)`, the functions of torch, and
    `over(local)`, a tensor over `local`, of another dtype perhaps, that is sharded as
    this one.
    """

    __slots__ = ()

    # Optimizers and zero_grad() ask these of each parameter in each step.
    # __torch_function__ is ten times slower.

    is_sparse = False

    # Libraries find a parameter again, and parameters that share memory, by its address.
    # The address of a DTensor is 0. By this, torch recognizes a tensor that it has to
    # pickle and to stage by its parts.

    def data_ptr(self):
        if _is_asked_by_torch():
            return super().data_ptr()
        local = base_of(self)._local_tensor
        return local.data_ptr() or local.untyped_storage().data_ptr()

    def untyped_storage(self):
        if _is_asked_by_torch():
            return super().untyped_storage()
        return base_of(self)._local_tensor.untyped_storage()

    def to(self, *args, **kwargs):
        # torch's clipping asks it of each norm.
        if len(args) == 1 and not kwargs and type(args[0]) is torch.device:
            if args[0] == self._local_tensor.device:
                return self
        return super().to(*args, **kwargs)

    def share_memory_(self):
        refuse_to_share()

    @property
    def grad(self):
        found = _plainly(_get_grad, (), (self,))
        if found is None or getattr(found, "_spec", None) is self._spec:
            return found
        with plain_attributes():
            return cut_as(self, found)

    @grad.setter
    def grad(self, value):
        if value is None:
            _plainly(_set_grad, (), (self, None))
            return
        if type(value) is not type(self):
            self._check_gradient(value)
        _set_grad(self, value)

    @grad.deleter
    def grad(self):
        _plainly(_set_grad, (), (self, None))

    def _check_gradient(self, value):
        """Refuses a plain tensor in `.grad`, because a backward adds into this tensor."""
        if isinstance(value, DTensor):
            self._note_cuts(value)
        elif (
            isinstance(value, torch.Tensor)
            and value.shape == self.shape
            and any(placement.is_shard() for placement in self._spec.placements)
        ):
            raise ValueError(
                "grad: expected a DTensor that is sharded as its parameter, so that "
                "backward() can add to it, such as torch.zeros_like(parameter), got a plain "
                f"{type(value).__name__}. distribute_tensor(value, parameter.device_mesh, "
                "[Shard(0)]) makes one"
            )

    def _note_cuts(self, tensor):
        """Sets the class of a DTensor that torch may have made with this one's
        placements."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.is_complex:  # as above
            return _plainly(function, types, args, kwargs or {})
        if function == _set_data:
            # It would replace the wrapper's data, and no operation reads that.
            with torch.no_grad():
                args[0].copy_(args[1])
            return None
        name = function.__name__
        if name == "register_hook":
            refuse_joint_hook(args[1])
        if name == "__get__" and function.__self__.__name__ in _ON_META:
            known = isinstance(args[0], WatchedTensor)
            if known and base_of(args[0])._local_tensor.is_meta:
                return _ON_META[function.__self__.__name__]
        with plain_attributes():
            if has_dispatch_mode():
                return reported(cls._compute, function, name, args, kwargs or {})
            return cls._compute(function, name, args, kwargs or {})

    def __deepcopy__(self, memo):
        """Copies this rank's piece, the gradient and the attributes, as torch does. The
        copy belongs to no unit."""
        is_trained = self.requires_grad and self.is_leaf
        copied = self.over(self._local_tensor.detach().clone())
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, is_trained)
        else:
            copied.requires_grad_(is_trained)
        memo[id(self)] = copied
        if self.is_leaf and self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        for name, value in vars(self).items():
            if name not in ("base", "frame"):  # of a view, which the copy is not
                setattr(copied, name, copy.deepcopy(value, memo))
        return copied
