"""How a shard is shown to PyTorch: a DTensor that knows where it was cut.

A flat layout cuts a parameter between any two rows, so the ranks' pieces have
different lengths. ``RowShard`` says where the cuts are, and ``ShardedTensor`` keeps
saying it of every result.
"""

import functools

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from flatshard import row_functions
from flatshard.meta_shards import of_meta, where_it_is
from flatshard.row_functions import refuse
from flatshard.row_shard import RowShard
from flatshard.row_spec import RowSpec, from_local
from flatshard.unscale import unscale, unscale_gradients
from flatshard.writes import writes


_get_data = torch.Tensor.data.__get__
_set_data = torch.Tensor.data.__set__
_grad = torch.Tensor.grad


@functools.lru_cache(maxsize=None)
def _is_in_place(name):
    name = name.split(".")[0]  # of an OpOverload
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


class ShardedTensor(DTensor):
    """A DTensor of which mesh dimensions may be cut by a RowShard.

    What is computed from it row by row has the same cuts. What needs another
    view of the rows is gathered first by DTensor, or refused by name.
    """

    __slots__ = ()

    @staticmethod
    def wrap(local, mesh, placements, shape, requires_grad=False):
        """A view: writes to it are writes to `local`.

        Args:
            local: [rows of this rank, ...] tensor.
            shape: of the whole tensor.
        """
        is_cut = any(isinstance(p, RowShard) for p in placements)
        kind = RowSpec if is_cut else DTensorSpec
        tensor = from_local(local.detach(), mesh, placements, shape, kind)
        tensor.__class__ = ShardedTensor
        return tensor.requires_grad_(requires_grad)

    def beside(self, local):
        """`local`, cut as this one is and of the same dtype, as a tensor of its own
        without gradient. Cheap: nothing is checked."""
        tensor = DTensor.__new__(DTensor, local, self._spec, requires_grad=False)
        tensor.__class__ = ShardedTensor
        return tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function == _set_data:
            # It would replace the wrapper's data, which nobody reads.
            with torch.no_grad():
                args[0].copy_(args[1])
            return None
        kwargs = kwargs or {}
        name = function.__name__
        if of_meta and name == "__get__" and isinstance(args[0], ShardedTensor):
            place = where_it_is(args[0], function.__self__.__name__)
            if place is not None:
                return place
        if name == "__get__" or (name == "__set__" and args[1] is None):
            # zero_grad and optimizers do so with each parameter.
            if function.__self__ is _grad:
                with torch._C.DisableTorchFunctionSubclass():
                    result = function(*args)
                return _retag(result, function, args, kwargs)
        if name == "aminmax":
            return row_functions.aminmax(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if function is unscale:
                return unscale_gradients(*args)
            pieces = _pieces(function, args)
            if pieces is not None:
                result = function(*pieces, **kwargs)
                writes.note(args[0])
                return None if result is None else args[0]
            if name in _OF_NEW_VALUES:
                made = _new_values(function, *args, **kwargs)
                if made is not None:
                    return made
            if name in row_functions.VIEWS and row_functions.is_view(args):
                return row_functions.view(function, *args, **kwargs)
            args = row_functions.prepare(function, args, kwargs)
            args = _align(args)
            if "out" in kwargs:
                return _call_with_out(function, args, kwargs)
            try:
                result = function(*args, **kwargs)
            except RuntimeError as error:
                if "got mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise _used_outside(function, args, kwargs) from error
        if args and _is_in_place(name):
            writes.note(args[0])
        if isinstance(result, (bool, int, float, str, type(None), torch.Size)):
            return result
        return _retag(result, function, args, kwargs)

    def __deepcopy__(self, memo):
        copied = ShardedTensor.wrap(
            self._local_tensor.detach().clone(),
            self.device_mesh,
            list(self.placements),
            self.shape,
            self.requires_grad and self.is_leaf,
        )
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied.detach(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def redistribute(self, device_mesh=None, placements=None, **options):
        # RowShard equals Shard(0), so the way there leads over the whole tensor.
        if placements is not None and any(
            isinstance(p, Shard) and not isinstance(p, RowShard) for p in placements
        ):
            whole = [Replicate()] * self.device_mesh.ndim
            return (
                super()
                .redistribute(device_mesh, whole)
                .redistribute(device_mesh, placements, **options)
            )
        return super().redistribute(device_mesh, placements, **options)

    def to_local(self, **options):
        writes.note_look(self)
        return super().to_local(**options)

    def rows_of(self, tensor):
        """This rank's rows of `tensor`, plain or a DTensor, with as many rows.

        Collective when it is a DTensor.
        """
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        local = full.to(self._local_tensor.device)
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, RowShard):
                rank = self.device_mesh.get_local_rank(dim)
                local = placement.slice(local, rank)
        return local

    def like(self, tensor):
        """The DTensor `tensor`, with as many rows, cut as this one is. Collective."""
        return ShardedTensor.wrap(
            self.rows_of(tensor),
            self.device_mesh,
            list(self.placements),
            tensor.shape,
        )


# None of its own: DTensor's class has to be assignable to it. But whoever copies a
# tensor slot by slot (DCP's staging) asks the type for them.
ShardedTensor.__slots__ = DTensor.__slots__


def _call_with_out(function, args, kwargs):
    """DTensor gives `out` the placements that it worked out, without the cuts."""
    out = kwargs["out"]
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    first = next((a for a in args if isinstance(a, DTensor)), None)
    for tensor in outs:
        if tensor.placements != getattr(first, "placements", tensor.placements):
            refuse(function)
    specs = [tensor._spec for tensor in outs]
    function(*args, **kwargs)
    for tensor, spec in zip(outs, specs):
        tensor._spec = spec
        writes.note(tensor)
    return out


def _align(args):
    """Arguments of one operation that are cut differently, cut alike.

    Rank by rank, rows of one would meet other rows of the other. The first DTensor
    decides; of lists (foreach) the first of each position.
    """
    if len(args) < 2:
        return args
    first = args[0]
    if isinstance(first, DTensor):
        return tuple([first] + [_align_to(first, value) for value in args[1:]])
    if isinstance(first, (list, tuple)):
        return tuple(
            [first]
            + [
                [_align_to(a, b) for a, b in zip(first, value)]
                if isinstance(value, (list, tuple)) and len(value) == len(first)
                else value
                for value in args[1:]
            ]
        )
    tensors = [value for value in args if isinstance(value, DTensor)]
    if len(tensors) < 2:
        return args
    return tuple(_align_to(tensors[0], value) for value in args)


def _align_to(reference, value):
    if not isinstance(value, DTensor) or not isinstance(reference, DTensor):
        return value
    cuts = isinstance(reference, ShardedTensor), isinstance(value, ShardedTensor)
    same_rows = (
        value.dim() == reference.dim()
        and value.dim() > 0
        and value.shape[0] == reference.shape[0]
    )
    if not any(cuts) or not same_rows:
        return value
    if all(cuts) and value.placements == reference.placements:
        return value
    if cuts[0]:
        return reference.like(value)
    mesh = value.device_mesh
    full = from_local(
        value.full_tensor(), mesh, [Replicate()] * mesh.ndim, value.shape
    )
    return full.redistribute(reference.device_mesh, reference.placements)


@functools.lru_cache(maxsize=None)
def _updates_lists(function):
    """foreach in place, or fused: what torch's optimizers call. Element by element."""
    name = function.__name__.split(".")[0]
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_")


def _pieces(function, args):
    """The arguments' local tensors, for a function to whose result they suffice; None
    for another one. DTensor's own way costs the host ten times as much, and remembers
    every scalar that it ever saw."""
    if not _updates_lists(function) or torch.is_grad_enabled():
        return None
    first = args[0]
    if not all(isinstance(tensor, ShardedTensor) for tensor in first):
        return None
    pieces = [[tensor._local_tensor for tensor in first]]
    for value in args[1:]:
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            value = [_piece_beside(a, b) for a, b in zip(first, value)]
            if any(piece is None for piece in value):
                return None
        elif isinstance(value, torch.Tensor):
            value = _piece_beside(None, value)
            if value is None:
                return None
        pieces.append(value)
    return pieces


def _piece_beside(reference, value):
    """What meets the local tensor of `reference`; None when that is not clear."""
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor):
        return value if value.dim() == 0 else None
    if value.dim() == 0:
        whole = all(placement.is_replicate() for placement in value.placements)
        return value._local_tensor if whole else None
    if reference is None or not isinstance(value, ShardedTensor):
        return None
    a, b = value._spec, reference._spec
    same = a is b or (
        a.placements == b.placements
        and a.mesh == b.mesh
        and value._local_tensor.shape == reference._local_tensor.shape
    )
    return value._local_tensor if same else None


