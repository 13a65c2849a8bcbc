"""Megatron-FSDP's FP8 options as a Float8Policy."""

from dataclasses import dataclass

import torch

from flatshard.float8.policy import RECIPES, Float8Policy


@dataclass(frozen=True)
class FullyShardFP8Policy:
    """FP8 weights of nn.Linear layers, in Megatron-FSDP's words.

    Attributes:
        enabled: whether there are any.
        recipe: "tensorwise", "blockwise" or "mxfp8"; also "rowwise". "mxfp8" stores
            rows and columns, and all-gathers each separately.
        keep_transpose_cache: weights for the backward stay unsharded until they
            change, see Float8Policy.keep_column_plane.
        emulate: see Float8Policy.emulate.
    """

    enabled: bool = False
    recipe: str | None = None
    keep_transpose_cache: bool = False
    emulate: bool = False


def float8_policy(policy, keep_transpose_cache=False, fine_grained=None):
    """Returns the Float8Policy that these ask for; None: no FP8.

    Args:
        policy: Megatron's MixedPrecisionPolicy.
        keep_transpose_cache: of the first version, in addition to the policy's own.
        fine_grained: enable_fine_grained_param_gather. None: a recomputation all-gathers
            the layers that it runs; True: every all-gather is of one layer; False: every
            all-gather is of a full unit.

    Raises:
        ValueError, NotImplementedError: naming the option.
    """
    fp8 = policy.fp8
    if fine_grained not in (None, True, False):
        raise ValueError(
            "enable_fine_grained_param_gather: expected True, False or None, got "
            f"{fine_grained!r}"
        )
    if not fp8.enabled:
        _refuse_without_fp8(keep_transpose_cache)
        return None
    if fp8.recipe == "delayed":
        raise NotImplementedError(
            "fp8_recipe='delayed' is not supported, because scales are computed from the "
            "current weights; use 'tensorwise'"
        )
    if fp8.recipe not in RECIPES:
        expected = ", ".join(map(repr, RECIPES))
        raise ValueError(f"fp8_recipe: expected {expected}, got {fp8.recipe!r}")
    return Float8Policy(
        fp8.recipe,
        column_plane="stored" if fp8.recipe == "mxfp8" else "auto",
        gather_parts={None: "recomputed", True: "module", False: "unit"}[fine_grained],
        emulate=fp8.emulate,
        keep_column_plane=keep_transpose_cache or fp8.keep_transpose_cache,
    )


def check_dtype(fp8, mp_policy, unit):
    """Checks that the other dtype is bfloat16, the only one that FP8 supports."""
    if fp8 is not None and mp_policy.param_dtype != torch.bfloat16:
        raise ValueError(
            f"fp8_param_gather: expected a {type(unit).__name__} in torch.bfloat16, got "
            f"{mp_policy.param_dtype}: call bfloat16() on it before; its main parameters "
            "are of main_params_dtype"
        )


def _refuse_without_fp8(keep_transpose_cache):
    if keep_transpose_cache:
        raise ValueError(
            "keep_fp8_transpose_cache: there are no FP8 weights; leave it out, or give "
            "mixed_precision_policy=MixedPrecisionPolicy(fp8_param_gather=True, "
            "fp8_recipe=...)"
        )
