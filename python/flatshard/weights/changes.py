"""The elements of a model's weights that changed since they were sent."""

from typing import NamedTuple

import torch
from torch import nn

from flatshard import _C
from flatshard.weights.source import Options, plan_of


class Patch(NamedTuple):
    """The changed elements of one tensor.

    Attributes:
        name: of the tensor in the Hugging Face folder.
        indices: int32 [n], strictly increasing, in the flattened tensor.
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
        self._model, self._options = model, options
        self._plan = plan_of(model, options)
        self._core = _C.ChangedWeights(self._plan.cores, options.dtype, self._plan.mesh)

    def __iter__(self):
        plan = plan_of(self._model, self._options, self._plan)
        if plan is not self._plan:
            raise RuntimeError(
                "flatshard.weights.changed: the dtype of a parameter was changed, or "
                "parameters were moved; send all weights, and call changed() again"
            )
        try:
            while (parameters := self._core.next()) is not None:
                for parameter in parameters:
                    yield from self._patches(*parameter)
        except GeneratorExit:
            while self._core.next() is not None:  # with the other ranks
                pass
            self._core.finish(sent=False)
            raise
        self._core.finish(sent=True)

    def _patches(self, name, stored, indices, values):
        if dim := self._plan.dims[name]:
            indices, values = _moved(stored, dim, indices.long(), values)
        entries = self._plan.names.of(name)
        if len(entries) == 1:
            yield Patch(entries[0].name, indices.int(), values, entries[0].shape)
            return
        # The patch of an entry is a run of the parameter's changes.
        ends = torch.tensor([e.first + e.numel for e in entries], dtype=indices.dtype)
        borders = torch.searchsorted(indices, ends.to(indices.device)).tolist()
        for entry, begin, end in zip(entries, [0, *borders], borders):
            if begin < end:
                own = (indices[begin:end] - entry.first).int()
                yield Patch(entry.name, own, values[begin:end], entry.shape)


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
