"""Errors and warnings for the user, in the form of the program."""

import os
import sys


class Failure(Exception):
    """A file's content is not what it should be."""

    code = "format"


class ConfigFailure(Failure):
    """An option is wrong, or a package is missing."""

    code = "config"


class Unreadable(Failure):
    """A file that cannot be read."""

    code = "io"


class CoreFailure(Failure):
    """An error of the C++ core. Its text starts with its code."""

    def __str__(self):
        return self.args[0].partition(" error: ")[2]

    @property
    def code(self):
        return self.args[0].partition(" error: ")[0]


def expect(condition, text, failure=ConfigFailure):
    if not condition:
        raise failure(text)


def missing(what, package):
    return ConfigFailure(
        f"{what} needs the Python package '{package}'; install it with: "
        f"{sys.executable} -m pip install {package} (this Python is {sys.executable}; "
        "name another with --python or FLATSHARD_PYTHON)"
    )


def cannot_read(path, error):
    return Unreadable(f"cannot read {path}: {getattr(error, 'strerror', '') or error}")


def warn(text):
    if os.environ.get("FLATSHARD_LOG_LEVEL") != "error":
        print(f"warning: {text}", file=sys.stderr, flush=True)
