"""The wheel requires the torch that it is built with, since the extension fits no
other: scikit-build-core asks here for the metadata of pyproject.toml's `dynamic`."""

from importlib.metadata import version

__all__ = ["dynamic_metadata"]


def dynamic_metadata(field, settings=None):
    if field != "dependencies":
        raise ValueError(f"expected the field dependencies, got {field}")
    return [f"torch=={version('torch')}"]
