"""Functions of a shard whose rows DTensor would take for those of equal pieces, or
that have no result on a rank without rows.

Every rank decides alike, by shapes and cuts that all of them know: a function that
failed on one rank only would leave the others in a collective.
"""

import torch
from torch.distributed.tensor import DTensor

from flatshard.row_shard import RowShard

VIEWS = {
    "view",
    "view_as",
    "reshape",
    "reshape_as",
    "flatten",
    "ravel",
    "unflatten",
    "squeeze",
    "unsqueeze",
}


def name_of(function):
    """Also of a property, whose function is called `__get__`."""
    name = getattr(function, "__name__", str(function))
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


def refuse(function):
    raise NotImplementedError(
        f"{name_of(function)} of a sharded parameter: its rows are not cut in equal "
        f"pieces, and this result would be wrong. Take full_tensor() or to_local() first"
    )


def is_cut(tensor):
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, RowShard) for placement in tensor.placements
    )


def prepare(function, args, kwargs):
    """Arguments that DTensor does the function right with.

    Raises:
        NotImplementedError: it cannot.
    """
    name = function.__name__
    if name in _NEUTRAL:
        if name in ("argmax", "argmin") and _dims_of(name, args, kwargs) is None:
            refuse(function)  # the index of an element in the flat tensor
        return _with_neutral_row(name, args, kwargs)
    if name in ("quantile", "nanquantile") and is_cut(args[0]):
        refuse(function)  # it views its input
    return args


# -- views ---------------------------------------------------------------------------


def is_view(args):
    """Not of the bytes: `view(dtype)`."""
    return is_cut(args[0]) and not (len(args) > 1 and isinstance(args[1], torch.dtype))


def view(function, source, *args, **kwargs):
    """The view, when each row of it is a row of `source`.

    Raises:
        NotImplementedError: another view.
    """
    like = [_on_meta(a) for a in args]
    kwargs = {key: _on_meta(a) for key, a in kwargs.items()}
    shape = function(_on_meta(source), *like, **kwargs).shape
    if not shape or shape[0] != source.shape[0]:
        refuse(function)
    return _RowView.apply(source, shape)


def _on_meta(value):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


class _RowView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source, shape):
        ctx.source = source
        return _with_shape(source, shape)

    @staticmethod
    def backward(ctx, grad):
        source = ctx.source
        if any(placement.is_shard() for placement in grad.placements):
            rows = grad._local_tensor  # cut as the view was: by the operations on it
        else:
            rows = source.rows_of(grad)
        return source.beside(rows.reshape(source._local_tensor.shape)), None


def _with_shape(source, shape):
    local = source._local_tensor
    return source.wrap(
        local.view(local.shape[0], *shape[1:]),
        source.device_mesh,
        list(source.placements),
        shape,
    )


# -- reductions that have no result without elements ----------------------------------


def _lowest(dtype):
    if dtype.is_floating_point:
        return -torch.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _highest(dtype):
    if dtype.is_floating_point:
        return torch.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _of_norm(dtype, order=2, *_):
    if not isinstance(order, (int, float)) or 0 <= order < torch.inf:
        return None
    return 0.0 if order > 0 else torch.inf


_NEUTRAL = {
    "max": _lowest,
    "amax": _lowest,
    "_foreach_max": _lowest,
    "argmax": _lowest,
    "min": _highest,
    "argmin": _highest,
    "amin": _highest,
    "norm": _of_norm,
    "linalg_norm": _of_norm,
    "linalg_vector_norm": _of_norm,
    "_foreach_norm": _of_norm,
}


def _with_neutral_row(name, args, kwargs):
    """The arguments, those without rows on this rank with one that changes nothing."""
    order = [kwargs[k] for k in ("p", "ord") if k in kwargs] or args[1:2]
    if any(isinstance(a, torch.Tensor) for a in args[1:]):
        return args  # max and min, element by element
    first = args[0]
    several = isinstance(first, (list, tuple))

    def filled(tensor):
        if not is_cut(tensor) or tensor._local_tensor.shape[0] > 0:
            return tensor
        value = _NEUTRAL[name](tensor.dtype, *(order if "norm" in name else ()))
        if value is None or not _over_rows(name, tensor, args, kwargs):
            return tensor
        return _NeutralRow.apply(tensor, value)

    first = [filled(tensor) for tensor in first] if several else filled(first)
    return (first, *args[1:])


def _over_rows(name, tensor, args, kwargs):
    dim = _dims_of(name, args, kwargs)
    if dim is None or name.startswith("_foreach"):
        return True
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return any(d % tensor.dim() == 0 for d in dims)


def _dims_of(name, args, kwargs):
    """None: all."""
    position = 2 if "norm" in name else 1
    dim = kwargs.get("dim", args[position] if len(args) > position else None)
    return None if dim in ((), []) else dim


class _NeutralRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, value):
        ctx.tensor = tensor
        local = tensor._local_tensor
        return tensor.beside(local.new_full((1, *local.shape[1:]), value))

    @staticmethod
    def backward(ctx, grad):
        return ctx.tensor.beside(torch.zeros_like(ctx.tensor._local_tensor)), None


def aminmax(tensor, *, dim=None, keepdim=False):
    """torch.aminmax: no one row is neutral for both."""
    dims = () if dim is None else (dim,)
    return torch.return_types.aminmax(
        (tensor.amin(dims, keepdim), tensor.amax(dims, keepdim))
    )
