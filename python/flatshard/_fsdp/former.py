"""Tensors that were parameters before fully_shard, and that a program still refers to: from
a list or closure that __init__ made, or an optimizer."""

from torch import nn

from flatshard.torch_versions import drop_values, forget_hooks_of_tensor

# Where a parameter went, kept on the tensor that the user had: meeting it again
# in another unit means that two units share it.
OWNER = "_flatshard_owner"
_num_marked = 0


def mark_owner(tensor, name):
    global _num_marked
    _num_marked += 1
    setattr(tensor, OWNER, name)


def former_name(tensor):
    """Returns the name of the parameter that `tensor` was before fully_shard, or
    None."""
    return getattr(tensor, OWNER, None)


def num_marked():
    """Returns how many parameters fully_shard has replaced in this process."""
    return _num_marked


def refuse_former(tensor, what):
    if (name := former_name(tensor)) is not None:
        raise RuntimeError(
            f"{what} parameter {name} as it was before fully_shard. The model does "
            "not use that tensor anymore; pass the parameters that it has after the last "
            "fully_shard"
        )


def retire(p):
    """Makes the tensor that the Parameter p replaced, if a program still has it, raise an
    error when it is read or gets a gradient: its values are not the model's any more."""
    tensor, p.former = p.former and p.former(), None
    if tensor is None or type(tensor) is not nn.Parameter:
        return
    text = (
        f"parameter {p.names[0]} is read as it was before fully_shard replaced it: a list, "
        "a closure or another object refers to that tensor, and it is not trained. Read "
        "the attribute of the module in its forward, or create the reference there"
    )
    if tensor.requires_grad:
        forget_hooks_of_tensor(tensor)  # the shard has them
        tensor.register_hook(_Refusal(text))
    if tensor.numel() and not tensor.is_meta:
        drop_values(tensor, text)


class _Refusal:
    """A hook: a view that is older than fully_shard has a gradient."""

    def __init__(self, text):
        self._text = text

    def __call__(self, gradient):
        raise RuntimeError(self._text)
