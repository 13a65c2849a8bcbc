"""Which writes to sharded parameters the core of one model was told of."""

from flatshard._tensor.writes import writes


class SeenWrites:
    """Tells the core's units that somebody wrote their parameters.

    Attributes:
        number: of Writes.count and Writes.single, as far as they were seen.
    """

    def __init__(self):
        self.number = -1
        self._with_looks = -1

    def before_forward(self, units):
        number = writes.number_with_looks()
        self.number = number - writes.looks
        if number == self._with_looks:
            return
        self._with_looks = number
        for unit in units:
            seen = writes.count, unit.num_writes, unit.num_looks
            if seen != unit.seen_writes:
                unit.seen_writes = seen
                unit.core.mark_written()

    def before_backward(self, units):
        """Looks that may have been writes do not count."""
        number = writes.number()
        if number == self.number:
            return
        self.number = number
        for unit in units:
            if _sees_writes(unit):
                unit.core.mark_written()

    @staticmethod
    def before_inner_forward(runtime, unit):
        """Before a forward of `unit` inside of another, when somebody wrote shards since
        that one began: weights that were gathered ahead are older."""
        writes.number()
        if runtime.in_forward() and _sees_writes(unit):
            unit.core.mark_written()
            runtime.weights_written(unit.id)


def _sees_writes(unit):
    """Whether there were any since it was asked last."""
    seen = writes.count, unit.num_writes
    if seen == unit.seen_writes[:2]:
        return False
    unit.seen_writes = (*seen, unit.num_looks)
    return True
