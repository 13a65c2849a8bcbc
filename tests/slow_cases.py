"""The options --quick and --slow of pytest, for conftest.py."""

from pathlib import Path

SLOW_CASES = Path(__file__).resolve().parent / "slow_cases.txt"


def pytest_addoption(parser):
    group = parser.getgroup("tests/slow_cases.txt")
    group.addoption(
        "--quick", action="store_true", help="leave out the cases that it lists"
    )
    group.addoption(
        "--slow", action="store_true", help="run only the cases that it lists"
    )


def pytest_collection_modifyitems(config, items):
    quick, slow = config.getoption("--quick"), config.getoption("--slow")
    if quick == slow:
        return
    lines = (line.split() for line in SLOW_CASES.read_text().splitlines())
    listed = {line[1] for line in lines if line and line[0] == "python"}
    chosen = [(i, (i.nodeid.replace(" ", "_") in listed) == slow) for i in items]
    config.hook.pytest_deselected(items=[i for i, runs in chosen if not runs])
    items[:] = [i for i, runs in chosen if runs]
