"""The command lines of the benchmarks. Options that several of them have are in OPTIONS."""

import argparse
from pathlib import Path

# name: (default, further arguments of add_argument)
OPTIONS = {
    "program": ("build/flatshard", {"help": "the trainer"}),
    "config": ("examples/llama3_8b.toml", {"help": "its configuration"}),
    "set": (
        [],
        {
            "nargs": "*",
            "action": "extend",
            "metavar": "SECTION.KEY=VALUE",
            "help": "further settings for the trainer",
        },
    ),
    "nproc": (1, {"help": "GPUs, a rank each"}),
    "seq": (2048, {"help": "tokens of a sequence"}),
    "warmup": (4, {"help": "steps before the measured ones"}),
    "steps": (8, {"help": "measured steps"}),
    "pairs": (5, {"help": "runs of each, alternating"}),
    "out": (
        Path("outputs"),
        {"type": Path, "help": "where results and logs are written"},
    ),
    "json": ("", {"help": "a file for the figures"}),
    "trace": (
        None,
        {"type": Path, "help": "where Chrome traces of a further step are written"},
    ),
    "tiny": (False, {"help": "sizes that try the script on CPUs and measure nothing"}),
    "to": (None, {"type": Path, "required": True, "help": "the folder to write to"}),
}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and adds each option's default to its help."""

    def _get_help_string(self, action):
        silent = any(action.default is value for value in (None, False, True))
        if silent or action.default in ("", [], argparse.SUPPRESS):
            return action.help
        return action.help if "%" in action.help else f"{action.help} [%(default)s]"


class Parser(argparse.ArgumentParser):
    """Parses the options of one benchmark and prints its docstring as the help text."""

    def __init__(self, doc, **more):
        super().__init__(description=doc, formatter_class=_Formatter, **more)

    def options(self, *names, **defaults):
        """Adds options: `names` with the defaults of OPTIONS, and others with their own.

        The default gives the kind of an option: a number, a text, a flag (False), or one or
        more of a kind (a list).
        """
        for name, default in {**dict.fromkeys(names), **defaults}.items():
            usual, settings = OPTIONS.get(name, (None, {}))
            default = usual if default is None else default
            settings = {"help": "[%(default)s]", "default": default, **settings}
            if default is False:
                settings["action"] = "store_true"
            elif isinstance(default, list) and default:
                settings |= {"nargs": "+", "type": type(default[0])}
            elif default is not None and "nargs" not in settings:
                settings.setdefault("type", type(default))
            self.add_argument("--" + name.replace("_", "-"), **settings)
        return self