_OF_NEW_VALUES = ("new_empty", "new_zeros", "new_ones", "new_full")


def _new_values(function, source, size=(), *args, **kwargs):
    """Of a shard's own shape: its rows, with other values. None for other shapes, of
    which DTensor makes what it can."""
    if not isinstance(source, ShardedTensor) or not isinstance(size, (tuple, list)):
        return None
    if tuple(size) != tuple(source.shape):
        return None
    requires_grad = kwargs.pop("requires_grad", False)
    local = source._local_tensor
    return ShardedTensor.wrap(
        function(local, local.shape, *args, **kwargs),
        source.device_mesh,
        source.placements,
        source.shape,
        requires_grad,
    )


def _cuts_of(value, found):
    """The ShardedTensors inside arguments."""
    if isinstance(value, ShardedTensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _cuts_of(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _cuts_of(item, found)
    return found


def _retag(result, function, args, kwargs):
    if isinstance(result, (list, tuple)):
        kind = type(result)
        # Of foreach, the i-th result comes from the i-th arguments.
        items = [
            _retag(item, function, _position(args, i, len(result)), kwargs)
            for i, item in enumerate(result)
        ]
        # A collections.namedtuple takes its items one by one.
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if not isinstance(result, DTensor) or isinstance(result, ShardedTensor):
        return result
    sources = _cuts_of((args, kwargs), [])
    if not sources:
        return result  # they were cut like a plain DTensor
    spec = result._spec
    placements = list(spec.placements)
    for dim, placement in enumerate(placements):
        if isinstance(placement, RowShard):
            continue
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            refuse(function)
        if isinstance(placement, Shard):
            placements[dim] = _same_rows(result, sources, dim) or refuse(function)
    if any(isinstance(p, RowShard) for p in placements):
        result._spec = RowSpec.of(spec, placements)
    result.__class__ = ShardedTensor
    return result


def _position(args, i, length):
    return [
        a[i] if isinstance(a, (list, tuple)) and len(a) == length else a for a in args
    ]


def _same_rows(result, sources, dim):
    """The cuts of a source whose rows are the result's."""
    rows = result.shape[0] if result.dim() else None
    for source in sources:
        placement = source.placements[dim]
        if (
            isinstance(placement, RowShard)
            and source.shape[0] == rows
            and result._local_tensor.shape[0] == source._local_tensor.shape[0]
            and source.device_mesh == result.device_mesh
        ):
            return placement
    return None


def _used_outside(function, args, kwargs):
    """The error of a module that computes with a parameter that is not gathered."""
    from flatshard.unit import unit_of  # which imports this module

    shards = _cuts_of((args, kwargs), [])
    place = next((place for s in shards if (place := unit_of(s))), None)
    what, unit = "a sharded tensor", "its unit"
    if place is not None:
        state, index = place
        p = state.parameters[index]
        what = f"parameter {p.title}"
        if p.sites and p.sites[0][0]() is not None:
            what += f" of {type(p.sites[0][0]()).__name__}"
        unit = f"unit {state.name}" if state.name else "its unit"
    return RuntimeError(
        f"{function.__name__}: {what} meets plain tensors as a shard, outside of the "
        f"forward of {unit}. Call the module that fully_shard wrapped, not one inside "
        "it; name other methods with register_fsdp_forward_method(module, name); or "
        "call unshard() of the unit first"
    )


def become(tensor, data):
    """`tensor`, a leaf without gradient, is from now on what `data` is, a DTensor of the
    same shape: cut and of the dtype as that one. It stays the same object."""
    if tensor.dtype != data.dtype:
        with torch._C.DisableTorchFunctionSubclass():
            _set_data(tensor, data)
    tensor._local_tensor, tensor._spec = data._local_tensor, data._spec


def with_local(tensor, local):
    """`local`, of another dtype perhaps, as a DTensor that is cut as `tensor`."""
    return ShardedTensor.wrap(
        local, tensor.device_mesh, list(tensor.placements), tensor.shape
    )
