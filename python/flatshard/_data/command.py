"""The common parts of the commands that make datasets: arguments, progress, exit code."""

import argparse
import os
import sys
import time

from flatshard._data import core
from flatshard._data.failures import Failure, expect
from flatshard._data.input_files import check_unchanged

DEFAULTS = {"validation_fraction": 0.05, "shard_tokens": 1 << 28}


class Arguments(argparse.ArgumentParser):
    """The options of a command. `flatshard data COMMAND --help` explains them, so that
    their texts stand once."""

    def __init__(self, command):
        super().__init__(
            prog=f"flatshard data {command}",
            usage=f"see flatshard data {command} --help",
            allow_abbrev=False,
        )
        self.files("--input", "-i", required=True)
        self.add_argument("--output", "-o", required=True)
        for name in ("validation_fraction", "shard_tokens"):
            default = DEFAULTS[name]
            option = f"--{name.replace('_', '-')}"
            self.add_argument(option, type=type(default), default=default)
        self.flag("--force")

    def files(self, *names, **more):
        self.add_argument(*names, nargs="+", action="extend", default=[], **more)

    def text(self, *names, **more):
        self.add_argument(*names, **{"default": "", **more})

    def flag(self, name):
        self.add_argument(name, action="store_true")

    def error(self, message):
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def check_fraction(options):
    expect(
        0 <= options.validation_fraction < 1,
        "--validation-fraction: expected a number in [0, 1), got "
        f"{options.validation_fraction:g}",
    )


class Progress:
    """ "12% of 34.5 MB" on a terminal, at most ten times a second."""

    def __init__(self, nbytes):
        self.total, self.done, self.last = nbytes, 0.0, 0.0
        self.enabled = sys.stderr.isatty()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.show("\r\033[K")

    def show(self, text):
        if self.enabled:
            print(text, end="", file=sys.stderr, flush=True)

    def add(self, nbytes):
        self.done += nbytes
        if self.enabled and time.monotonic() - self.last >= 0.1:
            self.last = time.monotonic()
            part = 100 * self.done / max(self.total, 1)
            self.show(f"\rprepared {part:3.0f}% of {self.total / 1e6:.1f} MB\033[K")


def write_corpus(options, files, to_validation, fraction, tokens, documents, **meta):
    """Writes the folder of all documents. It appears when it is complete.

    @param to_validation  a byte for each document of `files`, in their order.
    @param fraction  the part of a single document that goes to validation; 0: there is
      no such split.
    @param tokens  has vocab_size, end_of_document, begin_of_document, masked, and decode,
      or None where tokens have no text.
    @return the content of meta.json, and lines that describe the dataset."""
    names = ("vocab_size", "end_of_document", "begin_of_document", "masked")
    writer = core.CorpusWriter(
        options.output,
        has_validation=fraction > 0,
        shard_tokens=options.shard_tokens,
        force=options.force,
        **{name: getattr(tokens, name) for name in names},
        **meta,
    )
    with writer, Progress(sum(file.nbytes for file in files)) as progress:
        parts = (
            file.nbytes / file.num_documents
            for file in files
            for _ in range(file.num_documents)
        )
        for at, (ids, begin, end, mask, trains_end) in enumerate(documents):
            if len(to_validation) == 1 and fraction > 0:
                cut = end - int((end - begin) * fraction)
                tail = mask and mask[cut - begin :]
                writer.add(False, ids, begin, cut, mask, trains_end)
                writer.add(True, ids, cut, end, tail, trains_end)
            else:
                writer.add(to_validation[at], ids, begin, end, mask, trains_end)
            progress.add(next(parts))
        check_unchanged(files)
        text = ""
        if tokens.decode:
            more = " ..." if writer.is_longer else ""
            first = core.printable(tokens.decode(writer.first)) + more
            text = f"first document   {first}\n"
        meta, lines = writer.commit()
        return meta, f"{text}wrote {options.output}\n{lines}"


def run(main):
    """Runs a command, and ends this process with its exit code."""
    code = 1
    try:
        main()
        sys.stdout.flush()
        code = 0
    except Failure as failure:
        print(f"error: {failure.code} error: {failure}", file=sys.stderr)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141  # of SIGPIPE
    except MemoryError:
        print("error: memory error: not enough memory for a document", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
