"""The names that parameters have in a Hugging Face folder, and its tensors of experts."""

import re
from dataclasses import dataclass

from flatshard.checkpoint.hf import EXPERT_PARTS, mixtral_name

# Wrappers that add a part to the name of what is inside.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class Entry:
    """A tensor of a folder: `numel` elements of a flattened parameter, from `first` on."""

    name: str
    shape: tuple
    first: int

    @property
    def numel(self):
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


class Names:
    """The tensors of a folder that the parameters of a model are.

    Args:
        shapes: the full shape of each parameter, by its name in the model.
        rename: maps a name in the model to one in the folder; None: they are equal, up to
            the names of wrappers.
        split_experts: makes one tensor for each expert of parameters of all experts.
    """

    def __init__(self, shapes, rename, split_experts):
        self._entries = {
            name: [Entry(_plain(name, rename), tuple(shape), 0)]
            for name, shape in shapes.items()
        }
        if split_experts:
            for name in shapes:
                self._split(name, shapes, rename)
        self._check_unique()

    def _check_unique(self):
        parameters = {}  # {name in the folder: the parameter}
        for parameter, entries in self._entries.items():
            for entry in entries:
                first = parameters.setdefault(entry.name, parameter)
                if first != parameter:
                    raise ValueError(
                        f"rename: expected another name for each tensor, got {entry.name!r} "
                        f"for {first} and {parameter}"
                    )

    def of(self, name):
        """Returns the entries of a parameter, in the order of its elements."""
        return self._entries[name]

    def _split(self, gate_up, shapes, rename):
        """Splits the parameters of all experts of a layer, if `gate_up` is one."""
        prefix, _, last = gate_up.rpartition(".")
        down = f"{prefix}.{_DOWN}"
        if last != _GATE_UP or down not in shapes:
            return
        shape, down_shape = shapes[gate_up], shapes[down]
        if len(shape) != 3 or len(down_shape) != 3:
            return
        experts, rows, dim = shape
        # Otherwise outputs are the last dimension, and folders have these tensors.
        if tuple(down_shape) != (experts, dim, rows // 2):
            return
        of_folder = _plain(prefix, rename)
        kind = int(".block_sparse_moe." in of_folder)
        (gate, up), (down_name,) = (
            EXPERT_PARTS[part][kind] for part in (_GATE_UP, _DOWN)
        )
        half = (rows // 2, dim)
        self._entries[gate_up] = [
            Entry(f"{of_folder}.{e}.{part}.weight", half, (2 * e + i) * half[0] * dim)
            for e in range(experts)
            for i, part in enumerate((gate, up))
        ]
        one = tuple(down_shape[1:])
        self._entries[down] = [
            Entry(f"{of_folder}.{e}.{down_name}.weight", one, e * one[0] * one[1])
            for e in range(experts)
        ]


def names_of_model(model, rename):
    """Returns `rename`, or the function that renames what the class of `model` names in
    another way than its folders do."""
    if rename is None and getattr(model, "config", None) is not None:
        if getattr(model.config, "model_type", None) == "mixtral":
            return mixtral_name
    return rename


def _plain(name, rename):
    name = _WRAPPERS.sub("", name)
    return name if rename is None else rename(name)
