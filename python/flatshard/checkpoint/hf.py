"""`load_hf`: the weights of a Hugging Face folder, read straight into shards."""

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from flatshard._fsdp.forward import without_compile
from flatshard._fsdp.module import class_before
from flatshard._tensor.even_shard import EvenShard
from flatshard._tensor.memory import local_of
from flatshard._tensor.mesh import device_of
from flatshard._tensor.pieces import piece_of
from flatshard._tensor.places import parameter_of, units_in
from flatshard._tensor.shard_values import own_span, row_dim
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard.torch_versions import buffers_of, parameters_of

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Parameters of all experts of a layer, and the tensors of one expert that form a row.
EXPERT_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


def mixtral_name(name):
    """Returns the name in Mixtral's folders: transformers 5 renamed its blocks."""
    return re.sub(r"\.mlp\.(experts|gate)\b", r".block_sparse_moe.\1", name)


def load_hf(
    model: nn.Module,
    folder: str | os.PathLike,
    *,
    rename: Callable[[str], str] | None = None,
) -> list[str]:
    """Reads the weights of a Hugging Face folder into a sharded model.

    Each rank reads the rows that it has, so no rank stores a full model or a full file:

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        flatshard.load_hf(model, folder)

    Values are converted to the dtype of each parameter. Experts of which the folder has
    one tensor each are stacked where the model has one parameter for all of them. Buffers
    on the meta device that the folder does not have are computed as the model's class
    does. Not collective.

    Args:
        model: after fully_shard; on the meta device, or with values that are replaced.
        folder: has model.safetensors, or model.safetensors.index.json and its files.
        rename: maps a name in the model to the name in the folder. None: the names are
            equal, up to the prefix of the base model (`model.base_model_prefix`).

    Returns:
        Names of tensors in the folder that the model does not have.

    Raises:
        FileNotFoundError: no safetensors files in the folder.
        ValueError: parameters or buffers that the folder does not have, or of another
            shape, with their names. The model has no usable values then.
    """
    tensors, model = _Folder(Path(folder)), without_compile(model)
    places: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(p), (p, []))[1].append(name)
    missing = []
    for p, names in places.values():
        source = _source(tensors, model, names, rename)
        if source is None:
            missing.append(names[0])
            continue
        _read(source, p, names[0], model)
    missing += _load_buffers(tensors, model, rename)
    if missing:
        shown = ", ".join(sorted(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(
            f"{folder}: expected tensors for all parameters of {class_before(type(model)).__name__}, "
            f"found none for {len(missing)}: {shown}; give rename, if the folder has "
            "other names"
        )
    for unit in units_in(model):
        unit.note_other_values()
    return sorted(tensors.unused)


class _Folder:
    """The tensors of the files of a folder; a file is opened when it is needed."""

    def __init__(self, path):
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                "load_hf needs the package safetensors, a dependency of transformers: "
                "pip install safetensors"
            ) from error
        self.path, self._open, self._files = path, safe_open, {}
        index = path / _INDEX
        if (path / _SINGLE).exists():
            self._file_of = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        elif index.exists():
            self._file_of = json.loads(index.read_text())["weight_map"]
        else:
            old = " (pytorch_model.bin has to be converted)" * any(path.glob("*.bin"))
            raise FileNotFoundError(
                f"{path}: expected {_SINGLE} or {_INDEX}, found neither{old}"
            )
        self.unused = set(self._file_of)

    def __contains__(self, name):
        return name in self._file_of

    def _file(self, name):
        if name not in self._files:
            self._files[name] = self._open(
                self.path / name, framework="pt", device="cpu"
            )
        return self._files[name]

    def slice(self, name):
        self.unused.discard(name)
        return self._file(self._file_of[name]).get_slice(name)


class _One:
    """A parameter that the folder has as one tensor."""

    def __init__(self, tensors, name):
        self._slice = tensors.slice(name)
        self.shape = tuple(self._slice.get_shape())

    def rows(self, begin, end):
        return self._slice[begin:end] if self.shape else self._slice[...]


class _Experts:
    """A parameter of all experts, of which the folder has tensors of one expert each."""

    def __init__(self, tensors, prefix, parts):
        self._parts = []
        while f"{prefix}.{len(self._parts)}.{parts[0]}.weight" in tensors:
            e = len(self._parts)
            self._parts.append(
                [tensors.slice(f"{prefix}.{e}.{k}.weight") for k in parts]
            )
        shapes = [part.get_shape() for part in self._parts[0]]
        rows = sum(shape[0] for shape in shapes)
        self.shape = (len(self._parts), rows, *shapes[0][1:])

    def rows(self, begin, end):
        return torch.stack(
            [torch.cat([part[:] for part in parts]) for parts in self._parts[begin:end]]
        )


def _source(tensors, model, names, rename):
    """Returns where the values of the parameter with these names are; None: nowhere."""
    for name in names:
        for candidate in _names_in_folder(model, name, rename):
            if candidate in tensors:
                return _One(tensors, candidate)
            prefix, _, last = candidate.rpartition(".")
            for parts in EXPERT_PARTS.get(last, ()):
                if f"{prefix}.0.{parts[0]}.weight" in tensors:
                    return _Experts(tensors, prefix, parts)
    return None


def _names_in_folder(model, name, rename):
    if rename is not None:
        yield rename(name)
        return
    base = getattr(model, "base_model_prefix", "")
    same = [name, name.removeprefix(f"{base}."), f"{base}.{name}"] if base else [name]
    yield from same
    for known in same:
        yield mixtral_name(known)


def _whole(source):
    return source.rows(0, source.shape[0] if source.shape else 0)


def _read(source, p, name, model):
    if source.shape != tuple(p.shape):
        raise ValueError(
            f"{name}: expected a tensor {list(p.shape)}, found {list(source.shape)}; is "
            "the folder of this model's configuration?"
        )
    if (parameter := parameter_of(p)) is not None:
        p = parameter.stored_shard  # the model may still be on meta
    if isinstance(p, ShardedTensor):
        local = local_of(p)
        begin, end = own_span(p) if row_dim(p) is not None else (None, None)
        with torch.no_grad():
            if begin is None:
                local.copy_(_whole(source).view(local.shape))
            elif begin < end:
                local.copy_(source.rows(begin, end).view(local.shape))
        return
    value = _whole(source).to(p.dtype)
    if isinstance(p, EvenShard):
        with torch.no_grad():
            local_of(p).copy_(piece_of(p, value))
        return
    if p.is_meta:  # of ignored_params
        device = _device(model)
        _put(
            parameters_of, model, name, nn.Parameter(value.to(device), p.requires_grad)
        )
    else:
        with torch.no_grad():
            p.copy_(value)


def _load_buffers(tensors, model, rename):
    """Loads buffers. Returns the names of buffers that are still on the meta device."""
    left = []
    for name, buffer in model.named_buffers():
        source = _source(tensors, model, [name], rename)
        if source is not None:
            value = _whole(source)
            device = _device(model) if buffer.is_meta else buffer.device
            _put(buffers_of, model, name, value.to(device, buffer.dtype))
        elif buffer.is_meta:
            left.append(name)
    if not left or not hasattr(model, "config"):
        return left
    with _parameters_on_meta():
        twin = class_before(type(model))(model.config)
    computed = dict(twin.named_buffers())
    for name in left:
        if name in computed:
            _put(buffers_of, model, name, computed[name].to(_device(model)))
    return [name for name in left if name not in computed]


@contextlib.contextmanager
def _parameters_on_meta():
    """Modules that are made inside have their parameters on meta, and real buffers."""
    register = nn.Module.register_parameter

    def on_meta(module, name, p):
        if p is not None and not p.is_meta:
            p = nn.Parameter(p.to("meta"), p.requires_grad)
        register(module, name, p)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _device(model):
    for p in model.parameters():
        if isinstance(p, ShardedTensor):
            return device_of(p.device_mesh)
    return next(p.device for p in model.parameters() if not p.is_meta)


def _put(tensors_of, model, name, tensor):
    path, _, last = name.rpartition(".")
    tensors_of(model.get_submodule(path))[last] = tensor
