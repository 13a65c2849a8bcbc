"""Conversations as tokens with a mask, through the chat template of a Hugging Face
tokenizer."""

import inspect
import json
import os

from flatshard._data.failures import Failure, missing
from flatshard._data.hf_messages import (
    ASSISTANT,
    Conversation,
    parsed_object,
    read_json,
)
from flatshard._data.hf_rendering import REASONING, Rendering, lost_calls

# Keys of a message that every chat has for bookkeeping.
KNOWN = ("role", "content", "tool_call_id")


def load_tokenizer(path):
    """Returns the result of AutoTokenizer for the folder, without torch."""
    os.environ.setdefault("USE_TORCH", "0")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        import jinja2  # noqa: F401  (transformers needs it for templates)
        from transformers import AutoTokenizer
    except ImportError as error:
        package = "jinja2" if error.name == "jinja2" else "transformers"
        raise missing("--chat", package) from error
    if os.path.basename(path) != "tokenizer.json":
        raise Failure(
            f"--chat: expected a tokenizer's folder, got {path}; the chat template "
            "is next to tokenizer.json"
        )
    folder = os.path.dirname(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the tokenizer's class raises
        raise Failure(f"cannot load the tokenizer {folder}: {error}") from error
    if not tokenizer.chat_template:
        raise Failure(
            f"--chat: the tokenizer {folder} has no chat template; use the folder of "
            "an instruction-tuned model, or write chat_template.jinja there"
        )
    return tokenizer


class ChatEncoder:
    """Conversations of JSON rows as token ids and a mask of what is trained.

    @param variables  JSON text of an object: variables of the template."""

    def __init__(self, path, train_on, variables=""):
        self.tokenizer = load_tokenizer(path)
        self.train_on = train_on
        self.control = [t for t in self.tokenizer.all_special_tokens if t]
        self.control_ids = set(self.tokenizer.all_special_ids)
        self.variables = parsed_object(variables or {}, "--chat-template-kwargs")
        self.check_variables(self.variables, "--chat-template-kwargs")
        self.warnings = []  # that are still to be reported
        self.warned = set()

    def check_variables(self, variables, what):
        call = inspect.signature(self.tokenizer.apply_chat_template)
        taken = {"messages", *call.parameters} - {"documents", "kwargs"}
        for name in variables:
            if name in taken:
                raise Failure(f"{what}: '{name}' is not a variable of a chat template")

    def warn(self, where, key, text):
        """Warns of the first row with a fault."""
        if key not in self.warned:
            self.warned.add(key)
            self.warnings.append(f"{where}: {text}")

    def of_row(self, where, text, encode):
        try:
            chat = Conversation(read_json(text))
            self.check_variables(chat.variables, "'chat_template_kwargs'")
            rendering = Rendering(
                self.tokenizer, self.control_ids, chat, self.variables
            )
            self.look_for_losses(where, chat, rendering)
            self.look_for_control(where, chat)
            return encode(chat, rendering)
        except ValueError as error:
            raise Failure(f"{where}: expected JSON: {error}") from error
        except RecursionError as error:
            raise Failure(
                f"{where}: expected JSON with less than some hundred lists and objects "
                "inside each other; leave the row out"
            ) from error
        except Failure as failure:
            raise Failure(f"{where}: {failure}") from failure

    def encode(self, where, text):
        """@return ids, and a list of as many numbers, 1 where a token is trained."""

        def tokens(chat, rendering):
            is_all = self.train_on == "all"
            chosen = chat.chosen(self.train_on)
            for at, flag in enumerate(chat.flags):
                if flag and not is_all and chat.messages[at]["role"] != ASSISTANT:
                    self.warn(
                        where,
                        "flag",
                        f"message {at + 1} ({chat.messages[at]['role']}) is marked as "
                        f"trained, and --train-on {self.train_on} trains messages of "
                        "the assistant only",
                    )
            ids, mask = rendering.tokens(chosen, is_all)
            if not any(mask):
                raise Failure(
                    "the chat template marks no token as generated ({% generation %}), "
                    "or writes no token of the assistant's messages; fix the "
                    "template, or give --train-on all"
                )
            return ids, mask

        return self.of_row(where, text, tokens)

    def prompt(self, where, text):
        """@return ids of a conversation up to where the assistant answers, and the id
        of the control token that ends its answer, or None."""

        def tokens(chat, rendering):
            if chat.messages[-1]["role"] == ASSISTANT:
                raise Failure(
                    "expected a last message that the assistant answers, got one of "
                    "its own; leave it out"
                )
            return rendering.ids(
                rendering.write(rendering.messages, prompt=True)
            ), self.end_of_turn(rendering)

        return self.of_row(where, text, tokens)

    def end_of_turn(self, rendering):
        """Returns the first control token after an answer."""
        answer = "flatshard answers"
        message = {"role": ASSISTANT, "content": answer}
        text = rendering.write([*rendering.messages, message])
        rest = text[text.rindex(answer) + len(answer) :] if answer in text else ""
        ids = rendering.ids(rest)
        return next((id for id in ids if id in self.control_ids), None)

    def look_for_control(self, where, chat):
        """Warns of the first control token that a message spells out."""
        texts = [message["content"] or "" for message in chat.messages]
        found = (t for text in texts for t in self.control if t in text)
        name = None if "control" in self.warned else next(found, None)
        if name:
            self.warn(
                where,
                "control",
                f"a message spells out the control token {name}. It becomes the token, "
                "because templates leave no way to distinguish them",
            )

    def look_for_losses(self, where, chat, rendering):
        """Warns of what a row has and the template does not write."""

        def warn(key, text):
            self.warn(where, key, f"the chat template does not {text}")

        for key in chat.unused:
            self.warn(where, f"row {key}", f"the key '{key}' of the row is not used")
        for name in [*rendering.variables, *(["tools"] if chat.tools else [])]:
            if not rendering.is_used(name):
                warn(f"variable {name}", f"use the variable '{name}'")
        written = "".join(rendering.text.split())
        for at, message in enumerate(rendering.messages):
            place = f"message {at + 1} ({message['role']})"
            unknown = [
                k for k in message if k not in KNOWN and not rendering.is_used(k)
            ]
            if unknown and not message.get("content") and "tool_calls" not in message:
                raise Failure(
                    f"expected a 'content' in {place}, found {', '.join(unknown)}"
                )
            for key in unknown:
                warn(key, f"use the key '{key}' of {place}")
            for key in ("content", *REASONING):
                text = message.get(key)
                if isinstance(text, str) and not is_part(text, written):
                    warn(key, f"write all of the '{key}' of {place}")
        for name in lost_calls(rendering.messages, rendering.text):
            warn("tool_calls", f"write the call of {name} in 'tool_calls'")


def is_part(text, written):
    """Returns whether a template has written a text, maybe as JSON."""
    forms = (text, json.dumps(text, ensure_ascii=False)[1:-1])
    return any("".join(form.split()) in written for form in forms)
