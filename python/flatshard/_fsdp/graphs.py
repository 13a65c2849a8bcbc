"""The CUDA graphs of a model's units."""

from flatshard import _C
from flatshard._graphs.checks import (
    DEFAULT_WARMUP_STEPS,
    audits_graphs,
    emulates_on_cpu,
)
from flatshard._graphs.end import drop_before_groups


class Graphs:
    """The graphs of ShardOptions(cuda_graph=True), and what they ask of buffers.

    Attributes:
        enabled: some unit has them.
        buffers_on_demand: option of the core.
    """

    def __init__(self, units, buffers_on_demand):
        graphed = [u.sharding for u in units if u.sharding.options.cuda_graph]
        steps = [sharding.graph_warmup_steps for sharding in graphed]
        self.enabled = bool(steps)
        self._warmup_steps = max(steps, default=DEFAULT_WARMUP_STEPS)
        self._runtime = None
        if self.enabled and buffers_on_demand:
            raise ValueError(
                "buffers_on_demand: expected None or False for the root of a model with "
                "cuda_graph=True, got True: a graph needs weights and gradients at the "
                "same addresses in every step"
            )
        asked = buffers_on_demand
        self.buffers_on_demand = not self.enabled if asked is None else asked

    def options(self):
        return _C.GraphOptions(
            enabled=self.enabled,
            warmup_steps=self._warmup_steps,
            audit=audits_graphs(),
            emulate_on_cpu=self.enabled and emulates_on_cpu(),
        )

    def begin(self, runtime):
        self._runtime = runtime
        if self.enabled:
            drop_before_groups(self)

    def stats(self):
        return self._runtime.graph_stats()

    def reset(self):
        self._runtime.reset_graphs()
