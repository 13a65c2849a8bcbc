"""A Hugging Face tokenizer as AutoTokenizer of transformers 4 reads its folder, with
only the tokenizers package. Transformers 5 ignores add_prefix_space, add_bos_token and
add_eos_token of tokenizer_config.json for most classes."""

import itertools
import json
import os
import re

from flatshard._data.failures import Failure, missing

# Ends of a document in tokenizers people use, most specific first.
END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>")
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")

# The defaults of transformers' classes for keys that tokenizer_config.json lacks. In
# classes with add_bos_token it decides which tokens are around a text, whatever
# tokenizer.json has.
LLAMA: dict[str, str | bool] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
LLAMA |= {"add_bos_token": True, "add_eos_token": False}
GEMMA: dict[str, str | bool] = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
}
GEMMA |= {"pad_token": "<pad>", "add_bos_token": True, "add_eos_token": False}
COHERE: dict[str, str | bool] = {
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
}
COHERE |= {"unk_token": "<UNK>", "add_bos_token": True, "add_eos_token": False}
GPT2 = {key: "<|endoftext|>" for key in ("bos_token", "eos_token", "unk_token")}
CLASSES = {
    "Llama": LLAMA,
    "CodeLlama": LLAMA,
    "Gemma": GEMMA,
    "Cohere": COHERE,
    "GPT2": GPT2,
    "GPTNeoX": {**GPT2, "add_bos_token": False, "add_eos_token": False},
    "Qwen2": {"eos_token": "<|endoftext|>"},
    "T5": {"eos_token": "</s>"},
    "Bart": {"bos_token": "<s>", "eos_token": "</s>"},
    "Roberta": {"bos_token": "<s>", "eos_token": "</s>"},
    "Bloom": {"bos_token": "<s>", "eos_token": "</s>"},
}
# The class by config.json's model_type, where tokenizer_config.json names none.
CLASS_OF_MODEL = {
    "llama": "Llama",
    "mistral": "Llama",
    "mixtral": "Llama",
    "gemma": "Gemma",
    "gemma2": "Gemma",
    "gemma3_text": "Gemma",
    "cohere": "Cohere",
    "gpt_neox": "GPTNeoX",
    "gpt2": "GPT2",
    "qwen2": "Qwen2",
    "qwen3": "Qwen2",
    "qwen3_moe": "Qwen2",
}
TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token") + (
    "cls_token",
    "mask_token",
)


