"""Checkpoints of a sharded model and its optimizer, in the format of
`flatshard train`: safetensors files and a manifest, readable at any number of
ranks, with every strategy, and without Flatshard. Nothing is pickled.

    saved = checkpoint.async_save("checkpoints", step, model, optimizer)
    ...
    saved.wait()
    step = checkpoint.load("checkpoints", model, optimizer).step
"""

import atexit
import json
import os
import pathlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _C
from flatshard._fsdp.forward import root_of, without_compile
from flatshard._fsdp.parameter import parameter_of_whole
from flatshard._fsdp.root import Root
from flatshard._tensor.places import unit_of
from flatshard.checkpoint.optimizer_state import (
    are_cores,
    as_list,
    check_options,
    core_optimizer,
    describe_optimizers,
    make_states,
    states_of,
    take_options,
)
from flatshard.optim.core_optimizer import CoreOptimizer
from flatshard.torch_versions import buffers_of, persistent_buffers

_OPTIMIZER = "optimizer"  # Flatshard's text in the manifest

# None: weights only.
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint in addition to tensors."""

    step: int
    state: dict  # the texts given to save


def _root_of(model):
    """Raises NotImplementedError for a parameter that the files cannot contain."""
    root = root_of(model)
    for unit in root.units:
        unit.parameters.refuse_extended(
            "flatshard.checkpoint", "use torch.distributed.checkpoint"
        )
        for p in unit.parameters:
            if p.dim:
                raise NotImplementedError(
                    f"flatshard.checkpoint: parameter {p.names[0]} is sharded along "
                    f"dimension {p.dim}. This is not supported; use "
                    "torch.distributed.checkpoint, or let shard_placement_fn return "
                    "Shard(0)"
                )
    return root


def save(
    folder: str | os.PathLike,
    step: int,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    state: dict | None = None,
    keep_latest: int = 0,
) -> None:
    """Saves a checkpoint and returns when it is complete. Collective.

    See `async_save`.
    """
    saved = async_save(
        folder, step, model, optimizer, state=state, keep_latest=keep_latest
    )
    saved.wait()


def async_save(
    folder: str | os.PathLike,
    step: int,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    state: dict | None = None,
    keep_latest: int = 0,
) -> "Saved":
    """Starts to save `<folder>/step-<step>` in parallel with the training. Collective.

    Weights, persistent buffers (of rank 0) and the optimizer's state are copied to a
    host buffer in parallel with the GPU's next work. A thread writes the buffer. The
    next `optimizer.step()` waits for the copies: until then, write to the parameters by
    no other way. There are two buffers, made by the first save, each as large as this
    rank's part of the checkpoint. A third save waits for the first.

    The folder gets its name when every byte of every rank is on disk, so one that
    exists is complete. A save that fails on one rank fails on all and leaves earlier
    checkpoints as they are.

    Args:
        folder: contains one folder for each checkpoint.
        step: a number; an older checkpoint of that number is replaced.
        model: the outermost module that `fully_shard` wrapped, or torch.compile of it.
        optimizer: of its parameters: flatshard.optim.AdamW or Muon, or any whose state is
            tensors like the parameters, and `step`. Several of flatshard.optim: a list.
            None: weights only.
        state: texts to keep in addition to the tensors, by name, such as the data
            loader's
            place as JSON.
        keep_latest: number of checkpoints to keep; older ones are removed. 0: all are kept.

    Returns:
        A `Saved`.

    Raises:
        ValueError: an optimizer or state that cannot be saved, naming what.
    """
    model = without_compile(model)
    root = _root_of(model)
    texts = _checked_texts(state)
    optimizers = as_list(optimizer)
    states, updates = states_of(root, optimizers)
    if optimizers:
        texts[_OPTIMIZER] = describe_optimizers(optimizers)
    folder = pathlib.Path(folder)
    writer = _writer_for(model, optimizers, states, folder, keep_latest)
    return writer.save(int(step), texts, updates)


def load(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    exclude: Sequence[str] = (),
) -> Loaded:
    """Loads a checkpoint, whatever number of ranks, mesh, strategy or optimizer class
    wrote it. Collective; all or nothing: when it fails, nothing has changed.

    Args:
        folder: as in `save`.
        model: as in `save`; may still be on the meta device.
        optimizer: as in `save`, several in the same order. None: weights only.
        step: None: the latest.
        exclude: shell patterns of names (`lm_head.*`) that are neither looked for in
            the checkpoint nor changed in the model.

    Returns:
        A `Loaded`.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        flatshard.Error: a file that is damaged, a tensor that is missing or too many,
            of another shape or dtype, naming file, tensor and both values.
    """
    model = without_compile(model)
    root = _root_of(model)
    mesh = root.checkpoint_mesh()
    path = _step_folder(pathlib.Path(folder), step, mesh)
    optimizers = as_list(optimizer)
    stored, texts, described = _on_all_ranks(
        mesh, "read manifest", lambda: _read_manifest(path, optimizers)
    )
    foreign = None if are_cores(optimizers) else optimizers[0]
    before = None if foreign is None else foreign.state
    on_meta = _materialize_buffers(root, model)
    try:
        if foreign is not None:
            make_states(foreign, stored, described, exclude)
        states, _ = states_of(root, optimizers)
        own = core_optimizer(root, optimizers, states)
        state = _training_state(root, own, whole_tensors(model))
        _, writer = _writers.get(root, (None, None))
        if writer is not None:
            writer.core.wait_for_copies()
        _C.load_checkpoint(str(path), mesh, state, list(exclude))
    except BaseException:
        if foreign is not None and before is not None:
            foreign.state = before
        for module, name, buffer in on_meta:
            buffers_of(module)[name] = buffer
        raise
    for unit in root.units:
        unit.note_other_values()
    if isinstance(own, _C.SeveralOptimizers):
        own.give_updates()
    if described:
        take_options(optimizers, described["param_groups"])
    for one in optimizers:
        if isinstance(one, CoreOptimizer):
            one.show_steps()
    return Loaded(step=stored["step"], state=texts)


class Saved:
    """A save that was started."""

    def __init__(self, writer: "_Writer", step: int):
        self._writer = writer
        self._step = step
        self._result: _C.SaveResult | None = None

    @property
    def step(self):
        return self._step

    def done(self) -> bool:
        """Returns whether the save has ended, well or not. Does not block."""
        self._writer.collect()
        return self._result is not None

    def wait(self) -> None:
        """Blocks until the checkpoint is complete on disk.

        Raises:
            RuntimeError: it could not be written on some rank; the text names the
                file.
        """
        if not self.done():
            self._writer.core.wait()
            self._writer.collect()
        if self._result is not None and self._result.error is not None:
            raise RuntimeError(
                f"checkpoint of step {self._step} failed: {self._result.error}"
            )


class _Writer:
    """A Checkpointer of the core: one folder, one set of tensors, two buffers."""

    def __init__(self, core, optimizers, stored):
        """
        Args:
            core: the _C.Checkpointer.
            optimizers: each waits for the copies before each step.
            stored: the result of core_optimizer, for the core to read.
        """
        self.core = core
        self._stored = stored
        self._pending = []
        me = weakref.ref(self)

        def before_step(*_):
            if me() is not None:
                me().core.wait_for_copies()

        self._hooks = [one.register_step_pre_hook(before_step) for one in optimizers]

    def close(self):
        self.core.wait()
        self.collect()
        for hook in self._hooks:
            hook.remove()

    def save(self, step, texts, updates):
        if isinstance(self._stored, _C.TensorStates):
            self._stored.set_updates(updates)
        elif isinstance(self._stored, _C.SeveralOptimizers):
            self._stored.take_updates()
        self.core.save(step, texts)
        if not self._hooks:
            self.core.wait_for_copies()
        saved = Saved(self, step)
        self._pending.append(saved)
        return saved

    def collect(self):
        for result in self.core.take_results():  # in the order of the saves
            self._pending.pop(0)._result = result


# The writer of each root, with the signature of its files.
_writers: weakref.WeakKeyDictionary[Root, tuple[tuple, "_Writer"]] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _close():
    # Before the interpreter finalizes torch: their threads end.
    _writers.clear()


def _writer_for(model, optimizers, states, folder, keep_latest):
    root, buffers = root_of(model), whole_tensors(model)
    signature = (
        str(folder.resolve()),
        keep_latest,
        # An id may belong to an optimizer that was freed.
        [weakref.ref(one) for one in optimizers],
        [one.core for one in optimizers if isinstance(one, CoreOptimizer)],
        [tensor.data_ptr() for _, tensor in buffers],
        [t.data_ptr() for unit in states for own in unit for t in own.values()],
    )
    known, writer = _writers.get(root, (None, None))
    if known != signature:
        if writer is not None:
            del _writers[root]
            writer.close()
        stored = core_optimizer(root, optimizers, states)
        state = _training_state(root, stored, buffers)
        core = _C.Checkpointer(root.checkpoint_mesh(), state, str(folder), keep_latest)
        writer = _Writer(core, optimizers, stored)
        _writers[root] = (signature, writer)
    return writer


# -- the rest ------------------------------------------------------------------------


def _training_state(root, stored, buffers):
    """Returns the tensors of a checkpoint. `stored` is the result of core_optimizer."""
    units = [unit.core for unit in root.units]
    return _C.TrainingState(units=units, optimizer=stored, buffers=buffers)


def whole_tensors(model, what="flatshard.checkpoint"):
    """Returns state that is equal on all ranks: persistent buffers and parameters that are
    not sharded. `what` is for messages."""
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in persistent_buffers(module):
            found[f"{prefix}.{name}" if prefix else name] = buffer
    for name, parameter in model.named_parameters():
        if unit_of(parameter) is None and parameter_of_whole(parameter) is None:
            found[name] = parameter.detach()
    for name, tensor in found.items():
        if isinstance(tensor, DTensor):
            raise NotImplementedError(
                f"{what}: {name} is a DTensor that fully_shard did not "
                "shard. This is not supported; use torch.distributed.checkpoint"
            )
    return list(found.items())


def _materialize_buffers(root, model):
    """Gives persistent buffers on the meta device memory; what they were."""
    device = root.ranks.device
    replaced = []
    for module in model.modules():
        for name, buffer in persistent_buffers(module):
            if buffer.is_meta:
                replaced.append((module, name, buffer))
                buffers_of(module)[name] = torch.zeros_like(buffer, device=device)
    return replaced


def _on_all_ranks(mesh, name, work):
    """Returns what `work` returns on this rank. Raises on all ranks if it raises on one.
    Collective."""
    found = []
    mesh.on_all_ranks(name, lambda: found.append(work()) or 0)
    return found[0]


def _step_folder(folder, step, mesh):
    """Returns the folder of a step, by default of the latest that rank 0 finds: a file
    system may show a new folder to some ranks only. Collective."""

    def latest():
        found = _C.latest_checkpoint(str(folder)) if mesh.rank == 0 else None
        return -1 if found is None else found

    if step is None:
        step = mesh.on_all_ranks("find checkpoint", latest)
        if step < 0:
            raise FileNotFoundError(f"{folder}: there is no checkpoint")
    return folder / f"step-{int(step)}"


def _read_manifest(path, optimizers):
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path.parent}: there is no checkpoint of step {path.name[5:]}"
        )
    stored = _C.describe_checkpoint(str(path))
    texts = dict(stored["state"])
    described = json.loads(texts.pop(_OPTIMIZER, "{}"))
    texts.pop("optimizer.num_steps", None)
    if optimizers and described:
        check_options(optimizers, described, path)
    return stored, texts, described


def _checked_texts(state):
    texts = dict(state or {})
    for name, text in texts.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(
                f"state: expected texts by name, got a {type(text).__name__} for "
                f"{name!r}; json.dumps makes texts of most values"
            )
        if name == _OPTIMIZER or name.startswith("optimizer."):
            raise ValueError(f"state: {name!r} is the optimizer's own, use another")
    return texts


__all__ = ["Loaded", "Saved", "async_save", "load", "save"]
