"""The link of a unit to C++: its shards, and its calls while a Root has it."""

from flatshard import _C
from flatshard._tensor.pieces import beside, rows_of
from flatshard.torch_versions import default_reduce_dtype


class Core(_C.Unit):
    """A unit in C++. Its parameters have the numbers `index` of Parameter.

    Attributes:
        number: of the unit in its Root, 0 for the outermost; -1: it never had one.
        runtime: _C.Runtime of the Root that has the unit, or None.
        grads: _C.GradViews. They set `.grad` of the shards.
        linear: method of the runtime; None without a Root.
        forward_begin, forward_end: methods of the runtime. Their unit is `number`.
    """

    # Attributes of a subclass in C++ are four times as slow without slots.
    __slots__ = (
        "number",
        "runtime",
        "grads",
        "gathers_extended",
        "linear",
        "forward_begin",
        "forward_end",
    )

    def __init__(self, members, mesh, options):
        super().__init__(members=members, mesh=mesh, options=options)
        self.number = -1
        self.runtime = None
        self.grads = None
        self.gathers_extended = False
        self.linear = None

    # -- parameters ----------------------------------------------------------------

    def make_grads(self, shards):
        self.grads = _C.GradViews(self, shards, beside, rows_of)

    def name(self, unit_name, parameters):
        """Gives the core the names that parameters have in the model."""
        hidden = self.num_parameters - len(parameters)
        names = [p.names for p in parameters] + [
            [f"gathered {i}"] for i in range(hidden)
        ]
        self.set_names(unit_name, names)
        for p in parameters:
            if text := _error_of_access(p):
                self.set_access_error(p.index, text)

    def gather_extended(self, extended, mesh, options):
        """All-gathers the tensors that parameters of subclasses choose."""
        if not extended or self.gathers_extended:
            return
        self.gathers_extended = True
        members = [m for p in extended for m in p.extension.members()]
        first = self.num_parameters
        self.join(_C.Unit(members=members, mesh=mesh, options=options))
        for p in extended:
            trained = p.index >= 0
            first = p.extension.own(self, first, p.whole if trained else None)
            if not trained:
                p.whole = p.extension.hidden[0]

    def apply(self, policy):
        """Applies the settings of its gradients."""
        if policy.divide_factor is not None:
            self.set_divisor(policy.divide_factor)
        self.set_sums_only(policy.sums_only)
        self.set_reduced_hook(policy.reduced_hook)

    # -- in a Root -----------------------------------------------------------------

    def begin(self, runtime, number):
        """Makes the unit number `number` of a Root's `runtime`."""
        self.runtime, self.number = runtime, number
        # Each forward calls these, with the number: a lookup less, and a frame.
        self.linear = runtime.linear
        self.forward_begin = runtime.forward_begin
        self.forward_end = runtime.forward_end

    def end(self):
        self.runtime = self.linear = self.forward_begin = self.forward_end = None

    def forward_error(self):
        self.runtime.forward_error(self.number)

    def in_forward(self):
        return self.runtime.in_forward()

    def keeps_inner(self, output):
        self.runtime.keeps_inner(self.number, output)

    def weights_written(self):
        self.runtime.weights_written(self.number)

    def gathered_written(self):
        self.runtime.gathered_written(self.number)

    def main_grad(self, whole):
        return self.runtime.main_grad(whole)

    def graph_forward(self, **call):
        return self.runtime.graph_forward(self.number, **call)

    def graph_ran(self, inputs, outputs):
        self.runtime.graph_ran(self.number, inputs, outputs)

    def unshard(self, awaits=True):
        self.runtime.unshard(self.number, awaits)

    def reshard(self):
        """Does nothing without a Root, where nothing is unsharded."""
        if self.runtime is not None:
            self.runtime.reshard(self.number)

    def show_shards(self):
        """Lets modules show the shards, as they do when no forward or backward runs.
        Frees nothing."""
        if self.runtime is not None:
            self.runtime.show_shards(self.number)

    def set_policy(self, policy, keeps):
        self.runtime.set_policy(self.number, policy)
        self.runtime.set_keeps(self.number, keeps)


def make_core(parameters, values, mp_policy, mesh, options):
    """Makes the Core of `parameters`.

    Args:
        values: the unsharded value of each parameter, as the core stores it.
        mesh: _C.Mesh of the model.
        options: _C.UnitOptions.
    """
    members = []
    for p, value in zip(parameters, values):
        reduce_dtype = mp_policy.reduce_dtype or default_reduce_dtype(
            p.param_dtype, value.dtype
        )
        members.append(
            _C.Member(
                name=p.label,
                whole=p.whole,
                values=value,
                compute_dtype=p.param_dtype,
                reduce_dtype=reduce_dtype,
                float8=p.float8,
                trainable=p.trainable,
                has_weights=p.extension is None,
                apart=p.apart,
                granularity=p.granularity,
                float32_states=p.is_embedding(),
            )
        )
    return Core(members, mesh, options)


def _error_of_access(p):
    """Returns the error of reading an unsharded parameter, or a view of it, while it has
    no memory; "" for one that never has any."""
    if p.float8:
        return (
            f"parameter {p.names[0]} is stored in FP8 and has no values that can be "
            "read: only the forward of its nn.Linear computes with it. Exclude it "
            "by Float8Policy's module_filter_fn if other code reads it, as the CUDA "
            "graphs of torch.compile's mode='reduce-overhead' do (cuda_graph=True "
            "has graphs for it); shards are in parameters(), outside a forward"
        )
    if not p.whole.numel():
        return ""
    return (
        f"parameter {p.names[0]} is resharded: it is unsharded only while its "
        "unit computes, and freed with its model. Read it in the unit's forward "
        "or after unshard() of the unit, read the shard in parameters(), and "
        "keep the model until backward() is done. A view of it (a row, a slice, "
        "detach()) that a forward returns or stores needs a clone()"
        ". If a backward reads it, the unit's forward did not return the tensor where this "
        "backward starts, or returned it in an object that does not show it, such as a "
        "queue: return the tensor itself"
    )
