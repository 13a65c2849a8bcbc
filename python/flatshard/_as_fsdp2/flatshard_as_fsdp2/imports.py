"""Calls functions right after modules were imported."""

import importlib.util
import sys


class AfterImport:
    """Calls `then[name](module)` once the module `name` was imported."""

    def __init__(self, then):
        self.then = dict(then)
        for name in [n for n in self.then if n in sys.modules]:
            self.then.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        call = self.then.pop(name, None)
        if call is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            call(module)

        spec.loader.exec_module = exec_module
        return spec
