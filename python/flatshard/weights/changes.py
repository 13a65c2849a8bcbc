"""The elements of a model's weights that changed since they were sent."""

from typing import NamedTuple

import torch
from torch import nn

from flatshard import _C
from flatshard._fsdp.forward import without_compile
from flatshard.weights.source import Options, Stream, plan_of


class Patch(NamedTuple):
    """The changed elements of one tensor.

    Attributes:
        name: of the tensor in the Hugging Face folder.
        indices: int32 [n], strictly increasing, in the flattened tensor; int64 for a
            tensor of 2^31 elements.
        values: [n], the new ones.
        full_shape: of the tensor.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    full_shape: tuple


class Changes:
    """The changes of a model's weights; see `flatshard.weights.changed`."""

    def __init__(self, model: nn.Module, options: Options):
        options.check()
        self._model, self._options = without_compile(model), options
        self._plan = plan_of(self._model, options)
        self._core = _C.ChangedWeights(self._plan.cores, options.dtype, self._plan.mesh)
        self._outside = self._outside_units()
        self._is_open = False

    def __iter__(self):
        return Stream(self._all_patches())

    def _all_patches(self):
        plan = plan_of(self._model, self._options, self._plan)
        if plan is not self._plan:
            raise RuntimeError(
                "flatshard.weights.changed: requires_grad, dtype or device of a parameter "
                "or the shape of a buffer was changed; send all weights, and call "
                "changed() again"
            )
        if self._is_open:
            raise RuntimeError(
                "flatshard.weights.changed: an earlier iteration is still open, or "
                "failed; end it, or send all weights and call changed() again"
            )
        self._is_open = True
        outside = self._outside_units()
        try:
            for name, tensor in outside.items():
                yield from self._patches(name, *_changed(self._outside[name], tensor))
            while (parameters := self._core.next()) is not None:
                for parameter in parameters:
                    yield from self._patches(*parameter)
        except GeneratorExit:
            while self._core.next() is not None:  # with the other ranks
                pass
            self._core.finish(sent=False)
            self._is_open = False
            raise
        if self._core.finish(sent=True):
            self._outside = outside
        self._is_open = False

    def _outside_units(self):
        return {name: t.clone() for name, t in self._plan.outside_units()}

    def _patches(self, name, stored, indices, values):
        if dim := self._plan.dims.get(name, 0):
            indices, values = _moved(stored, dim, indices.long(), values)
        entries = self._plan.names.of(name)
        if len(entries) == 1:
            if len(indices):
                yield _patch(entries[0], indices, values)
            return
        # The patch of an entry is a run of the parameter's changes.
        ends = torch.tensor([e.first + e.numel for e in entries], dtype=indices.dtype)
        borders = torch.searchsorted(indices, ends.to(indices.device)).tolist()
        for entry, begin, end in zip(entries, [0, *borders], borders):
            if begin < end:
                own = indices[begin:end] - entry.first
                yield _patch(entry, own, values[begin:end])


def _patch(entry, indices, values):
    narrow = torch.int32 if entry.numel < 1 << 31 else torch.int64
    return Patch(entry.name, indices.to(narrow), values, entry.shape)


def _changed(before, now):
    """Returns the shape of a tensor, and indices and values of the elements of which the
    bits have changed."""
    bits = [t.reshape(-1, 1).view(torch.uint8) for t in (before, now)]
    indices = (bits[0] != bits[1]).any(1).nonzero().view(-1)
    return now.shape, indices, now.reshape(-1)[indices]


def _moved(stored, dim, indices, values):
    """Returns indices and values in the order of the parameter of which dimension `dim` is
    the first one of the shape `stored`."""
    rows = 1
    for size in stored[1 : dim + 1]:
        rows *= size
    columns = 1
    for size in stored[dim + 1 :]:
        columns *= size
    width = stored[0]
    # [width, rows, columns] becomes [rows, width, columns].
    column = indices % columns
    row = indices // columns % rows
    moved = (row * width + indices // (columns * rows)) * columns + column
    moved, order = moved.sort()
    return moved, values[order]
