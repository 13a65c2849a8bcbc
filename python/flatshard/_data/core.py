"""The C++ core's writer of datasets (flatshard/data/corpus_api.h), by ctypes."""

import array
import ctypes
import functools
import json
import os
from pathlib import Path

import flatshard
from flatshard._data.failures import CoreFailure

_TEXT, _INT, _POINTER = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS = {  # name: result and arguments
    "error": (_TEXT, []),
    "mix": (ctypes.c_uint64, [ctypes.c_uint64, _POINTER, _INT]),
    "draw": (ctypes.c_double, [_TEXT, _INT]),
    "find_tokenizer": (_TEXT, [_TEXT]),
    "printable": (_TEXT, [_TEXT, _INT]),
    "check_output": (ctypes.c_int, [_TEXT, ctypes.c_int]),
    "corpus_open": (_POINTER, [_TEXT, _TEXT, _TEXT]),
    "corpus_add": (
        ctypes.c_int,
        [_POINTER, ctypes.c_int, _POINTER, ctypes.c_int, _INT, _TEXT, ctypes.c_int],
    ),
    "corpus_commit": (_TEXT, [_POINTER]),
    "corpus_summary": (_TEXT, [_POINTER]),
    "corpus_close": (None, [_POINTER]),
}


@functools.cache
def _core():
    # An editable installation has the package in two folders.
    paths = [Path(folder) / "_corpus.so" for folder in flatshard.__path__]
    path = next((path for path in paths if path.exists()), paths[0])
    try:
        library = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        raise CoreFailure(
            f"config error: cannot load {path} ({error}); build it with make build, or "
            "install the package again"
        ) from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"flatshard_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _check(succeeded):
    if not succeeded:
        raise CoreFailure(os.fsdecode(_core().flatshard_error()))


def mix(hash, data):
    """Returns the hash of what `hash` is of, and of bytes or an array."""
    return _core().flatshard_mix(hash, _address(data), memoryview(data).nbytes)


def draw(name):
    """Returns a number in [0, 1) that depends on a document's name only."""
    name = os.fsencode(name)
    return _core().flatshard_draw(name, len(name))


def find_tokenizer(path):
    """Returns the tokenizer.json that a user means: that file, or the folder that has
    it."""
    found = _core().flatshard_find_tokenizer(os.fsencode(path))
    _check(found)
    return os.fsdecode(found)


def printable(data):
    """Returns bytes as text of one line, without control characters."""
    return _core().flatshard_printable(data, len(data)).decode()


def check_output(path, force):
    """Raises an error where a dataset may not be written, and removes what calls that
    were killed have left there."""
    _check(_core().flatshard_check_output(os.fsencode(path), force))


def _address(data):
    if isinstance(data, bytes):
        return ctypes.cast(data, ctypes.c_void_p).value
    if isinstance(data, bytearray):
        return ctypes.addressof(ctypes.c_char.from_buffer(data))
    if isinstance(data, array.array):
        return data.buffer_info()[0]
    return data.ctypes.data


class CorpusWriter:
    """A dataset folder that appears when it is committed. Use it with `with`.

    @param copy  the path of a tokenizer.json to copy, or "".
    @param settings  see flatshard_corpus_open."""

    def __init__(self, output, copy="", **settings):
        self.begins = settings.get("begin_of_document")
        self.ends = settings["end_of_document"]
        self.first = []  # the first tokens of the first document of train
        self.is_longer = False
        self._corpus = _core().flatshard_corpus_open(
            os.fsencode(output), os.fsencode(copy), json.dumps(settings).encode()
        )
        _check(self._corpus)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        _core().flatshard_corpus_close(self._corpus)

    def add(self, to_validation, tokens, begin, end, mask=None, trains_end=True):
        """Appends a document, without the tokens around it: tokens[begin:end].

        @param tokens  bytes, an array, or a NumPy array, of integers.
        @param mask  a byte for each token from `begin` on; None: there is no mask."""
        if not to_validation and not self.first:
            self._note_first(tokens, begin, end)
        nbytes = memoryview(tokens).itemsize
        address = (_address(tokens) or 0) + begin * nbytes
        add = _core().flatshard_corpus_add
        count = end - begin
        _check(
            add(self._corpus, to_validation, address, nbytes, count, mask, trains_end)
        )

    def _note_first(self, tokens, begin, end, most=48):
        before = [] if self.begins is None else [self.begins]
        found = map(int, tokens[begin : min(end, begin + most)])
        self.first = [*before, *found, self.ends][:most]
        self.is_longer = len(before) + end - begin + 1 > most

    def commit(self):
        """Returns the content of meta.json, and lines for a person."""
        text = _core().flatshard_corpus_commit(self._corpus)
        _check(text)
        lines = _core().flatshard_corpus_summary(self._corpus).decode()
        return json.loads(text), lines
