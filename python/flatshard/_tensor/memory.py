"""The memory of a DTensor."""


def local_of(tensor):
    """Returns this rank's rows. `to_local()` has a history, and counts as a look that may
    become a write (writes.py)."""
    return tensor._local_tensor


def storage_of(tensor):
    """Returns what identifies the storage object of a plain tensor."""
    return tensor.untyped_storage()._cdata


def address_of(tensor):
    """Returns the address of the storage object of this rank's rows: equal for all views,
    and unique where data_ptr() is 0 since a rank has no rows."""
    return storage_of(tensor._local_tensor)
