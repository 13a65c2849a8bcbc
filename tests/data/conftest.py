"""The tests of data preparation need only the package's Python files and the dataset
writer, as the program does: neither torch nor the extension."""

import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("FLATSHARD_BUILD", ROOT / "build"))

package = types.ModuleType("flatshard")
package.__path__ = [str(BUILD / "python/flatshard")]
sys.modules["flatshard"] = package
sys.path.insert(0, str(ROOT))
os.environ["FLATSHARD_PYTHON"] = sys.executable
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["USE_TORCH"] = "0"

from tests.slow_cases import pytest_addoption, pytest_collection_modifyitems  # noqa: E402

__all__ = ["pytest_addoption", "pytest_collection_modifyitems"]
