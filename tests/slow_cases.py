"""The option --quick of pytest, for conftest.py."""

from pathlib import Path

SLOW_CASES = Path(__file__).resolve().parent / "slow_cases.txt"


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out the cases that tests/slow_cases.txt lists",
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--quick"):
        return
    lines = (line.split() for line in SLOW_CASES.read_text().splitlines())
    slow = {line[1] for line in lines if line and line[0] == "python"}
    left_out = [i for i in items if i.nodeid.replace(" ", "_") in slow]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [i for i in items if i.nodeid.replace(" ", "_") not in slow]
