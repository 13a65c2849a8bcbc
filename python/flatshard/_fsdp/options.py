"""Options that FSDP2 does not have: `ShardOptions` of one `fully_shard` call, and
`ModelOptions` of a model."""

import warnings
from dataclasses import InitVar, dataclass
from typing import Any

from flatshard.float8.policy import Float8Policy, check_policy


def _expect(what, name, value, fits, expected):
    if not fits:
        raise ValueError(f"{what}: {name}: expected {expected}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options of one `fully_shard` call that FSDP2 does not have.

    Attributes:
        outer: what the outer of two mesh dimensions does. "replicate": replicas (HSDP).
            "optim", with ZeRO-3: the optimizer state is sharded over it as well (HFSDP),
            and parameters are DTensors over the flattened mesh.
        granularity: where parameters may be split. "dim0": between any two slices along
            their first dimension. "chunk": as torch.chunk splits them, so each rank has
            the rows that it has with FSDP2, for programs that read shapes of to_local().
            The unit is then all-gathered by one collective per parameter. "tensor": each
            parameter is stored on a single rank, without a split.
        grads_in_place: the backward of each nn.Linear (not of subclasses) writes weight
            gradients into the memory that is reduced, without another tensor and
            without a copy. None: for the nn.Linear of the unit whose weights are not tied.
            True: for tied weights as well. False: for none. Compiled code, autocast and
            unsharded weights with hooks use autograd's gradients.
        cuda_graph: after three steps, the forward and the backward of the module are
            captured as CUDA graphs and replayed, with bitwise identical results. Only
            for modules that contain no other unit. Calls that cannot be replayed run
            eagerly, see `cuda_graph_stats`. GPUs only.
        check_same_values: the first forward compares a digest of each parameter among
            the ranks of the mesh and raises RuntimeError where they differ. Parameters
            on the meta device and parameters that were written since are left out.
            False: the ranks differ on purpose.
        int8_states: shards consist of full blocks of 256 elements, as int8 states of
            `flatshard.optim.AdamW` require. None: where slices along the first dimension
            of parameters of at least 4096 elements are multiples of 32 elements, so that
            padding is negligible. True: in any unit. False: in none.
        fp8: the weights of nn.Linear (not of subclasses) are all-gathered and multiplied
            as FP8. Needs `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.

    Raises:
        ValueError: a value that is not allowed, naming the option.
    """

    outer: str = "replicate"
    granularity: str = "dim0"
    grads_in_place: bool | None = None
    cuda_graph: bool = False
    check_same_values: bool = True
    int8_states: bool | None = None
    fp8: Float8Policy | None = None

    def __post_init__(self):
        def expect(name, fits, expected):
            _expect("options", name, getattr(self, name), fits, expected)

        outers = ("replicate", "optim")
        expect("outer", self.outer in outers, "'replicate' or 'optim'")
        expect(
            "granularity",
            self.granularity in ("dim0", "chunk", "tensor"),
            "'dim0', 'chunk' or 'tensor' (DTensors cannot express others)",
        )
        for name in ("grads_in_place", "int8_states"):
            fits = getattr(self, name) is None or isinstance(getattr(self, name), bool)
            expect(name, fits, "True, False or None")
        for name in ("cuda_graph", "check_same_values"):
            expect(name, isinstance(getattr(self, name), bool), "True or False")
        check_policy(self.fp8)
        if self.granularity == "chunk" and self.fp8 is not None:
            raise NotImplementedError(
                "options: granularity 'chunk' is not supported with fp8, because the scales "
                "determine where a weight can be split; leave one of them out"
            )

    def core(self) -> dict[str, Any]:
        """Returns the arguments of _C.UnitOptions that these options determine."""
        return {
            "float8": self.fp8.core() if self.fp8 else None,
            "int8_states": self.int8_states,
        }


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a model, see `configure`.

    Attributes:
        prefetch: the number of units that are all-gathered ahead of the one that computes.
            None: 1.
        copy_engines: "all": all-gathers and reduce-scatters are copies between the ranks'
            memory instead of collectives, and use no SM of a GPU. All ranks have to be on
            one host. "auto": copies where NVLink connects all GPUs of the mesh. "none":
            collectives. Copies need memory for a shard in the unsharded weights' dtype,
            and 256 MiB per GPU.
        buffers_on_demand: True: memory of unsharded parameters and gradients is allocated
            when a unit needs it. False: it stays allocated, at the same addresses in
            each step, as torch.compile(mode="reduce-overhead") needs it. None: True,
            and False where a unit has cuda_graph=True.
        max_padding: the first forward warns of more padding than this fraction of the
            model's elements, if it is more than 64 MiB per rank. None: 0.05.

    Raises:
        ValueError: a value that is not allowed, naming the option.
    """

    prefetch: int | None = None
    copy_engines: str = "auto"
    buffers_on_demand: bool | None = None
    max_padding: float | None = None
    # The former name of buffers_on_demand.
    slots_on_demand: InitVar[bool | None] = None

    def __post_init__(self, slots_on_demand):
        if slots_on_demand is not None:
            warnings.warn(
                "ModelOptions: slots_on_demand is deprecated and will be removed in the "
                "next version; use buffers_on_demand",
                FutureWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "buffers_on_demand", slots_on_demand)

        def expect(name, fits, expected):
            _expect("ModelOptions", name, getattr(self, name), fits, expected)

        expect(
            "prefetch",
            self.prefetch is None
            or (type(self.prefetch) is int and self.prefetch >= 0),
            "a number of units >= 0, or None",
        )
        choices = ("none", "auto", "all")
        expect("copy_engines", self.copy_engines in choices, "'none', 'auto' or 'all'")
        asked = self.buffers_on_demand
        on_demand = asked is None or isinstance(asked, bool)
        expect("buffers_on_demand", on_demand, "True, False or None")
        padding = self.max_padding
        expect("max_padding", padding is None or padding >= 0, "a number >= 0, or None")

    def core(self) -> dict[str, Any]:
        """Returns the arguments of _C.RuntimeOptions that these options determine."""
        return {"prefetch": 1 if self.prefetch is None else self.prefetch}
