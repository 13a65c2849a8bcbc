"""Which weights of a unit are FP8: `ShardOptions(fp8=Float8Policy(...))`."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from flatshard import _C
from flatshard._tensor.tensor_parallel import is_tensor_parallel, plain_value
from flatshard.float8.parallel_linear import why_not_cut

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
_OPTIONS = {
    "recipe": RECIPES,
    "column_plane": ("auto", "derived", "stored"),
    "gather_parts": ("unit", "recomputed", "module"),
}
# The recipes whose rows and columns have different values.
_STORES_COLUMNS = ("rowwise", "mxfp8")
_MAIN_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Float8Policy:
    """How the weights of nn.Linear layers are all-gathered and multiplied as FP8.

    Everything else about a parameter stays: sharded weights, gradients, optimizer state
    and checkpoints keep their dtypes. docs/guides/fp8.md has the costs of the options.

    Attributes:
        recipe: who shares a scale: "tensorwise", "rowwise", "blockwise" (128 x 128) or
            "mxfp8" (32 elements, E8M0).
        module_filter_fn: function of an nn.Linear and its name below the module that is
            sharded, as in torchao: returns True to use FP8. A layer that it chooses and
            that cannot be FP8 raises an error with its name. None: all that can be.
        column_plane: where the weights that the backward reads come from. "derived":
            made of the rows on each rank; "stored": quantized from the main weights and
            all-gathered, for rowwise and mxfp8. "auto": derived.
        gather_parts: the rows that a recomputation all-gathers. "unit": of the full
            unit; "recomputed": of the layers that it runs; "module": layer by layer
            always.
        keep_column_plane: the weights that the backward reads stay unsharded after it,
            until the weights change: backwards of later microbatches neither all-gather
            nor transpose. Needs memory for these weights of the full unit.
        emulate: multiply in bfloat16 where the GPU does not multiply the recipe. CPUs do
            so in any case.

    Raises:
        ValueError: an option that cannot work, naming it.
    """

    recipe: str
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None
    column_plane: str = "auto"
    gather_parts: str = "recomputed"
    emulate: bool = False
    keep_column_plane: bool = False

    def __post_init__(self):
        for name, values in _OPTIONS.items():
            if (value := getattr(self, name)) not in values:
                expected = ", ".join(map(repr, values))
                raise ValueError(f"fp8: {name}: expected {expected}, got {value!r}")
        if self.column_plane == "stored" and self.recipe not in _STORES_COLUMNS:
            raise ValueError(
                f"fp8: column_plane: 'stored' is for rowwise and mxfp8: rows and columns "
                f"of {self.recipe} have the same values; use 'auto'"
            )
        for name in ("emulate", "keep_column_plane"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"fp8: {name}: expected True or False, got {value!r}")
        if self.module_filter_fn is not None and not callable(self.module_filter_fn):
            raise ValueError(
                "fp8: module_filter_fn: expected a function of a module and its name, "
                f"got {self.module_filter_fn!r}"
            )

    def core(self) -> _C.Float8Format:
        """Returns the policy in the form that the core accepts."""
        return _C.Float8Format(
            recipe=self.recipe,
            stored_columns=self.column_plane == "stored",
            gather_parts=self.gather_parts,
            emulate=self.emulate,
        )


@dataclass(frozen=True)
class Float8CurrentScaling(Float8Policy):
    """TransformerEngine's name of Float8Policy("tensorwise")."""

    recipe: str = field(default="tensorwise", init=False)


@dataclass(frozen=True)
class Float8BlockScaling(Float8Policy):
    """TransformerEngine's name of Float8Policy("blockwise")."""

    recipe: str = field(default="blockwise", init=False)


@dataclass(frozen=True)
class MXFP8BlockScaling(Float8Policy):
    """TransformerEngine's name of Float8Policy("mxfp8")."""

    recipe: str = field(default="mxfp8", init=False)


# Reason of a weight that the policy leaves in bfloat16.
LEFT_OUT = "module_filter_fn leaves it out"


def check_policy(fp8):
    """Checks fully_shard's arguments."""
    if fp8 is None:
        return
    if not isinstance(fp8, Float8Policy):
        raise ValueError(
            f"fp8: expected a flatshard.Float8Policy or None, got {type(fp8).__name__}"
        )


def choose_weights(fp8, found, param_dtype, device):
    """Returns why each parameter is not FP8; "" for those that are.

    Args:
        fp8: Float8Policy or None.
        found: collect_parameters' result.
        param_dtype: of the unit's mp_policy.
        device: of the mesh.

    Raises:
        ValueError: FP8 together with another dtype than bfloat16, a recipe that the GPU
            does not multiply, or a chosen weight that cannot be FP8.
    """
    if fp8 is None:
        return ["its unit has no fp8"] * len(found)
    core = fp8.core()
    reasons = [
        _why_not(fp8, core, tensor, name, sites) for tensor, name, sites in found
    ]
    for (tensor, name, _), reason in zip(found, reasons):
        computes = param_dtype or tensor.dtype
        if not reason and computes != torch.bfloat16:
            raise ValueError(
                f"fp8: parameter {name} would compute in {computes}, and FP8 does so "
                "only with bfloat16: give "
                "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
            )
    if "" in reasons:
        check_device(fp8, device)
    return reasons


def check_device(fp8, device):
    if device.type == "cpu" or fp8.emulate:
        return
    if not _C.float8_multiplies(fp8.recipe, device):
        raise ValueError(
            f"fp8: {_C.float8_why_not_multiplied(fp8.recipe, device)}: use another "
            "recipe, or emulate=True (not faster than bfloat16)"
        )


def _why_not(fp8, core, tensor, name, sites):
    for module, key in sites:
        owner = module()
        kind = type(owner).__name__
        if key != "weight" or not isinstance(owner, nn.Linear):
            return f"{key} of {kind}"
        if type(owner) is not nn.Linear:
            return f"{kind} is a subclass of nn.Linear"
        if "forward" in owner.__dict__:
            return "the forward of its nn.Linear was replaced"
    chosen = fp8.module_filter_fn is not None
    if chosen and not fp8.module_filter_fn(
        sites[0][0](), name.removesuffix("weight").removesuffix(".")
    ):
        return LEFT_OUT
    reason = why_not_cut(tensor) if is_tensor_parallel(tensor) else ""
    reason = reason or core.why_not(list(plain_value(tensor).shape))
    if not reason and tensor.dtype not in _MAIN_DTYPES:
        reason = f"{tensor.dtype} is not quantized, float32 and bfloat16 are"
    if reason and chosen:
        raise ValueError(
            f"fp8: module_filter_fn chose {name}, but it cannot be {fp8.recipe}: {reason}; "
            "let it return False there"
        )
    return reason
