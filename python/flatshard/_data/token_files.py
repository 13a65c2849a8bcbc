"""Files of tokens that other programs have written:

    raw       little-endian words and nothing else (nanoGPT's train.bin)
    llm.c     256 int32: magic 20240520 (uint16) or 20240801 (uint32), version, number of
              tokens; then the tokens
    Megatron  NAME.bin with words, and NAME.idx. It starts with "MMIDIDX" and has their
              type, sequences and documents
    NumPy     an array of integers of any shape (np.save), row by row

The content of the file decides which it is. Other formats and text raise an error."""

import os
import struct

from flatshard._data.failures import (
    ConfigFailure,
    Failure,
    cannot_read,
    expect,
    missing,
)
from flatshard._data.formats import container_of

try:
    import numpy as np
except ImportError as error:
    raise missing("data import", "numpy") from error

_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
# Formats of other programs for tokens, or that users have next to them.
_FOREIGN = {
    b"LITPKDS": "a packed file of litgpt, with a header of 24 bytes and padding; save "
    "the tokens with numpy.save",
    b"MMIDIDX\0": "the index of Megatron's tokens; name its .bin",
    b"PAR1": "Parquet; use flatshard data prepare",
    b"ARROW1": "Arrow; use flatshard data prepare",
    # The length of the metadata, and the place of its table.
    b"\xff\xff\xff\xff": "Arrow, or words of -1; for Arrow use flatshard data prepare",
    b"GGUF": "a model in GGUF; name a file of tokens",
    b"\x1f\x8b": "gzip data; unpack it with gzip -d",
    b"\x28\xb5\x2f\xfd": "zstd data; unpack it with zstd -d",
    b"\x80\x04\x95": "a pickle; save the tokens with numpy.save",
    b"\x80\x05\x95": "a pickle; save the tokens with numpy.save",
    # llm.c's models, optimizer states, tokenizers and evaluations.
    b"\x26\xd8\x34\x01": "a model of llm.c",
    b"\x27\xd8\x34\x01": "a state of llm.c",
    b"\x28\xd8\x34\x01": "a tokenizer of llm.c",
    b"\x8a\xd8\x34\x01": "an evaluation of llm.c",
    b"\x01\x34\xd8\x88": "a file of llm.c in big-endian order",
    b"\x01\x34\xd9\xa1": "a file of llm.c in big-endian order",
}
_RAW_NPY = (
    "a file named .npy without a header of NumPy; for raw tokens, as in OLMo's files, "
    "name their type with --dtype"
)
_LLMC_HEADER = 1024
_LLMC_TYPES = {20240520: "uint16", 20240801: "uint32"}
# Source: megatron/core/datasets/indexed_dataset.py.
_MEGATRON_HEADER = 34
_MEGATRON_TYPES = {
    **{1: "uint8", 2: "int8", 3: "int16"},
    **{4: "int32", 5: "int64", 8: "uint16"},
}


