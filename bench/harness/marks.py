"""Seconds of the parts of a program's start."""

import os
import time
from pathlib import Path

_ends = {}


def mark(part):
    """Ends a part. The first part starts with the process."""
    _ends[part] = time.clock_gettime(time.CLOCK_BOOTTIME)


def parts():
    """Returns the seconds of each part."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, found = int(stat[19]) / os.sysconf("SC_CLK_TCK"), {}
    for part, end in _ends.items():
        found[part], begin = round(end - begin, 2), end
    return found
