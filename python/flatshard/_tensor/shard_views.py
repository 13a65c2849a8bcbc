"""Views of sharded tensors.

A view whose rows are rows of its source is a shard over the same memory. For another
view (a transposed matrix, a flat vector, one row) no rank has its part: it is a
``ShardedView``, and its values are computed from its source when they are used.
"""

import torch
from torch.distributed.tensor import DTensor, Replicate

# Inside, an operation changes sizes and strides of a tensor without its dispatch.
from torch.utils._mode_utils import no_dispatch

from flatshard._tensor.row_spec import dtensor, make_spec
from flatshard._tensor.shard_calls import on_whole, traits_of
from flatshard._tensor.shard_values import Values, is_cut, row_dim
from flatshard._tensor.sharded_tensor import ShardedTensor


class ShardedView(ShardedTensor):
    """A tensor that every rank can compute in full from a shard, `base`.

    Attributes:
        base: a ShardedTensor with a RowShard.
        frame: size, stride and offset of the view in the full `base`.
    """

    __slots__ = ()

    @property
    def _local_tensor(self):
        # Collective: it is how others read it, such as repr and to_local.
        return Values("reading a view", self.device_mesh).of(self)

    def data_ptr(self):
        # Nothing is all-gathered: libraries compare addresses of the last elements, and all
        # ranks have to find the same tensors that share memory.
        address = super().data_ptr()
        has_rows = self.base._local_tensor.numel() > 0
        return address + (self.frame[2] * self.element_size() if has_rows else 0)

    def __repr__(self):
        # A single rank may print it, so it has no values.
        mesh, placements = self.base.device_mesh, self.base.placements
        size = tuple(self.shape)
        return f"ShardedView(size={size}, device_mesh={mesh}, base={placements})"

    @staticmethod
    def of(base, size, stride, offset):
        mesh = base._spec.mesh
        placements = (Replicate(),) * mesh.ndim
        spec = make_spec(mesh, placements, size, stride, base.dtype)
        nothing = base._local_tensor.new_empty(0)
        view = dtensor(nothing, spec)
        view.__class__ = ShardedView
        view.base = base
        view.frame = tuple(size), tuple(stride), offset
        return view


setattr(ShardedView, "__slots__", DTensor.__slots__)


def view(func, traits, args, kwargs):
    """Runs operations that return views."""
    source = args[0]
    if isinstance(source, ShardedView):
        base, frame = source.base, source.frame
    elif isinstance(source, ShardedTensor) and is_cut(source):
        base, frame = source, (source.shape, source.stride(), 0)
    else:
        return NotImplemented
    if base.numel() == 0:
        return NotImplemented
    memory = torch.empty_strided(
        base.shape, base.stride(), dtype=base.dtype, device="meta"
    )
    others = [_on_meta(a) for a in args[1:]]  # of view_as
    seen = func(memory.as_strided(*frame), *others, **kwargs)
    # On meta all addresses of memory are 0.
    storage = memory.untyped_storage()._cdata
    several = isinstance(seen, (list, tuple))
    views = list(seen) if several else [seen]
    if any(v.untyped_storage()._cdata != storage for v in views):
        return NotImplemented  # a copy
    if any(v.dtype != base.dtype or v.is_conj() or v.is_neg() for v in views):
        return _of_other_elements(func, source, args, kwargs)
    # In inference mode, too, a view of a tensor that is not of it is not of it.
    with torch.inference_mode(source.is_inference()):
        views = [_view(base, v.shape, v.stride(), v.storage_offset()) for v in views]
    return type(seen)(views) if several else views[0]


def _on_meta(value):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _view(base, size, stride, offset):
    if 0 in size:
        mesh = base._spec.mesh
        local = base._local_tensor.new_empty_strided(tuple(size), stride)
        return ShardedTensor.wrap(local, mesh, [Replicate()] * mesh.ndim, size)
    width = base.stride(0)  # of a row
    first, inner = divmod(offset, width) if width else (0, 0)
    last = offset + sum((n - 1) * s for n, s in zip(size, stride))
    if size and stride[0] == width and width:
        extent = inner + sum((n - 1) * s for n, s in zip(size[1:], stride[1:]))
        if extent < width:
            return _window(base, first, size, stride, inner)
    if width and base.dim() and _rows_are_dense(base):
        # One row, or some: the others need not be all-gathered.
        rows = last // width - first + 1
        shape, strides = (rows, *base.shape[1:]), base.stride()
        base = _window(base, first, shape, strides, 0)
        offset = inner
    return ShardedView.of(base, size, stride, offset)


def _rows_are_dense(base):
    extent = sum((n - 1) * s for n, s in zip(base.shape[1:], base.stride()[1:]))
    return extent < base.stride(0)


def _window(base, first, size, stride, inner):
    """Returns rows of `base` from `first` on, in the shape `size`, as a view of the
    shard."""
    dim = row_dim(base)
    mesh = base._spec.mesh
    placement = base._spec.placements[dim]
    rank = mesh.get_local_rank(dim)
    window = placement.window(first, size[0])
    if window == placement:
        window = placement
    local = base._local_tensor
    skipped = max(0, first - placement.span(rank)[0]) * base.stride(0)
    rows = local.as_strided(
        (window.rows(rank), *size[1:]),
        tuple(stride),
        local.storage_offset() + (skipped + inner if window.rows(rank) else 0),
    )
    placements = list(base._spec.placements)
    placements[dim] = window
    return ShardedTensor.of_rows(rows, mesh, placements, size, stride)


def _of_other_elements(func, source, args, kwargs):
    """Returns a view of the bytes, real parts or conjugates, within each row."""
    if (
        isinstance(source, ShardedView)
        or source.dim() < 2
        and func.name()
        not in (
            "aten::_conj",
            "aten::_neg_view",
        )
    ):
        return NotImplemented
    local = func(source._local_tensor, *args[1:], **kwargs)
    whole = func(
        torch.empty_strided(
            source.shape, source.stride(), dtype=source.dtype, device="meta"
        ),
        *args[1:],
        **kwargs,
    )
    if local.shape[0] != source._local_tensor.shape[0]:
        return NotImplemented
    return ShardedTensor.of_rows(
        local,
        source._spec.mesh,
        source._spec.placements,
        whole.shape,
        whole.stride(),
    )


def same(func, traits, args, kwargs):
    source = args[0]
    if isinstance(source, ShardedView):
        return ShardedView.of(source.base, *source.frame)
    return ShardedTensor.like_spec(func(source._local_tensor), source._spec)


def turn(func, traits, args, kwargs):
    """Operations in place that change the shape (t_, squeeze_): the tensor becomes the
    view."""
    target = args[0]
    overload = "int" if traits.name == "transpose_" else traits.overload or "default"
    out_of_place = getattr(getattr(torch.ops.aten, traits.name[:-1]), overload)
    found = view(out_of_place, traits_of(out_of_place), args, kwargs)
    if found is NotImplemented:
        found = on_whole(out_of_place, traits_of(out_of_place), args, kwargs)
    with no_dispatch():
        func(*args, **kwargs)  # sizes and strides
    target.become(found)
    return target
