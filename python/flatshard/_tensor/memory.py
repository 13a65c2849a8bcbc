"""The memory behind a DTensor."""


def local_of(tensor):
    """This rank's rows as they are. `to_local()` has a history, and counts as a look that
    may become a write (writes.py)."""
    return tensor._local_tensor


def address_of(tensor):
    """Of the storage that this rank's rows lie in: the same for all views of it, also
    where it has no memory, of which data_ptr() gives 0."""
    return tensor._local_tensor.untyped_storage()._cdata
