"""Returns the fields of a wheel's metadata that depend on the torch of the build:
scikit-build-core asks here for the fields that pyproject.toml lists as `dynamic`.

The extension and the program fit one minor version of torch, so the wheel requires it,
and the version's label names it: 0.2.0+cu130torch2.11, or cputorch2.11 without CUDA.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cuda_choice  # noqa: E402

__all__ = ["dynamic_metadata"]

# build_backend.py clears it for a source distribution because that fits every torch.
for_wheel = True


def torch_folder():
    """Finds the torch package of the Python that runs the build. Does not import it."""
    return Path(find_spec("torch").submodule_search_locations[0])


def torch_minor(torch):
    """Returns `2.11` of the torch package in a folder."""
    text = (torch / "version.py").read_text()
    return re.search(r"__version__ = '(\d+\.\d+)", text).group(1)


def label(torch, with_cuda):
    """Returns the local version label of what is built with this torch."""
    cuda = cuda_choice.torch_cuda(torch) if with_cuda else None
    device = "cu" + cuda.replace(".", "") if cuda else "cpu"
    return f"{device}torch{torch_minor(torch)}"


def dynamic_metadata(field, settings=None):
    if field == "dependencies":
        if not for_wheel:
            return ["torch"]
        return [f"torch=={torch_minor(torch_folder())}.*"]
    if field != "version":
        raise ValueError(f"expected the field dependencies or version, got {field}")
    version = re.search(
        r'^version = "(.+)"$',
        (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(),
        re.M,
    ).group(1)
    if not for_wheel:
        return version
    torch = torch_folder()
    return f"{version}+{label(torch, cuda_choice.decide(torch).build)}"
