"""Megatron-FSDP's dtypes, in both versions, as those of flatshard.fully_shard."""

import contextlib
from dataclasses import dataclass

import torch

from flatshard.policies import MixedPrecisionPolicy as _Policy


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Megatron-FSDP's dtypes.

    Attributes:
        main_params_dtype: of the sharded parameters that the optimizer updates. None:
            in the first version the module's own, in the second float32. The module's
            dtype is that of forward and backward.
        main_grads_dtype: of reduced gradients. None: that of the main parameters.
        grad_comm_dtype: of gradients on the wire. None: that of the main parameters.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None


@contextlib.contextmanager
def main_dtype(unit, policy):
    """The unit's own parameters in the main dtype, and the policy that computes in
    the dtype that they had. After an exception they have their dtype again."""
    own = {
        p
        for m in unit.modules()
        for p in m._parameters.values()
        if p is not None and p.is_floating_point() and not hasattr(p, "placements")
    }
    dtypes = {p.dtype for p in own}
    main = policy.main_params_dtype
    if main is None and len(dtypes) == 1:
        main = next(iter(dtypes))
    if policy.main_grads_dtype not in (None, main):
        raise NotImplementedError(
            f"mixed_precision_policy.main_grads_dtype={policy.main_grads_dtype} is not "
            f"supported: gradients have the main parameters' dtype, {main}"
        )
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise NotImplementedError(
            f"parameters of {type(unit).__name__} have the dtypes {names}; expected "
            "one per unit: shard those of one dtype as a unit of their own"
        )
    before = [(p, p.data) for p in own if p.dtype != main]
    for p, data in before:
        p.data = data.to(main)
    try:
        yield _Policy(
            param_dtype=next(iter(dtypes), None),
            reduce_dtype=policy.grad_comm_dtype or main,
            cast_forward_inputs=False,
        )
    except BaseException:
        for p, data in before:
            p.data = data
        raise