def read_json(path):
    """Returns a JSON object, or {} where there is no such file."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            value = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Failure(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise Failure(f"{path}: expected a JSON object")
    return value


def content(token):
    """Returns the text of a token, also if it is written as an AddedToken."""
    return token.get("content") if isinstance(token, dict) else token


class Folder:
    """The settings in the files next to a tokenizer.json, as AutoTokenizer reads them."""

    def __init__(self, path):
        # A file of another name stands for itself.
        folder = os.path.dirname(path)
        is_of_folder = os.path.basename(path) == "tokenizer.json"

        def read(name):
            return read_json(os.path.join(folder, name)) if is_of_folder else {}

        self.path = os.path.join(folder, "tokenizer_config.json")
        self.config = read("tokenizer_config.json")
        self.by_id = self.config.get("added_tokens_decoder")
        self.by_text = {}
        if self.by_id is None:
            # Older folders have these facts in separate files.
            self.by_id = {}
            self.config.update(read("special_tokens_map.json"))
            self.by_text = read("added_tokens.json")
        model = read("config.json")
        name = self.config.get("tokenizer_class")
        name = name or CLASS_OF_MODEL.get(model.get("model_type"), "")
        name = name.removesuffix("Fast").removesuffix("Tokenizer")
        self.is_bert = name.endswith("Bert") or name == "Electra"
        self.end_id = model.get("eos_token_id")
        facts = CLASSES.get(name, {})
        self.config = {**facts, **self.config}
        self.begin = content(self.config.get("bos_token"))
        self.end = content(self.config.get("eos_token"))
        self.adds_begin = self.adds_end = None
        if "add_bos_token" in facts:
            self.adds_begin = bool(self.config["add_bos_token"])
            self.adds_end = bool(self.config["add_eos_token"])
        for flag, key in ((self.adds_begin, "bos"), (self.adds_end, "eos")):
            if flag and not (self.begin if key == "bos" else self.end):
                raise Failure(
                    f"{self.path}: expected {key}_token, since add_{key}_token is true"
                )

    def special_tokens(self):
        """Returns the texts and AddedTokens that have a role, each once."""
        tokens = [self.config.get(key) for key in TOKEN_KEYS]
        more = []
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = self.config.get(key) or []
            more += value.values() if isinstance(value, dict) else value
        found = {}
        for token in tokens + more:
            if token:
                found.setdefault(content(token), token)
        return found

    def added_tokens(self, AddedToken):
        """Returns (id or None, AddedToken) of each token that AutoTokenizer adds."""
        special = self.special_tokens()

        def make(token):
            if isinstance(token, str):
                return AddedToken(token, special=token in special)
            keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
            flags = {key: token[key] for key in keys if key in token}
            flags["special"] = flags.get("special", False) or (
                token["content"] in special
            )
            return AddedToken(token["content"], **flags)

        try:
            tokens = [(int(id), make(token)) for id, token in self.by_id.items()]
            tokens += [(int(id), make(text)) for text, id in self.by_text.items()]
            tokens.sort(key=lambda item: item[0])
            known = {token.content for _, token in tokens}
            tokens += [(None, make(t)) for c, t in special.items() if c not in known]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Failure(
                f"{self.path}: expected tokens as transformers writes them, got "
                f"{error!r}"
            ) from error
        return tokens


class Encoder:
    """A tokenizer without the state that its file keeps for calls."""

    def __init__(self, path, parse_special=False):
        try:
            from tokenizers import AddedToken, Tokenizer
        except ImportError as error:
            raise missing("a tokenizer.json", "tokenizers") from error
        self.path = path
        self.warnings = []
        try:
            self.tokenizer = Tokenizer.from_file(self.path)
        except Exception as error:  # the package raises plain Exception
            reason = str(error)
            with open(self.path, "rb") as file:
                if file.read(64).startswith(b"version https://git-lfs.github.com"):
                    reason = "it is a Git LFS pointer; fetch it with git lfs pull"
            raise Failure(f"cannot load the tokenizer {self.path}: {reason}") from error
        if not hasattr(self.tokenizer, "encode_special_tokens"):
            raise missing("a tokenizer.json", "tokenizers>=0.19")
        self.folder = Folder(self.path)
        if self.folder.config.get("auto_map"):
            self.warnings.append(
                f"{self.folder.path} refers to custom code (auto_map). It is not run; "
                "tokenizer.json and the other files are read without it"
            )
        self.reset_calls()
        self.add_tokens(AddedToken)
        self.set_prefix_space()
        self.set_normalizer()
        self.vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        if not self.vocab:
            raise Failure(f"the tokenizer {self.path} has an empty vocabulary")
        self.find_own_tokens()
        self.tokenizer.encode_special_tokens = not parse_special
        added = self.tokenizer.get_added_tokens_decoder()
        control = {id: token.content for id, token in added.items() if token.special}
        self.special = frozenset(control)
        self.control = {} if parse_special else control
        self.control_ids = frozenset(self.control)
        self.plain = None

    def reset_calls(self):
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        dropout = getattr(self.tokenizer.model, "dropout", None)
        if dropout:
            self.tokenizer.model.dropout = None
            self.warnings.append(
                f"the tokenizer {self.path} has a BPE dropout of {dropout}. It is "
                "disabled: the same text always gives the same tokens"
            )

    def add_tokens(self, AddedToken):
        tokens = self.folder.added_tokens(AddedToken)
        self.tokenizer.add_tokens([token for _, token in tokens])
        for id, token in tokens:
            got = self.tokenizer.token_to_id(token.content)
            if id is not None and got != id:
                self.warnings.append(
                    f"{self.folder.path}: expected the id {id} for the token "
                    f"{token.content}, got {got} with {self.path}; the latter is used, as "
                    "AutoTokenizer does. Check that the files belong to one tokenizer"
                )

    def set_prefix_space(self):
        """Sets the prefix space as in PreTrainedTokenizerFast. The default is without."""
        if not self.folder.config or self.tokenizer.pre_tokenizer is None:
            return
        state = json.loads(self.tokenizer.pre_tokenizer.__getstate__())
        wanted = self.folder.config.get("add_prefix_space", False)
        if wanted is not None and state.get("add_prefix_space", wanted) != wanted:
            self.tokenizer.pre_tokenizer.add_prefix_space = wanted

    def set_normalizer(self):
        """Sets the normalizer as BertTokenizerFast does."""
        if not self.folder.is_bert or self.tokenizer.normalizer is None:
            return
        config = self.folder.config
        state = json.loads(self.tokenizer.normalizer.__getstate__())
        if state.get("type") == "BertNormalizer":
            normalizer = self.tokenizer.normalizer
            normalizer.lowercase = config.get("do_lower_case", True)
            normalizer.strip_accents = config.get("strip_accents")
            chinese = config.get("tokenize_chinese_chars", True)
            normalizer.handle_chinese_chars = chinese

    def find_own_tokens(self):
        """Returns the ids that the tokenizer itself puts around a text."""
        item = self.tokenizer.encode("a")
        mask = item.special_tokens_mask
        first = mask.index(0) if 0 in mask else len(mask)
        last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
        self.own_begin, self.own_end = item.ids[:first], item.ids[last:]
        if self.folder.adds_begin is not None:
            begin = self.folder.begin if self.folder.adds_begin else None
            end = self.folder.end if self.folder.adds_end else None
            self.own_begin = [self.vocab[begin]] if begin else []
            self.own_end = [self.vocab[end]] if end else []

    def end_of_document(self, name, is_needed):
        names = [name] if name else [self.folder.end] if self.folder.end else []
        if not names and self.folder.end_id in self.vocab.values():
            return self.folder.end_id  # as in config.json
        names = names or END_NAMES
        for found in names:
            if found in self.vocab:
                return self.vocab[found]
        if not name and len(self.own_end) == 1:
            return self.own_end[0]
        if is_needed:
            raise Failure(
                f"the tokenizer {self.path} has no token {' or '.join(names)}; name "
                "the token that ends a document with --end-of-document"
            )
        return -1

    def begin_of_document(self, name):
        if name == "none" or (not name and not self.own_begin):
            return None
        if name and name not in self.vocab:
            raise Failure(
                f"the tokenizer {self.path} has no token {name}; name one that it has "
                "with --begin-of-document, or none"
            )
        if not name and len(self.own_begin) > 1:
            tokens = [self.tokenizer.id_to_token(id) for id in self.own_begin]
            raise Failure(
                f"the tokenizer {self.path} starts a text with the tokens "
                f"{' '.join(tokens)}, and a dataset has room for one; name it with "
                "--begin-of-document, or none"
            )
        return self.vocab[name] if name else self.own_begin[0]

    def encode(self, text):
        return self.encode_all([text])[0]

    def encode_all(self, texts):
        batch = getattr(
            self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch
        )
        found = [item.ids for item in batch(texts, add_special_tokens=False)]
        for i, ids in enumerate(found):
            # A model whose vocabulary has the control tokens as pieces finds them.
            if self.control_ids and not self.control_ids.isdisjoint(ids):
                found[i] = self.without_control(texts[i])
        return found

    def without_control(self, text):
        """Encodes with the control tokens' names changed to what no text has."""
        if self.plain is None:
            names = {text: f"\0control {id}\0" for id, text in self.control.items()}
            self.plain = renamed(self.tokenizer, names)
        return self.plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids, keep_special):
        """Decodes as the tokenizer does, but where tokens of bytes (<0xC3>) end within
        a character, the characters before it stay."""
        tokens = [self.tokenizer.id_to_token(id) for id in ids]
        is_byte = [bool(BYTE_TOKEN.fullmatch(token or "")) for token in tokens]
        if not any(is_byte) or "ByteFallback" not in str(self.tokenizer.decoder):
            return self.tokenizer.decode(ids, skip_special_tokens=not keep_special)
        pieces = []
        kept = [
            (token, byte)
            for id, token, byte in zip(ids, tokens, is_byte, strict=True)
            if token is not None and (keep_special or id not in self.special)
        ]
        for byte, group in itertools.groupby(kept, key=lambda item: item[1]):
            texts = [token for token, _ in group]
            if byte:
                data = bytes(int(text[3:5], 16) for text in texts)
                try:
                    data.decode("utf-8")
                except UnicodeDecodeError as error:
                    if error.reason == "unexpected end of data":
                        texts = [data[: error.start].decode("utf-8") + "\ufffd"]
            pieces += texts
        return self.tokenizer.decoder.decode(pieces)

    def spelled(self, text):
        """Returns a control token that the text spells out, of the first few; or
        None."""
        return next((c for c in list(self.control.values())[:16] if c in text), None)


def renamed(tokenizer, names):
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.to_str())
    model = state["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): id for text, id in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [
            pair
            for pair in pairs
            if "".join(pair) not in names and names.keys().isdisjoint(pair)
        ]
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    state["post_processor"] = None
    plain = Tokenizer.from_str(json.dumps(state))
    plain.encode_special_tokens = True
    return plain
