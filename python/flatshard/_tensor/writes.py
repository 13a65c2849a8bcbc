"""Code that may have written sharded parameters."""

import weakref

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatshard._tensor.memory import address_of, local_of


class Seen:
    """Writes of others to the parameters of one unit, and looks at them.

    Attributes:
        count: of writes.
        looks: at plain tensors that share their memory.
        marked: Writes.count, `count` and `looks` when its core was marked last.
        lists: Writes.lists when the unit was made.
    """

    __slots__ = "count", "looks", "marked", "lists"

    def __init__(self):
        self.count = self.looks = 0
        self.marked = ()
        self.lists = writes.lists


class Writes:
    """Notices that somebody may have written sharded parameters.

    Tensor versions do not show it: DTensor's operations work below the level that
    counts them. So operations in place and steps of torch's optimizers are counted.
    `to_local()` returns a plain tensor. Its versions do show writes, but not writes
    through its own `.data`. Before a backward only those writes count that surely
    happened. Before a forward every look counts, too. This costs at most a cast.
    """

    def __init__(self):
        self.count = 0  # of writes that may be to any unit
        self.total = 0  # and those to one unit alone, by which its Seen.count rose
        self.units = {}  # weak references, by the address of the memory of a parameter
        self.written = set()  # addresses that were written directly
        self.lists = 0  # writes to several at once
        self.looks = 0  # at plain tensors that share the memory of a shard
        self.lent = {}  # those tensors, by address: (tensor, its version then)
        self._stepping = False  # in an optimizer, as far as is known
        self._left_to_step = False  # writes to lists, for note_step to count
        self._units_of = weakref.WeakKeyDictionary()  # of an optimizer's parameters

    def note(self, tensor):
        if not isinstance(tensor, (list, tuple)):
            unit = self.unit_of(tensor)
            if unit is not None:
                self.note_unit(unit)
                self.written.add(address_of(tensor))
        elif tensor and self.unit_of(tensor[0]) is not None:  # foreach: of parameters
            self.lists += 1
            if self._stepping:
                self._left_to_step = True
                return
            for unit in filter(None, map(self.unit_of, tensor)):
                self.note_unit(unit)

    def note_look(self, tensor):
        """Notes that somebody gets a plain tensor that shares the memory of
        `tensor`."""
        unit = self.unit_of(tensor)
        if unit is not None:
            unit.parameters.writes.looks += 1
            self.looks += 1
            local = local_of(tensor)
            # The counter that autograd checks has no public name.
            self.lent.setdefault(address_of(tensor), (local, local._version))

    def note_written_looks(self):
        """Notes the views of `note_look` that were written since."""
        for address, (local, version) in list(self.lent.items()):
            if local._version != version:
                del self.lent[address]
                reference = self.units.get(address)
                if reference is not None and (unit := reference()) is not None:
                    self.note_unit(unit)
                    self.written.add(address)

    def note_before_step(self, optimizer, args, kwargs):
        self._give_up_step()
        self._stepping = True

    def note_step(self, optimizer, args, kwargs):
        self._stepping = self._left_to_step = False
        self.lists += 1
        if getattr(optimizer, "writes_through_core", False):
            return
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        ids = [id(tensor) for tensor in tensors]
        known, units = self._units_of.get(optimizer, (None, None))
        if known != ids:
            units = {id(u): weakref.ref(u) for u in map(self.unit_of, tensors) if u}
            self._units_of[optimizer] = ids, units
        for reference in units.values():
            if (unit := reference()) is not None:
                self.note_unit(unit)

    def note_unit(self, unit):
        """Records that parameters of this unit were written or replaced."""
        unit.parameters.writes.count += 1
        self.total += 1

    def number(self):
        """Rises with every write: to any unit (`count`, up to date from here on), or to
        a single one (its `Seen.count`)."""
        self._give_up_step()
        if self.lent:
            self.note_written_looks()
        return self.total

    def number_with_looks(self):
        """Rises with every look, too (a unit's `Seen.looks`), because a look may have been
        a write that left no trace."""
        number = self.number() + self.looks
        self.lent.clear()
        return number

    def _give_up_step(self):
        """Counts the writes of an optimizer's step that failed, or that calls the model
        after it wrote."""
        if self._left_to_step:
            self._stepping = self._left_to_step = False
            self.count += 1
            self.total += 1

    def unit_of(self, tensor):
        """Returns the unit whose parameter's memory `tensor` has, or None."""
        if not isinstance(tensor, DTensor):
            return None
        reference = self.units.get(address_of(tensor))
        return None if reference is None else reference()

    def add(self, unit, tensors):
        addresses = [address_of(tensor) for tensor in tensors]
        reference = weakref.ref(unit)
        self.units.update(dict.fromkeys(addresses, reference))
        weakref.finalize(unit, self._forget_unit, addresses, reference)

    def remove(self, tensors):
        self._forget([address_of(tensor) for tensor in tensors])

    def _forget_unit(self, addresses, reference):
        # A unit may be collected long after its memory was given to others.
        self._forget([a for a in addresses if self.units.get(a) is reference])

    def _forget(self, addresses):
        for address in addresses:
            self.units.pop(address, None)
            self.written.discard(address)
            self.lent.pop(address, None)


writes = Writes()
register_optimizer_step_pre_hook(writes.note_before_step)
register_optimizer_step_post_hook(writes.note_step)
