"""Translates Megatron-FSDP's dtypes, in both versions, to flatshard.fully_shard's
dtypes."""

import contextlib
from dataclasses import dataclass, field

import torch

from flatshard._fsdp.policies import MixedPrecisionPolicy as _Policy
from flatshard.megatron.float8 import FullyShardFP8Policy
from flatshard.torch_versions import parameters_of


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Megatron-FSDP's dtypes.

    Attributes:
        main_params_dtype: of the sharded parameters that the optimizer updates. None:
            in the first version the module's own, in the second float32. Forward and
            backward compute in the module's dtype.
        main_grads_dtype: of reduced gradients. None: the main parameters' dtype.
        grad_comm_dtype: of gradients on the wire. None: the main parameters'
            dtype.
        fp8_param_gather, fp8_recipe, keep_fp8_transpose_cache: the fields of `fp8`,
            where that is None.
        fp8: FullyShardFP8Policy.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    fp8_param_gather: bool = False
    fp8_recipe: str | None = None
    keep_fp8_transpose_cache: bool = False
    use_decoupled_grad: bool = False
    fp8: FullyShardFP8Policy | None = field(default=None, repr=False)

    def __post_init__(self):
        if self.use_decoupled_grad:
            raise NotImplementedError(
                "use_decoupled_grad=True is not supported: gradients have the "
                "parameters' dtype"
            )
        fp8 = self.fp8
        if fp8 is None:
            fp8 = FullyShardFP8Policy(
                self.fp8_param_gather, self.fp8_recipe, self.keep_fp8_transpose_cache
            )
            object.__setattr__(self, "fp8", fp8)
        elif not isinstance(fp8, FullyShardFP8Policy):
            raise ValueError(
                f"fp8: expected a FullyShardFP8Policy, got {type(fp8).__name__}"
            )
        object.__setattr__(self, "fp8_param_gather", fp8.enabled)
        object.__setattr__(self, "fp8_recipe", fp8.recipe)
        object.__setattr__(self, "keep_fp8_transpose_cache", fp8.keep_transpose_cache)


@dataclass(frozen=True)
class FullyShardMixedPrecisionPolicy(MixedPrecisionPolicy):
    """The same with main_params_dtype=None at first."""

    main_params_dtype: torch.dtype | None = None


@contextlib.contextmanager
def main_dtype(unit, policy):
    """Returns the unit's own parameters in the main dtype, and the policy that computes
    in the dtype that they had. After an exception they have their dtype again."""
    own = {
        p
        for m in unit.modules()
        for p in parameters_of(m).values()
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
            "one per unit: make the parameters of each dtype a separate unit"
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
