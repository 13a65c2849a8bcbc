"""Chrome traces of the trainer and of torch.profiler."""

import gzip
import json
from pathlib import Path


def events_of(path):
    """Returns all events of a trace, also of a compressed one (.gz)."""
    content = Path(path).read_bytes()
    if str(path).endswith(".gz"):
        content = gzip.decompress(content)
    return json.loads(content)["traceEvents"]


def span_of(event):
    """Returns the start and end of an event in microseconds."""
    return event["ts"], event["ts"] + event["dur"]
