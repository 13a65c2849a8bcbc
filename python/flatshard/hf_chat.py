"""Conversations as tokens with a mask, through the chat template of a Hugging Face
tokenizer. The program `flatshard` runs this text before prepare_tokens.py."""

import json
import os
import re

from flatshard.hf_encoder import Failure, missing

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"


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
            f"--chat: the tokenizer {folder} has no chat template; take the folder of "
            "an instruction-tuned model, or write chat_template.jinja there"
        )
    return tokenizer


def messages_of(text, field, fallback_role):
    """Returns the messages that a field holds: a list of them, or one message's
    text."""
    if isinstance(text, str):
        return [{"role": fallback_role, "content": text}]
    if isinstance(text, list) and text:
        for message in text:
            if not isinstance(message, dict) or not isinstance(
                message.get("role"), str
            ):
                raise Failure(
                    f"expected messages with a role and a content in '{field}', got "
                    f"{json.dumps(message)[:80]}"
                )
        return [with_parsed_calls(message) for message in text]
    raise Failure(
        f"expected text or a list of messages in '{field}', got {json.dumps(text)[:80]}"
    )


def with_parsed_calls(message):
    """OpenAI's files have the arguments of a call as JSON text. Templates write JSON
    themselves and expect the object."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = []
    for call in calls:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError as error:
                raise Failure(
                    f"expected JSON in the arguments of a tool call: {error}"
                ) from error
        parsed.append({**call, "function": function})
    return {**message, "tool_calls": parsed}


class ChatEncoder:
    """Conversations of JSON rows as token ids and a mask of what is trained."""

    def __init__(self, path, train_on):
        self.tokenizer = load_tokenizer(path)
        self.train_on = train_on
        self.control = [t for t in self.tokenizer.all_special_tokens if t]
        self.spelled = None

    def encode(self, where, text):
        """@return ids, and a list of as many numbers, 1 where a token is trained."""
        try:
            row = json.loads(text)
        except ValueError as error:
            raise Failure(f"{where}: expected JSON: {error}") from error
        try:
            messages = self.conversation(row)
            self.look_for_control(messages)
            return self.tokens(messages, row.get("tools"))
        except Failure as failure:
            raise Failure(f"{where}: {failure}") from failure

    def conversation(self, row):
        if "messages" in row:
            messages = messages_of(row["messages"], "messages", "user")
        elif "prompt" in row and "completion" in row:
            messages = messages_of(row["prompt"], "prompt", "user")
            messages += messages_of(row["completion"], "completion", ASSISTANT)
        else:
            raise Failure(
                "expected the field 'messages', or 'prompt' and 'completion', found "
                f"{', '.join(row) or 'no field'}"
            )
        if self.train_on != "all" and not any(
            message["role"] == ASSISTANT for message in messages
        ):
            raise Failure(
                "expected a message of the assistant to train on; leave the row out, "
                "or give --train-on all"
            )
        return messages

    def look_for_control(self, messages):
        """Remembers the first control token that a message spells out."""
        if self.spelled is None:
            contents = [message.get("content") for message in messages]
            texts = [text for text in contents if isinstance(text, str)]
            found = (t for text in texts for t in self.control if t in text)
            self.spelled = next(found, None)

    def template(self, messages, tools, **options):
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # Jinja's, and what templates run into
            raise Failure(
                f"the chat template refuses the conversation: {error}"
            ) from error

    def ids_of(self, messages, tools, add_generation_prompt=False):
        if not messages:
            return []
        text = self.template(
            messages,
            tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt(self, where, text):
        """@return ids of a conversation up to where the assistant answers, and the id
        of the control token that ends its answer, or None."""
        try:
            row = json.loads(text)
            messages = self.conversation(row)
            if messages[-1]["role"] == ASSISTANT:
                raise Failure(
                    "expected a last message that the assistant answers, got one of "
                    "its own; leave it out"
                )
            self.look_for_control(messages)
            tools = row.get("tools")
            ids = self.ids_of(messages, tools, add_generation_prompt=True)
            return ids, self.end_of_turn(messages, tools)
        except ValueError as error:
            raise Failure(f"{where}: expected JSON: {error}") from error
        except Failure as failure:
            raise Failure(f"{where}: {failure}") from failure

    def end_of_turn(self, messages, tools):
        """Returns the first control token after an answer."""
        answer = "flatshard answers"
        whole = [*messages, {"role": ASSISTANT, "content": answer}]
        text = self.template(whole, tools, tokenize=False)
        rest = text[text.rindex(answer) + len(answer) :] if answer in text else ""
        ids = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        control = set(self.tokenizer.all_special_ids)
        return next((id for id in ids if id in control), None)

    def tokens(self, messages, tools):
        if self.train_on == "all":
            ids = self.ids_of(messages, tools)
            return ids, [1] * len(ids)
        template = self.tokenizer.get_chat_template(tools=tools)
        if GENERATION.search(template):
            ids, spans = self.by_markers(messages, tools)
        else:
            ids, spans = self.by_prefixes(messages, tools)
        mask = [0] * len(ids)
        for begin, end in spans[-1:] if self.train_on == "last" else spans:
            mask[begin:end] = [1] * (end - begin)
        return ids, mask

    def by_markers(self, messages, tools):
        """Returns the spans that the template itself marks as generated."""
        out = self.template(
            messages,
            tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = out["input_ids"], out["assistant_masks"]
        edges = [
            at
            for at in range(len(ids) + 1)
            if (at > 0 and mask[at - 1]) != (at < len(ids) and mask[at])
        ]
        if not edges:
            raise Failure(
                "the chat template marks no token as generated ({% generation %}); "
                "mend the template, or give --train-on all"
            )
        return ids, list(zip(edges[::2], edges[1::2], strict=True))

    def by_prefixes(self, messages, tools):
        """Returns the spans of messages of the assistant: from the end of the
        conversation before one to its end with it, where both begin the whole."""
        ids = self.ids_of(messages, tools)
        spans = []
        for at, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.ids_of(messages[:at], tools, add_generation_prompt=True)
            after = self.ids_of(messages[: at + 1], tools)
            for part, count in ((before, at), (after, at + 1)):
                if ids[: len(part)] != part:
                    raise Failure(
                        f"the chat template and tokenizer give other tokens for the "
                        f"first {count} messages alone than as the beginning of the "
                        "conversation, so it is not known which tokens the assistant "
                        "gave; mark them in the template with {% generation %}, or "
                        "give --train-on all"
                    )
            spans.append((len(before), len(after)))
        return ids, spans