class TokenFile:
    """The tokens of a file.

    @param dtype  of raw files: the name of a NumPy type of integers, or "" for uint16."""

    def __init__(self, path, dtype=""):
        expect(
            not dtype or dtype in _TYPES,
            "--dtype: expected a type of integers such as uint16, uint32 or int64, got "
            f"'{dtype}'",
        )
        self.path = path
        self.ends = None  # the first token of each document, and the number of tokens
        try:
            self.nbytes = os.stat(path).st_size
            found = None
            for open_ in (self.open_llm_c, self.open_numpy, self.open_megatron):
                found = found or open_()
            if not found:
                self.check_raw(dtype)
                found = self.open_raw(dtype or "uint16")
            self.what, self.dtype, self.num_tokens, begin = found
            expect(self.num_tokens > 0, f"{path} contains no tokens", Failure)
            # Mapped again for each piece, so that pages that were read can go.
            self.begin = begin
        except OSError as error:
            raise cannot_read(path, error) from error

    def head(self, nbytes):
        with open(self.path, "rb") as file:
            return file.read(nbytes)

    def last_byte(self):
        with open(self.path, "rb") as file:
            file.seek(max(0, self.nbytes - 1))
            return file.read()

    def expect_nbytes(self, nbytes, what, hint=""):
        expect(
            self.nbytes == nbytes,
            f"{self.path}: expected {nbytes} bytes for {what}, got {self.nbytes}{hint}",
            Failure,
        )

    def open_llm_c(self):
        head = self.head(12)
        if self.nbytes < _LLMC_HEADER:
            return None
        magic, _, count = struct.unpack("<3i", head)
        if magic not in _LLMC_TYPES:
            return None
        dtype = np.dtype(_LLMC_TYPES[magic])
        self.expect_nbytes(
            _LLMC_HEADER + count * dtype.itemsize,
            f"the {count} tokens that the header of llm.c names",
            "; fetch the file again",
        )
        return f"llm.c {dtype}", dtype, count, _LLMC_HEADER

    def open_numpy(self):
        if self.head(6) != b"\x93NUMPY":
            return None
        try:
            array = np.load(self.path, mmap_mode="r")
        except (ValueError, EOFError, OverflowError) as error:
            reason = f"expected an array of NumPy: {error}; fetch the file again"
            raise Failure(f"{self.path}: {reason}") from error
        dtype = array.dtype
        expect(
            dtype.kind in "iu" and dtype == dtype.newbyteorder("<"),
            f"{self.path}: expected an array of little-endian integers, got the NumPy "
            f"type {dtype.str!r}; convert the tokens, for example with "
            "array.astype('<u4')",
            Failure,
        )
        expect(
            array.flags.c_contiguous,
            f"{self.path}: expected an array in C order, got {array.shape} in Fortran "
            "order; save numpy.ascontiguousarray of it",
            Failure,
        )
        self.expect_nbytes(
            array.offset + array.nbytes,
            f"the {array.size} elements that the header of NumPy names",
            "; save one array in a file",
        )
        return f"NumPy {dtype}", dtype, array.size, array.offset

    def open_megatron(self):
        root, suffix = os.path.splitext(self.path)
        if suffix == ".idx":
            raise ConfigFailure(
                f"--input {self.path}: expected the file of tokens, got its index; name "
                f"{root}.bin"
            )
        index = f"{root}.idx"
        return self.read_index(index) if os.path.exists(index) else None

    def read_index(self, path):
        with open(path, "rb") as file:
            data = file.read()
        expect(
            len(data) >= _MEGATRON_HEADER
            and data.startswith(b"MMIDIDX\0\0" + struct.pack("<Q", 1)),
            f"{path}: expected the index of Megatron's tokens (MMIDIDX, version 1)",
            Failure,
        )
        code, num_sequences, num_ends = struct.unpack_from("<Bqq", data, 17)
        expect(
            code in _MEGATRON_TYPES,
            f"{path}: expected tokens of integers, got the dtype code {code}",
            Failure,
        )
        dtype = np.dtype(_MEGATRON_TYPES[code])
        expect(
            num_sequences >= 0
            and num_ends >= 1
            and len(data) >= _MEGATRON_HEADER + 12 * num_sequences + 8 * num_ends,
            f"{path}: the index is truncated: it names {num_sequences} sequences and "
            f"{num_ends - 1} documents",
            Failure,
        )
        at = _MEGATRON_HEADER
        sizes = np.frombuffer(data, "<i4", num_sequences, at).astype(np.int64)
        pointers = np.frombuffer(data, "<i8", num_sequences, at + 4 * num_sequences)
        documents = np.frombuffer(data, "<i8", num_ends, at + 12 * num_sequences)
        begins = np.concatenate([[0], np.cumsum(sizes)])
        wrong = np.flatnonzero((sizes < 0) | (pointers != begins[:-1] * dtype.itemsize))
        if len(wrong):
            sequence = wrong[0]
            raise Failure(
                f"{path}: expected sequence {sequence} at byte "
                f"{begins[sequence] * dtype.itemsize} of the tokens, got "
                f"{pointers[sequence]}"
            )
        count = int(begins[-1])
        self.expect_nbytes(
            count * dtype.itemsize, f"the {count} tokens that {path} names"
        )
        wrong = (documents < 0) | (documents > num_sequences)
        wrong[1:] |= np.diff(documents) < 0
        if wrong.any():
            raise Failure(
                f"{path}: expected documents of its {num_sequences} sequences, got "
                f"{documents[wrong][0]}"
            )
        ends = begins[documents]
        expect(
            ends[0] == 0 and ends[-1] == count,
            f"{path}: expected documents that have all {count} tokens, got those from "
            f"{ends[0]} to {ends[-1]}",
            Failure,
        )
        self.ends = ends
        return f"Megatron {dtype}", dtype, count, 0

    def check_raw(self, dtype):
        head = self.head(1 << 17)
        what = container_of("", head)
        for magic, name in _FOREIGN.items():
            what = name if head.startswith(magic) else what
        what = what or layout_of(head, self.nbytes, self.last_byte())
        if not what and self.path.endswith(".npy"):
            what = "" if dtype else _RAW_NPY
        elif not what:
            what = container_of(self.path, b"")
        text = bytes(range(32, 127)) + b"\n\r\t"
        if not what and not dtype and len(head) >= 8 and not head.translate(None, text):
            what = "text; use flatshard data prepare"
        expect(not what, f"{self.path}: expected tokens, got {what}", Failure)
        words = np.frombuffer(head, "<u2", len(head) // 2)
        width = likely_word_nbytes(words)
        expect(
            width < 8 or dtype in ("int64", "uint64"),
            f"{self.path}: every second 32-bit word is 0, as in tokens of 64 bits; name "
            "what they are with --dtype int64",
            Failure,
        )
        expect(
            width < 4 or dtype,
            f"{self.path}: every second uint16 word is 0 to 3, as in tokens of 32 bits; "
            "name what they are with --dtype uint32 (or uint16)",
            Failure,
        )

    def open_raw(self, name):
        dtype = np.dtype(name)
        expect(
            self.nbytes % dtype.itemsize == 0,
            f"{self.path}: expected a multiple of {dtype.itemsize} bytes for raw {name} "
            f"tokens, got {self.nbytes} bytes",
            Failure,
        )
        return f"raw {name}", dtype, self.nbytes // dtype.itemsize, 0

    def tokens(self):
        """Returns all tokens, mapped."""
        dtype = self.dtype.newbyteorder("<")
        return np.memmap(self.path, dtype, "r", self.begin, (self.num_tokens,))

    def check(self, tokens, begin, vocab_size):
        """Raises an error for the first token that is not in the vocabulary."""
        wrong = tokens >= vocab_size
        if tokens.dtype.kind == "i":
            wrong |= tokens < 0
        if wrong.any():
            at = int(wrong.argmax())
            raise Failure(
                f"{self.path}: expected {self.what} tokens below the vocabulary's "
                f"{vocab_size}, got {tokens[at]} at place {begin + at}; name the "
                "tokenizer that they are of, and the type of raw words with --dtype"
            )


def layout_of(head, nbytes, last):
    """Returns the format, if the start of a file fits a format and its size and end, or
    "".

    @param head  its first bytes."""
    if last == b"." and head[:1] == b"\x80" and head[1] in range(2, 6):
        return "a pickle; save the tokens with numpy.save"
    if len(head) < 16:
        return ""
    for dtype in "<f4", "<f8":
        if has_whole_floats(head, dtype):
            return f"floating-point numbers ({dtype}); convert them with numpy.astype"
    (length,) = struct.unpack_from("<Q", head)
    if 2 <= length <= nbytes - 8 and head[8:9] == b"{":
        return "safetensors; save the tokens with numpy.save"
    # The number of items, then where each starts, and where the last ends.
    (count,) = struct.unpack_from("<I", head)
    last = 4 * (count + 1)
    if 1 <= count and last + 4 <= len(head):
        (first,), (end,) = (struct.unpack_from("<I", head, at) for at in (4, last))
        if first == last + 4 and end == nbytes:
            return (
                "a chunk of litdata or of MosaicML's streaming; save its tokens with "
                "numpy.save"
            )
    return ""


def has_whole_floats(head, dtype):
    """Returns whether the first bytes of a file are tokens as floating-point numbers.
    Integer words are too small for that, or have other bits."""
    dtype = np.dtype(dtype)
    numbers = np.frombuffer(head, dtype, len(head) // dtype.itemsize)
    with np.errstate(invalid="ignore"):
        is_token = (numbers == np.floor(numbers)) & (numbers >= 0) & (numbers < 2**32)
    return bool(is_token.all() and numbers.any())


def likely_word_nbytes(head):
    """Returns the least width in bytes that the words of a file seem to have: 4 or 8
    where the upper halves look like small tokens, else 2.

    @param head  its first bytes as uint16."""
    # Tokens are below 2^18. Words of a few first tokens look like anything.
    if len(head) < 8 or (head[1::2] > 3).any() or (head <= 3).all():
        return 2
    is_8 = not head[2::4].any() and not head[3::4].any()
    return 8 if is_8 else 4
