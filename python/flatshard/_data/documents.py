"""Documents as tokens: of bytes, by a tokenizer, or chats by a chat template. Each has
`documents(texts)`, to yield (tokens, begin, end, mask, trains_end) of (place, text)s:
the document is `tokens[begin:end]`."""

import array
import collections
from concurrent.futures import ThreadPoolExecutor

from flatshard._data.failures import ConfigFailure, Failure, warn
from flatshard._data.hf_chat import ChatEncoder
from flatshard._data.hf_encoder import Encoder
from flatshard._data.parts import cutter

BATCH_TEXTS, BATCH_SIZE = 256, 4 << 20  # of texts, and of their characters
BYTE_END, BYTE_END_TEXT = 256, b"<|endoftext|>"


def open_encoder(path, parse_special=False):
    """Returns the Encoder of a tokenizer.json. Its errors name this Python."""
    try:
        return Encoder(path, parse_special)
    except ConfigFailure:
        raise
    except Failure as failure:
        raise ConfigFailure(str(failure)) from failure


class ByteTokens:
    """A byte is its own token, and 256 ends a document."""

    vocab_size, end_of_document, begin_of_document = BYTE_END + 1, BYTE_END, None
    masked, name = False, "bytes"

    def documents(self, texts):
        for _, text in texts:
            yield text, 0, len(text), None, True

    def decode(self, ids):
        return b"".join(BYTE_END_TEXT if id == BYTE_END else bytes([id]) for id in ids)


class HfTokens:
    """Texts by a tokenizer.json."""

    masked, name = False, "tokenizer.json"

    def __init__(self, path, end="", begin="", parse_special=False):
        self.encoder = open_encoder(path, parse_special)
        self.vocab_size = max(self.encoder.vocab.values()) + 1
        try:
            self.end_of_document = self.encoder.end_of_document(end, True)
            self.begin_of_document = self.encoder.begin_of_document(begin)
        except Failure as failure:
            raise ConfigFailure(str(failure)) from failure
        for warning in self.encoder.warnings:
            warn(warning)
        self.is_warned = False

    def decode(self, ids):
        return self.encoder.decode(ids, keep_special=True).encode()

    def documents(self, texts):
        whole = None
        for ids, is_last in self.encoded(self.parts(texts)):
            if whole:
                whole.extend(ids)
            else:
                whole = ids
            if is_last:
                yield whole, 0, len(whole), None, True
                whole = None

    def parts(self, texts):
        """Yields the parts of each text, and whether one is its last."""
        cut = cutter(self.encoder.tokenizer)
        for _, text in texts:
            for part, is_last in cut(text.decode()):
                self.warn_of_control_tokens(part)
                yield part, is_last

    def warn_of_control_tokens(self, text):
        if not self.is_warned and (name := self.encoder.spelled(text)):
            self.is_warned = True
            warn(
                f"texts spell out control tokens ({name}). They stay text; "
                "--parse-special encodes them as the tokens"
            )

    def encoded(self, parts):
        """Encodes batches on all cores. A thread encodes while the other makes arrays.
        Meanwhile the next batch is read, and the tokens of the last one are written."""
        with ThreadPoolExecutor(2) as pool:
            pending = collections.deque()
            for batch in _batches(parts):
                pending.append(pool.submit(self.encode, batch))
                if len(pending) > 2:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()

    def encode(self, parts):
        found = self.encoder.encode_all([text for text, _ in parts])
        words = (array.array("I", ids) for ids in found)
        return [(ids, last) for ids, (_, last) in zip(words, parts, strict=True)]


def _batches(parts):
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part[0])
        if size >= BATCH_SIZE or len(batch) >= BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Chats(HfTokens):
    """Rows of chats by the chat template of a tokenizer's folder."""

    masked = True

    def __init__(self, path, end, train_on, variables):
        super().__init__(path, end, "none")
        self.begin_of_document = None
        self.trains_all = train_on == "all"
        try:
            self.chats = ChatEncoder(path, train_on, variables)
        except Failure as failure:
            raise ConfigFailure(str(failure)) from failure

    def documents(self, texts):
        for place, text in texts:
            ids, mask = self.chats.encode(place, text)
            while self.chats.warnings:
                warn(self.chats.warnings.pop(0))
            # Templates often end with the token that ends a document anyway.
            trains_end = self.trains_all
            if ids and ids[-1] == self.end_of_document:
                ids, (*mask, trains_end) = ids[:-1], mask
            words = array.array("I", ids)
            yield words, 0, len(words), bytes(mask), bool(trains_end)
