"""Reports writes to sharded parameters to the core of one model."""

from flatshard._tensor.writes import writes


class SeenWrites:
    """Marks the core's units whose parameters were written since they were marked last.

    Attributes:
        number: Writes.total that was seen last.
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
            own = unit.parameters.writes
            seen = writes.count, own.count, own.looks
            if seen != own.marked:
                own.marked = seen
                unit.mark_written()

    def before_backward(self, units):
        """Leaves out looks that may have been writes."""
        number = writes.number()
        if number == self.number:
            return
        self.number = number
        for unit in units:
            if _sees_writes(unit):
                unit.core.mark_written()

    @staticmethod
    def before_inner_forward(unit):
        """Marks weights that were all-gathered ahead as out of date if shards were written
        since the outer forward started. Called before a forward of `unit` inside it."""
        writes.number()
        if unit.core.in_forward() and _sees_writes(unit):
            unit.mark_written()
            unit.core.weights_written()


def _sees_writes(unit):
    """Returns whether there were any since the last call."""
    own = unit.parameters.writes
    seen = writes.count, own.count
    if seen == own.marked[:2]:
        return False
    own.marked = (*seen, own.looks)
    return True
