"""The parameters of one unit."""

from dataclasses import dataclass, field

import torch

from flatshard._fsdp.former import retire
from flatshard._tensor.writes import Seen
from flatshard.torch_versions import grad_dtype_of


@dataclass(eq=False, repr=False)
class Parameters:
    """The parameters of one unit, in the order of its core.

    Attributes:
        own: those with a place in the core, by which it is also indexed.
    """

    own: list
    # Parameters of subclasses: they choose what is all-gathered. The trained ones are in
    # `own`, too, since the core has their gradients.
    extended: list = field(default_factory=list)
    # Places of ignored_params: no unit has them, and a forward need not refuse them.
    ignored: list = field(default_factory=list)
    # The units on a part of the mesh that joined this one: it keeps their cores.
    joined: list = field(default_factory=list)
    # Where the core has its shards. Parameters on another device have to return there.
    home: torch.device | None = None
    # Tensors from before fully_shard may still be read: values did not change since.
    has_formers: bool = True
    # The load_state_dict that runs puts other tensors into the modules.
    loads_by_assign: bool = False
    # By others, after which the core has to read the shards again.
    writes: Seen = field(default_factory=Seen)

    def __iter__(self):
        return iter(self.own)

    def __len__(self):
        return len(self.own)

    def __getitem__(self, index):
        return self.own[index]

    @property
    def all(self):
        """Returns all parameters, including those without a place in the core."""
        return self.own + [p for p in self.extended if p.index < 0]

    @property
    def shards(self):
        return [p.shard for p in self.own]

    def refuse_extended(self, what, instead):
        """Refuses tensors of subclasses, for a function that does not support them."""
        for p in self.extended:
            name = p.names[0] if p.names else p.title
            raise NotImplementedError(
                f"{what}: parameter {name} is a tensor of a subclass. This is not "
                f"supported; {instead}"
            )

    # -- changes since the core was made -----------------------------------------------

    def misfits(self, keeps_rows):
        """Returns the parameters that need another core. Unless the unit keeps its rows
        these include the ones that were frozen."""
        return [p for p in self.own if not p.fits(keeps_rows)]

    def can_evaluate(self):
        """Returns whether a forward without gradients can run. Which parameters are trained
        does not matter: peft's disable_adapter() freezes adapters while it lasts."""
        return all(p.has_dtype() for p in self.own)

    def check_grad_dtypes(self):
        for p in self.own:
            dtype = grad_dtype_of(p.shard)
            if dtype != p.shard.dtype:
                raise NotImplementedError(
                    f"grad_dtype {dtype} of parameter {p.names[0]} is not supported: its "
                    f"gradient has its own dtype, {p.shard.dtype}. For another dtype on "
                    "the wire give MixedPrecisionPolicy(reduce_dtype=...)"
                )

    def follow_requires_grad(self):
        """Makes unsharded parameters require gradients where the shards do."""
        for p in self.extended:
            if p.shard.requires_grad != p.extension.requires_grad:
                raise NotImplementedError(
                    f"requires_grad of parameter {p.names[0]}, a tensor of a subclass, was "
                    "changed after fully_shard. This is not supported; change it before"
                )
        for p in self.own:
            # A transform of torch.func refuses the call.
            if p.whole.requires_grad != p.shard.requires_grad:
                p.whole.requires_grad_(p.shard.requires_grad)

    # -- values ------------------------------------------------------------------------

    def forget_digests(self):
        """Drops the digests, because the values have changed."""
        for p in self.own:
            p.digest = None

    def check_have_values(self):
        empty = [p for p in self.all if p.on_meta]
        found = [p.names[0] if p.names else p.label for p in empty]
        if found:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, "
                f"but the following were still on meta device: {found}. Call "
                f"model.to_empty(device='{self.home.type}'), and then flatshard."
                "reset_parameters(model), or load a checkpoint"
            )

    def retire_formers(self):
        """Makes the tensors that fully_shard replaced raise errors. Called when their values
        are out of date, or the shards are to be trained."""
        if self.has_formers:
            self.has_formers = False
            for p in self.all:
                retire(p)

    def retire_trained_formers(self):
        for p in self.all:
            if p.shard.requires_grad:
                retire(p)
