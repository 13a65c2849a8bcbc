"""Prepares each Python process below `python -m flatshard.as_fsdp2 COMMAND`.

That command puts this folder first in PYTHONPATH. The environment's own sitecustomize,
if there is one, runs as well.
"""

import importlib.machinery
import importlib.util
import os
import sys

from flatshard_as_fsdp2 import start


def _run_own():
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


start.from_environment()
_run_own()
