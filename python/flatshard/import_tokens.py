"""Makes a dataset folder of tokens that another program has written: `python -m
flatshard.import_tokens`, or `flatshard data import`."""

import os
from types import SimpleNamespace

from flatshard._data import core
from flatshard._data.command import Arguments, check_fraction, run, write_corpus
from flatshard._data.documents import HfTokens, open_encoder
from flatshard._data.failures import Failure, expect
from flatshard._data.input_files import find_input_files
from flatshard._data.survey import choose_validation

SCANNED = 1 << 18
MOST_TOKENS = 1 << 32


def parser():
    parser = Arguments("import")
    parser.files("--validation")
    parser.text("--tokenizer", "-t", required=True)
    parser.text("--end-of-document")
    parser.text("--dtype")
    parser.add_argument("--vocab-size", type=int, default=0)
    return parser


def parse(arguments=None):
    return parser().parse_args(arguments)


def find_vocabulary(options, tokenizer):
    """Returns what write_corpus asks of tokens."""
    size, end, decode = options.vocab_size, -1, None
    is_id = options.end_of_document.isdecimal()
    if is_id:
        end = int(options.end_of_document)
    if tokenizer:
        encoder = open_encoder(tokenizer)
        least = max(encoder.vocab.values()) + 1
        expect(
            size in (0,) or size >= least,
            f"--vocab-size: expected at least the {least} of the tokenizer, got {size}",
        )
        size = max(size, least)
        if not is_id:
            end = HfTokens(tokenizer, options.end_of_document, "none").end_of_document

        def decode(ids):
            return encoder.decode(ids, keep_special=True).encode()

    expect(
        0 < size <= MOST_TOKENS,
        "--tokenizer: expected the tokenizer that the tokens are of, or none with "
        f"--vocab-size in [1, 2^32] and --end-of-document ID; got '{options.tokenizer}' "
        f"and {size}",
    )
    expect(
        0 <= end < size,
        "--end-of-document: expected the id of a token below the vocabulary's "
        f"{size}, got '{options.end_of_document}'",
    )
    return SimpleNamespace(
        vocab_size=size,
        end_of_document=end,
        begin_of_document=None,
        masked=False,
        decode=decode,
    )


def find_documents(file, vocabulary, hash):
    """Returns (start, end) of the documents that are not empty, without their
    end-of-document tokens, and the hash of `hash` and of the tokens.

    Documents come from Megatron's index, or end after each end-of-document token."""
    import numpy as np

    tokens = file.tokens()
    stops = np.arange(SCANNED, file.num_tokens, SCANNED)
    ends = []  # of documents without an index
    if file.ends is not None:
        stops = np.unique(file.ends[1:])
        stops = [
            stop
            for begin, end in zip([0, *stops[:-1]], stops, strict=True)
            for stop in [*range(begin + SCANNED, end, SCANNED), end]
            if stop > 0
        ]
    else:
        stops = [*stops, file.num_tokens]
    begin = 0
    for stop in stops:
        part = tokens[begin:stop]
        file.check(part, begin, vocabulary.vocab_size)
        hash = core.mix(hash, part.astype(np.uint32))
        if file.ends is None:
            found = np.flatnonzero(part == vocabulary.end_of_document)
            ends.append(found + begin)
        begin = int(stop)
    if file.ends is None:
        last = np.array([file.num_tokens])
        ends = np.concatenate([*ends, last])
        begins = np.concatenate([[0], ends[:-1] + 1])
    else:
        begins, ends = file.ends[:-1], file.ends[1:].copy()
        has_any = ends > begins
        begins, ends = begins[has_any], ends[has_any]
        ends -= tokens[ends - 1] == vocabulary.end_of_document
    has_any = ends > begins
    return np.stack([begins[has_any], ends[has_any]], 1), hash


def documents_of(found):
    for file, documents in found:
        tokens = file.tokens()
        for begin, end in documents:
            yield tokens, int(begin), int(end), None, True


def import_tokens(options):
    """Writes a dataset folder of tokens that another program has made. Empty documents
    are left out.

    @return a line for each file, and lines that describe the dataset."""
    from flatshard._data.token_files import TokenFile

    check_fraction(options)
    core.check_output(options.output, options.force)
    has_tokenizer = options.tokenizer not in ("", "none")
    tokenizer = core.find_tokenizer(options.tokenizer) if has_tokenizer else ""
    vocabulary = find_vocabulary(options, tokenizer)
    found = find_input_files(options.input)
    files, num_train = list(found.files), len(found.files)
    is_given = bool(options.validation)
    if is_given:
        more = find_input_files(options.validation)
        files += more.files
        found.skipped += more.skipped
    opened, lines, to_validation = [], [], bytearray()
    hash = len(files)
    for at, file in enumerate(files):
        # A glob over Megatron's pairs also finds the index.
        if file.listed and os.path.splitext(file.path)[1] == ".idx":
            file.num_documents = 0
            continue
        tokens = TokenFile(file.path, options.dtype)
        documents, hash = find_documents(tokens, vocabulary, hash)
        opened.append((tokens, documents))
        file.num_documents = len(documents)
        to_validation += bytes([at >= num_train]) * len(documents)
        lines.append(
            f"{file.name}: {tokens.what}, {tokens.num_tokens} tokens, "
            f"{len(documents)} documents"
        )
    expect(
        0 in to_validation,
        f"--input: {num_train} files contain no documents",
        Failure,
    )
    expect(
        not is_given or 1 in to_validation,
        f"--validation: {len(files) - num_train} files contain no documents",
        Failure,
    )
    lines += [f"{name}: skipped, {reason}" for name, reason in found.skipped]
    fraction = 1 if is_given else options.validation_fraction
    if not is_given:
        to_validation = choose_validation(files, fraction)
    _, text = write_corpus(
        options,
        files,
        to_validation,
        fraction,
        vocabulary,
        documents_of(opened),
        copy=tokenizer,
        tokenizer="tokenizer.json" if tokenizer else "none",
        input_hash=f"{hash:016x}",
    )
    return lines, text


def main(arguments=None):
    lines, text = import_tokens(parse(arguments))
    print(*lines, sep="\n")
    print(text, end="")


if __name__ == "__main__":
    run(main)
