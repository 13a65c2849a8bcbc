"""Runs PyTorch's own FSDP2 tests on this machine's CPUs, with Flatshard.

CHECKOUT is a checkout of PyTorch, or a folder with its test/distributed. The tests are
from the checkout. Their helpers are from the installed torch (torch.testing requires
`pip install expecttest`). A test has 1 to 4 ranks: processes over Gloo.

Prints a line for each test, then the failures, grouped by their first error line, and the
counts. Ends with 0 also where tests fail, since many read FSDP2's internals.

usage: scripts/fsdp2_suite CHECKOUT [--fsdp2] [--chunk] [-k PATTERN] [FILES...]
"""

import argparse
import collections
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import unittest

from tests.python.fsdp2_suite import on_cpus, sources

TESTS_AT_ONCE = 2
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Failure|Exit|Interrupt)\b.*")


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="scripts/fsdp2_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", metavar="CHECKOUT")
    parser.add_argument("files", nargs="*", metavar="FILES", help="default: all found")
    parser.add_argument("--fsdp2", action="store_true", help="run torch's FSDP2 itself")
    parser.add_argument(
        "--chunk",
        action="store_true",
        help="fully_shard with granularity='chunk', which many tests need as they "
        "compare to_local() with pieces of torch.chunk",
    )
    parser.add_argument("-k", metavar="PATTERN", help="regular expression of names")
    parser.add_argument("--timeout", type=float, default=90, help="seconds for a test")
    parser.add_argument(
        "--errors", metavar="FILE", help="whole errors are written here"
    )
    return parser.parse_intermixed_args()


def tests_of(module):
    """Yields (name, unittest case) of a module."""
    pending = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    while pending:
        item = pending.pop(0)
        if isinstance(item, unittest.TestSuite):
            pending[:0] = list(item)
        elif type(item).__module__ == module.__name__:
            name = f"{module.__name__}.{type(item).__name__}.{item._testMethodName}"
            yield name, item


class Running:
    """A test in a separate process, with all of its ranks."""

    def __init__(self, name, case, timeout):
        self.name = name
        self.began = time.monotonic()
        self.deadline = self.began + timeout + 20
        self.output = tempfile.TemporaryFile()
        self.pipe, write_end = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.close(self.pipe)
            _run_in_child(case, write_end, self.output)
        os.close(write_end)

    def seconds(self):
        return time.monotonic() - self.began

    def finish(self):
        """Returns (outcome, error text, what the test printed last), after the pipe can be
        read or the deadline."""
        answer = b""
        if select.select([self.pipe], [], [], 0)[0]:
            while block := os.read(self.pipe, 65536):
                answer += block
                if block.endswith(b"\n"):
                    break
        os.close(self.pipe)
        with _none_left():
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.output.seek(0)
        printed = self.output.read().decode(errors="replace")[-200_000:]
        if answer:
            return *json.loads(answer), printed
        what = "timed out" if time.monotonic() >= self.deadline else "died"
        return "FAIL", f"TimeoutError: {what}", printed


class _none_left:
    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        return kind is not None and issubclass(kind, ProcessLookupError)


def _run_in_child(case, write_end, output):
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    result = unittest.TestResult()
    try:
        case.run(result)
        if result.errors or result.failures:
            answer = "FAIL", (result.errors + result.failures)[0][1]
        elif result.skipped:
            answer = "SKIP", result.skipped[0][1]
        else:
            answer = "PASS", ""
    except BaseException as error:
        answer = "FAIL", f"{type(error).__name__}: {error}"
    os.write(write_end, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def first_line(text):
    """Returns the line that names the error of the first rank that failed."""
    block = re.split(r"\nProcess \d+ exited", text)[0]
    found = [line for line in block.splitlines() if _ERROR.match(line)]
    if not found:
        found = [line for line in block.splitlines() if line.strip()] or ["no error"]
    if found[0].startswith("RuntimeError: Process") and len(found) > 1:
        found = found[1:]
    return found[-1][:300]


def run_all(tests, timeout):
    """Yields (name, seconds, *Running.finish()) of each test as it ends."""
    waiting, running = list(tests), []
    while waiting or running:
        while waiting and len(running) < TESTS_AT_ONCE:
            name, case = waiting.pop(0)
            running.append(Running(name, case, timeout))
        select.select([r.pipe for r in running], [], [], 1)
        for test in list(running):
            ready = select.select([test.pipe], [], [], 0)[0]
            if ready or time.monotonic() >= test.deadline:
                running.remove(test)
                yield test.name, test.seconds(), *test.finish()


def main():
    arguments = parse_arguments()
    on_cpus.prepare()
    on_cpus.set_timeout(arguments.timeout)
    if not arguments.fsdp2:
        on_cpus.swap({"granularity": "chunk"} if arguments.chunk else {})
    checkout = os.path.abspath(arguments.checkout)
    files = [os.path.abspath(f) for f in arguments.files] or sources.find_files(
        checkout
    )
    if not files:
        sys.exit(f"fsdp2_suite: expected tests of FSDP2 in {checkout}, found none")
    tests = []
    for path in files:
        try:
            found = list(tests_of(sources.import_file(path)))
        except (Exception, unittest.SkipTest) as error:
            print(f"{os.path.basename(path)}: not run, {type(error).__name__}: {error}")
            continue
        tests += [t for t in found if re.search(arguments.k or "", t[0])]
    outcomes, groups = collections.Counter(), collections.defaultdict(list)
    errors = open(arguments.errors, "w") if arguments.errors else None
    for name, seconds, outcome, text, printed in run_all(tests, arguments.timeout):
        print(f"{outcome} {seconds:5.1f} s  {name}", flush=True)
        outcomes[outcome] += 1
        if outcome != "FAIL":
            continue
        line = first_line(text)
        groups[re.sub(r"\d+", "N", line)].append((name, line))
        if errors:
            print(
                f"==== {name}\n{text}\n---- printed\n{printed}", file=errors, flush=True
            )
    for same in sorted(groups.values(), key=len, reverse=True):
        print(f"\n{len(same)} x {same[0][1]}")
        for name, _ in same:
            print(f"    {name}")
    counts = [outcomes[o] for o in ("PASS", "FAIL", "SKIP")]
    print("\n{} passed, {} failed, {} skipped".format(*counts))


if __name__ == "__main__":
    main()
