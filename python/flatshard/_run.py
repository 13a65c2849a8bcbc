"""Runs a module of this package as the program `flatshard` does, without the imports of
the package itself, because these need torch: _run.py MODULE [arguments]."""

import os
import runpy
import sys
import types

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # Nothing is imported from this folder's top or from the working folder.
    own = {"", ".", here, os.path.dirname(os.path.realpath(__file__))}
    sys.path[:] = [path for path in sys.path if path not in own]
    package = types.ModuleType("flatshard")
    package.__path__ = [here]
    sys.modules["flatshard"] = package
    module = f"flatshard.{sys.argv.pop(1)}"
    runpy.run_module(module, run_name="__main__", alter_sys=True)
