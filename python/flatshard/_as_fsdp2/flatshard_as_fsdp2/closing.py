"""The closing line of rank 0, and `require`.

The first Python process of a command gives a file to the processes below it. A process
adds a line to it when it shards its first module. So the first process can report at
its end that none did, whatever launches the ranks.
"""

import atexit
import gc
import io
import os
import sys
import tempfile

_PREFIX = "flatshard.as_fsdp2:"
_NEVER = f"{_PREFIX} fully_shard was never called: nothing ran on Flatshard"
# pid of the first process, and the file.
_VARIABLE = "FLATSHARD_AS_FSDP2_FIRST"
# The rank, by whatever started this process.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

_units: list[str] = []  # the strategy of each unit


def count_unit(strategy, rank):
    """Counts a unit of this process."""
    if not _units:
        pid, _, path = os.environ.get(_VARIABLE, "").partition(":")
        if path:
            with open(path, "a") as file:
                file.write(f"{rank}\n")
        if rank == 0:
            _report_at_end()
    _units.append(strategy)


def _report_at_end():
    # Imported here: it is slow, and most processes shard nothing.
    from multiprocessing.util import Finalize

    # This also runs at the end of processes that multiprocessing forks.
    Finalize(None, _report_units, exitpriority=0)


def _report_units():
    kinds = ", ".join(dict.fromkeys(_units))
    units = "1 unit" if len(_units) == 1 else f"{len(_units)} units"
    print(f"{_PREFIX} {units}, {kinds}", file=sys.stderr, flush=True)


def report_at_end(require):
    """Lets this process report at its end if no process below it sharded anything."""
    pid, _, path = os.environ.get(_VARIABLE, "").partition(":")
    if path and pid != str(os.getpid()):
        return  # a process below the first one
    if not path:
        handle, path = tempfile.mkstemp(prefix="flatshard-as-fsdp2-")
        os.close(handle)
        os.environ[_VARIABLE] = f"{os.getpid()}:{path}"
    atexit.register(_report_never, os.getpid(), path, require)


def _report_never(pid, path, require):
    if os.getpid() != pid:
        return
    sharded = _units or os.path.getsize(path) > 0
    os.remove(path)
    if sharded:
        return
    if all(os.environ.get(name, "0") == "0" for name in _RANKS):
        print(_NEVER, file=sys.stderr, flush=True)
    if require:
        _flush_files()
        os._exit(1)  # at this point nothing else changes the exit status


def _flush_files():
    for file in gc.get_objects():
        if isinstance(file, (io.TextIOWrapper, io.BufferedWriter)) and not file.closed:
            file.flush()
