"""The tensors that leave a model, one unit after another."""

from collections import deque
from typing import NamedTuple

import torch
from torch import nn

from flatshard import _C
from flatshard._fsdp.forward import root_of
from flatshard.checkpoint import whole_tensors
from flatshard.weights.names import Names, names_of_model

_FP8_BLOCK = "fp8_block"


class Meta(NamedTuple):
    """Name, dtype and full shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple


class Units:
    """The units of a model whose weights leave it.

    Attributes:
        cores: of the units.
        mesh: the core's mesh over all ranks that have parts of the model.
        dims: the dimension of each parameter that the core stores first, by name.
        device: of this rank.
    """

    def __init__(self, model, what):
        root = root_of(model)
        if not root.tree.has_values:
            root.tree.check_values()
        self.dims = {}
        for unit in root.units:
            unit.parameters.refuse_extended(what, "use state_dict()")
            for p in unit.parameters:
                if not p.has_dtype():
                    raise RuntimeError(
                        f"{what}: the dtype of parameter {p.names[0]} was changed; run a "
                        "forward first"
                    )
                self.dims[p.names[0]] = p.dim
        self.mesh = root.checkpoint_mesh()
        if self.mesh is not root.ranks.mesh and any(self.dims.values()):
            name = next(name for name, dim in self.dims.items() if dim)
            raise NotImplementedError(
                f"{what}: parameter {name} is sharded along dimension "
                f"{self.dims[name]}. This is not supported with tensor parallelism; let "
                "shard_placement_fn return Shard(0)"
            )
        self.cores = [unit.core for unit in root.units]
        self.device = root.ranks.device

    def full_shape(self, name, stored):
        """Returns the shape of a parameter from its shape in the core."""
        if not (dim := self.dims[name]):
            return tuple(stored)
        return (*stored[1 : dim + 1], stored[0], *stored[dim + 1 :])


class Source:
    """The weights of a model as full tensors. Each iteration sends them once more.

    It has the functions of vLLM's WeightSource.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        format: str | None,
        rename,
        split_experts: bool,
    ):
        if format not in (None, _FP8_BLOCK):
            raise ValueError(f"format: expected None or '{_FP8_BLOCK}', got {format!r}")
        if format is not None and dtype is not None:
            raise ValueError(
                f"dtype: expected None with format={format!r}, because the format "
                f"defines the dtype of each weight, got {dtype}"
            )
        self._model, self._rename, self._split_experts = model, rename, split_experts
        self._is_fp8 = format == _FP8_BLOCK
        # Scales are computed from the values that the optimizer updates.
        self._dtype = torch.float32 if self._is_fp8 else dtype
        self._units: Units | None = None
        self._follow_model()

    def _follow_model(self):
        """Reads names and shapes again if the units have other cores, as after a change of
        a dtype."""
        units = Units(self._model, "flatshard.weights")
        if self._units is not None and units.cores == self._units.cores:
            return
        self._units = units
        others = self._outside_units()
        specs = self._core_stream().metadata()
        shapes = {name: self._units.full_shape(name, s) for name, _, s in specs}
        dtypes = {name: dtype for name, dtype, _ in specs}
        for name, tensor in others:
            shapes[name], dtypes[name] = tuple(tensor.shape), tensor.dtype
        rename = names_of_model(self._model, self._rename)
        self._names = Names(shapes, rename, self._split_experts)
        order = [name for name, _ in others] + [name for name, _, _ in specs]
        self._metadata = [
            meta
            for name in order
            for entry in self._names.of(name)
            for meta in self._metas(entry, dtypes[name])
        ]

    @property
    def device(self) -> torch.device:
        return Units(self._model, "flatshard.weights").device

    def metadata(self) -> list[Meta]:
        """Returns name, dtype and shape of each tensor in the order of iteration."""
        self._follow_model()
        return list(self._metadata)

    def __iter__(self):
        self._follow_model()
        run = _Run(self, self._core_stream())
        try:
            while (group := run.next()) is not None:
                if group:
                    yield group.popleft()
                    # The caller has freed the tensors of the unit before.
                    run.gather_ahead()
                while group:
                    yield group.popleft()
        except GeneratorExit:
            run.drain()
            raise

    def iter_groups(self):
        """Yields the tensors of one unit after another, as lists of names and tensors."""
        self._follow_model()
        run = _Run(self, self._core_stream())
        try:
            while (group := run.next()) is not None:
                if group:
                    yield list(group)
        except GeneratorExit:
            run.drain()
            raise

    # -- one iteration -------------------------------------------------------------

    def _core_stream(self):
        return _C.WeightStream(self._units.cores, self._dtype, self._units.mesh)

    def first_group(self):
        """Returns the tensors that belong to no unit."""
        return deque(
            pair for own in self._outside_units() for pair in self._tensors(*own)
        )

    def group_of(self, parameters):
        """Returns the tensors of full parameters, as the core stores them."""
        tensors = deque()
        for name, values in parameters:
            if dim := self._units.dims[name]:
                values = values.movedim(0, dim).contiguous()
            tensors.extend(self._tensors(name, values))
        return tensors

    def _outside_units(self):
        """Returns persistent buffers, and parameters that no unit has."""
        parameters = {name for name, _ in self._model.named_parameters()}
        return [
            (name, tensor.to(self._dtype or tensor.dtype))
            if name in parameters and tensor.is_floating_point()
            else (name, tensor)
            for name, tensor in whole_tensors(self._model, "flatshard.weights")
        ]

    def _tensors(self, name, values):
        flat = values.detach().reshape(-1)
        for entry in self._names.of(name):
            tensor = flat.narrow(0, entry.first, entry.numel).view(entry.shape)
            yield from self._encoded(entry, tensor)

    def _is_quantized(self, entry, dtype):
        return (
            self._is_fp8
            and dtype.is_floating_point
            and _C.is_linear_of_a_block(entry.name, len(entry.shape))
        )

    def _metas(self, entry, dtype):
        if self._is_quantized(entry, dtype):
            scales = tuple(_C.block_scales_shape(entry.shape))
            yield Meta(entry.name, torch.float8_e4m3fn, entry.shape)
            yield Meta(_C.block_scales_name(entry.name), torch.float32, scales)
        else:
            yield Meta(entry.name, self._sent_dtype(dtype), entry.shape)

    def _encoded(self, entry, tensor):
        if self._is_quantized(entry, tensor.dtype):
            data, scales = _C.quantize_blocks(
                entry.name, tensor, "send the weights of an earlier step"
            )
            yield entry.name, data
            yield _C.block_scales_name(entry.name), scales
        else:
            yield entry.name, tensor.to(self._sent_dtype(tensor.dtype))

    def _sent_dtype(self, dtype):
        return torch.bfloat16 if self._is_fp8 and dtype.is_floating_point else dtype


class _Run:
    """One iteration over a Source."""

    def __init__(self, source, core):
        self._source, self._core = source, core
        self._first = source.first_group()

    def next(self):
        if self._first is not None:
            first, self._first = self._first, None
            return first
        parameters = self._core.next()
        return None if parameters is None else self._source.group_of(parameters)

    def gather_ahead(self):
        self._core.gather_ahead()

    def drain(self):
        """Runs the all-gathers that are left, as the other ranks do."""
        while self._core.next() is not None:
            pass
