"""The tensors that leave a model, one unit after another."""

import weakref
from collections import deque
from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from flatshard import _C
from flatshard._fsdp.forward import root_of, without_compile
from flatshard._fsdp.root import Root
from flatshard._tensor.memory import local_of
from flatshard.checkpoint import whole_tensors
from flatshard.float8.policy import LEFT_OUT
from flatshard.torch_versions import buffers_of, parameters_of, persistent_buffers
from flatshard.weights.names import Names, names_of_model

_FP8_BLOCK = "fp8_block"
T = TypeVar("T")


class Meta(NamedTuple):
    """Name, dtype and full shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple


class Options(NamedTuple):
    """The arguments of `flatshard.weights.stream`."""

    dtype: torch.dtype | None
    format: str | None
    rename: object
    split_experts: bool

    def check(self):
        if self.format not in (None, _FP8_BLOCK):
            raise ValueError(
                f"format: expected None or '{_FP8_BLOCK}', got {self.format!r}"
            )
        if self.format is not None and self.dtype is not None:
            raise ValueError(
                f"dtype: expected None with format={self.format!r}, because the format "
                f"defines the dtype of each weight, got {self.dtype}"
            )
        is_dtype = isinstance(self.dtype, torch.dtype)
        if self.dtype is not None and not (is_dtype and self.dtype.is_floating_point):
            raise ValueError(
                "dtype: expected None or a floating-point torch.dtype, such as "
                f"torch.bfloat16, got {self.dtype!r}"
            )
        if self.rename is not None and not callable(self.rename):
            raise ValueError(
                "rename: expected None or a function of a name in the model, got "
                f"{self.rename!r}"
            )

    @property
    def is_fp8(self):
        return self.format == _FP8_BLOCK

    @property
    def gathered_dtype(self):
        """Returns the dtype of all-gathers. Scales are computed from the values that the
        optimizer updates."""
        return torch.float32 if self.is_fp8 else self.dtype

    def is_quantized(self, entry, dtype):
        return (
            self.is_fp8
            and dtype.is_floating_point
            and _C.is_linear_of_a_block(entry.name, len(entry.shape))
        )

    def sent_dtype(self, dtype):
        return torch.bfloat16 if self.is_fp8 and dtype.is_floating_point else dtype


class Plan:
    """The tensors that leave a model, as long as it has the same Root. There is no strong
    reference to either.

    Attributes:
        root: a weak reference to the Root.
        buffers: see `_buffers_of`.
        cores: of the units.
        mesh: the core's mesh over all ranks that have parts of the model.
        device: of this rank.
        dims: the dimension of each parameter that the core stores first, by name.
        names: the tensors of a folder that each parameter is.
        metadata: of the tensors, in their order.
    """

    def __init__(self, model, root, options):
        self.options = options
        self.root = weakref.ref(root)
        self.dims = {}
        self._bfloat16 = set()  # what format="fp8_block" leaves so, by choice
        for unit in root.units:
            unit.parameters.refuse_extended("flatshard.weights", "use state_dict()")
            self.dims |= {p.names[0]: p.dim for p in unit.parameters}
            self._bfloat16 |= {
                p.names[0] for p in unit.parameters if p.why_not_float8 == LEFT_OUT
            }
        self.mesh = root.checkpoint_mesh()
        if self.mesh is not root.ranks.mesh and any(self.dims.values()):
            name = next(name for name, dim in self.dims.items() if dim)
            raise NotImplementedError(
                f"flatshard.weights: parameter {name} is sharded along dimension "
                f"{self.dims[name]}. This is not supported with tensor parallelism; let "
                "shard_placement_fn return Shard(0)"
            )
        self.cores = [unit.core for unit in root.units]
        self.device = root.ranks.device
        self.buffers = _buffers_of(model)
        self._outside = [
            _place_of(model, name)
            for name, _ in whole_tensors(model, "flatshard.weights")
        ]
        others = [(name, t.dtype, t.shape) for name, t in self.outside_units()]
        specs = [
            (name, dtype, self._full_shape(name, shape))
            for name, dtype, shape in self.core_stream().metadata()
        ]
        self.names = Names(
            {name: tuple(shape) for name, _, shape in others + specs},
            names_of_model(model, options.rename),
            options.split_experts,
        )
        self.metadata = [
            meta
            for name, dtype, _ in others + specs
            for entry in self.names.of(name)
            for meta in self._metas(name, entry, dtype)
        ]
        # Most parameters are sent as they arrive. {name in the model: name in the folder}
        self._unchanged = {
            name: self.names.of(name)[0].name
            for name, _, _ in specs
            if len(self.names.of(name)) == 1
            and not self.dims[name]
            and not options.is_fp8
        }

    def core_stream(self):
        dtype = self.options.gathered_dtype
        return _C.WeightStream(self.cores, dtype, self.mesh)

    def outside_units(self):
        """Returns persistent buffers, and parameters that no unit has, by name. They are
        contiguous, because engines receive bytes."""
        found = []
        for name, module, key in self._outside:
            tensor = buffers_of(module()).get(key)
            if tensor is None:
                tensor = parameters_of(module())[key].detach()
                if tensor.is_floating_point():
                    tensor = tensor.to(self.options.gathered_dtype or tensor.dtype)
            found.append((name, tensor.contiguous()))
        return found

    def tensors(self, parameters):
        """Returns the tensors of full parameters in the form of the core."""
        found = deque()
        for name, values in parameters:
            if (plain := self._unchanged.get(name)) is not None:
                found.append((plain, values))
                continue
            if dim := self.dims.get(name, 0):
                values = values.movedim(0, dim).contiguous()
            flat = values.reshape(-1)
            for entry in self.names.of(name):
                tensor = flat.narrow(0, entry.first, entry.numel).view(entry.shape)
                found.extend(self._encoded(name, entry, tensor))
        return found

    def _full_shape(self, name, stored):
        """Returns the shape of a parameter from its shape in the core."""
        if not (dim := self.dims[name]):
            return stored
        return (*stored[1 : dim + 1], stored[0], *stored[dim + 1 :])

    def _is_quantized(self, name, entry, dtype):
        return name not in self._bfloat16 and self.options.is_quantized(entry, dtype)

    def _metas(self, name, entry, dtype):
        if self._is_quantized(name, entry, dtype):
            scales = tuple(_C.block_scales_shape(entry.shape))
            yield Meta(entry.name, torch.float8_e4m3fn, entry.shape)
            yield Meta(_C.block_scales_name(entry.name), torch.float32, scales)
        else:
            yield Meta(entry.name, self.options.sent_dtype(dtype), entry.shape)

    def _encoded(self, name, entry, tensor):
        if self._is_quantized(name, entry, tensor.dtype):
            data, scales = _C.quantize_blocks(
                entry.name, tensor, "send the weights of an earlier step"
            )
            yield entry.name, data
            yield _C.block_scales_name(entry.name), scales
        else:
            yield entry.name, tensor.to(self.options.sent_dtype(tensor.dtype))


def _buffers_of(model):
    """Returns name in its module, shape and dtype of each persistent buffer."""
    return [
        (name, buffer.shape, buffer.dtype)
        for module in model.modules()
        for name, buffer in persistent_buffers(module)
    ]


def _place_of(model, name):
    path, _, key = name.rpartition(".")
    return name, weakref.ref(model.get_submodule(path)), key


# The plans of each Root, by options. A search for modules and names would be slower than
# sending the tensors of many small experts.
_plans: weakref.WeakKeyDictionary[Root, dict[Options, Plan]] = (
    weakref.WeakKeyDictionary()
)


# A `rename` that is another object in each call gives another plan each time.
_MOST_PLANS = 4


def plan_of(model, options, known=None):
    """Returns the Plan of a model: `known`, if the model still has the Root and the buffers
    of that plan. Collective when it makes one."""
    root = root_of(model)
    if not root.tree.has_values:
        root.tree.check_values()
    for unit in root.units:
        for p in unit.parameters:
            if local_of(p.shard).dtype != p.shown_dtype:
                raise RuntimeError(
                    f"flatshard.weights: the dtype of parameter {p.names[0]} was changed; "
                    "run a forward first"
                )
    buffers = _buffers_of(model)
    if known is not None and known.root() is root and known.buffers == buffers:
        return known
    plans = _plans.setdefault(root, {})
    if options in plans and plans[options].buffers != buffers:
        del plans[options]
    if options not in plans:
        if len(plans) == _MOST_PLANS:
            del plans[next(iter(plans))]  # the oldest
        plans[options] = Plan(model, root, options)
    return plans[options]


class Stream(Iterator[T]):
    """One iteration over the weights of a model.

    A rank that leaves it early runs the remaining all-gathers in `close()`. The end of a
    `with` block calls it. So does the garbage collector, but only after the first
    tensor.
    """

    def __init__(self, values: Generator[T, None, None]):
        self._values = values
        self._began = False

    def __next__(self) -> T:
        self._began = True
        return next(self._values)

    def close(self) -> None:
        """Runs the remaining all-gathers, as the other ranks do. Collective."""
        if not self._began:
            next(self, None)  # a generator that has not begun runs nothing when closed
        self._values.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Source:
    """The weights of a model as full tensors. Each iteration sends them once more.

    It has the functions of vLLM's WeightSource.
    """

    def __init__(self, model: nn.Module, options: Options):
        options.check()
        self._model, self._options = without_compile(model), options
        self._known = plan_of(self._model, options)

    def _plan(self):
        self._known = plan_of(self._model, self._options, self._known)
        return self._known

    @property
    def device(self) -> torch.device:
        return self._plan().device

    def metadata(self) -> list[Meta]:
        """Returns name, dtype and shape of each tensor in the order of iteration."""
        return list(self._plan().metadata)

    def __iter__(self):
        return Stream(self._tensors())

    def iter_groups(self):
        """Yields the tensors of one unit after another, as lists of names and tensors."""
        return Stream(self._groups())

    def _tensors(self):
        run = _Run(self._plan())
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

    def _groups(self):
        run = _Run(self._plan())
        try:
            while (group := run.next()) is not None:
                if group:
                    yield list(group)
        except GeneratorExit:
            run.drain()
            raise


class _Run:
    """One iteration over a Source."""

    def __init__(self, plan):
        self._plan, self._core = plan, plan.core_stream()
        self._began = False

    def next(self):
        if not self._began:
            self._began = True
            return self._plan.tensors(self._plan.outside_units())
        parameters = self._core.next()
        return None if parameters is None else self._plan.tensors(parameters)

    def gather_ahead(self):
        self._core.gather_ahead()

    def drain(self):
        """Runs the all-gathers that are left, as the other ranks do."""
        while self._core.next() is not None:
            pass
