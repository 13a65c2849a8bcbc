"""The text of a conversation by a chat template, and the tokens of each message."""

import bisect
import json
import re

from flatshard._data.failures import Failure
from flatshard._data.hf_messages import ASSISTANT, without_null

# The tags of a template around what the assistant gives.
BEGIN_TAG = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
END_TAG = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
COMMENT = re.compile(r"\{#.*?#\}", re.S)
# Python's words for null and for objects. Templates write them by mistake.
PYTHON_WORDS = re.compile(r"\bNone\b|\bnull\b|\{'")
# The names that templates have for the reasoning of a message.
REASONING = ("reasoning_content", "reasoning", "thinking")


def common(a, b):
    """Returns the length of the longest common prefix."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return next(at for at in range(most) if a[at] != b[at])


class Rendering:
    """A conversation that the chat template has written, and its tokens."""

    def __init__(self, tokenizer, control_ids, chat, variables):
        self.tokenizer = tokenizer
        self.control_ids = control_ids
        self.tools = chat.tools
        self.variables = {**variables, **chat.variables}
        self.source = tokenizer.get_chat_template(tools=chat.tools)
        messages = [self.with_known_reasoning(message) for message in chat.messages]
        self.messages = self.in_known_form(messages)
        self.text = self.write(self.messages)
        found = self.encoded(self.text)
        self.token_ids = found["input_ids"]
        self.stops = [stop for _, stop in found["offset_mapping"]]
        # Tokens of spaces have no characters where a tokenizer trims offsets.
        self.starts = [min(first, last - 1) for first, last in found["offset_mapping"]]

    def write(self, messages, prompt=False, source=None):
        """Returns the text of messages, with `prompt` up to where an answer starts."""
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                chat_template=source or self.source,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.variables,
            )
        except Exception as error:  # Jinja's, and what templates run into
            raise Failure(
                f"the chat template refuses the conversation: {error}"
            ) from error

    def encoded(self, text):
        return self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True
        )

    def ids(self, text):
        return self.encoded(text)["input_ids"]

    def is_used(self, name):
        return re.search(rf"\b{re.escape(name)}\b", self.source)

    def with_known_reasoning(self, message):
        """Returns the message with its reasoning under the template's name for it."""
        names = [name for name in REASONING if self.is_used(name)]
        given = [name for name in REASONING if name in message]
        if len(given) != 1 or not names or given[0] in names:
            return message
        rest = {key: value for key, value in message.items() if key != given[0]}
        return {**rest, names[0]: message[given[0]]}

    def in_known_form(self, messages):
        """Returns the messages in the form that the template writes best. Templates test
        in many ways whether there is a content, so an empty one is None, nothing or "".
        They expect the arguments of calls as objects or as JSON text."""
        calls = [call for m in messages for call in m.get("tool_calls", [])]
        empty = any(message["content"] is None for message in messages)
        refusal, found = None, []
        for filled in ({"content": None}, {}, {"content": ""}) if empty else ({},):
            for is_text in (False, True) if calls else (False,):
                form = [of_form(message, filled, is_text) for message in messages]
                try:
                    text = self.write(form)
                except Failure as failure:
                    refusal = failure
                    continue
                lost = len(lost_calls(messages, text))
                words = len(PYTHON_WORDS.findall(text))
                found.append((lost, words, len(found), is_text, form))
        if not found:
            raise refusal
        *_, self.has_text_arguments, form = min(found, key=lambda item: item[:3])
        return form

    def place(self, messages, at, prompt=False):
        """Returns start and end of the text of a message: what becomes other text with
        another content, reasoning and arguments of calls."""
        text = self.write(messages, prompt)
        other = next(c for c in map(chr, range(0xAC00, 0xD7A4)) if c not in text)
        change = {key: other for key in REASONING if messages[at].get(key)}
        change["content"] = other
        if "tool_calls" in messages[at]:
            change["tool_calls"] = [
                with_arguments(call, {other: other}, self.has_text_arguments)
                for call in messages[at]["tool_calls"]
            ]
        changed = [*messages[:at], {**messages[at], **change}, *messages[at + 1 :]]
        varied = self.write(changed, prompt)
        if varied == text:
            raise Failure(
                f"the chat template does not write message {at + 1} "
                f"({messages[at]['role']}); leave it out"
            )
        begin = common(text, varied)
        return begin, max(begin, len(text) - common(text[::-1], varied[::-1]))

    def prompt_before(self, at):
        """Returns the prompt that a message answers, as far as the text starts with
        it."""
        text = self.text
        try:
            answers = self.messages[at]["role"] == ASSISTANT
            before = self.messages[:at]
            prompt = self.write(before, answers) if before else ""
            if prompt and text.startswith(prompt):
                return prompt
            # Templates write other things for an answer to come than in the answer
            # (<think>), and later rewrite messages (without their reasoning).
            history = self.write(before) if before else ""
            if history and prompt.startswith(history):
                if common(text, prompt) >= len(history):
                    return prompt
                end = self.place(before, at - 1, answers)[1]
                begun = text[: self.place(self.messages, at - 1)[1]]
                if common(text, begun + prompt[end:]) >= len(begun + history[end:]):
                    return begun + prompt[end:]
        except Failure:
            pass  # of messages that are no conversation
        # Nothing comes before the first message that the others do not have, too.
        return text[: self.place(self.messages, at)[0]]

    def end_of(self, at):
        """Returns where a message of the text ends, with what the template writes
        after it."""
        text = self.text
        if at + 1 == len(self.messages):
            return len(text)
        messages = self.messages[: at + 1]
        try:
            alone = self.write(messages)
            if text.startswith(alone):
                return len(alone)
            after = alone[self.place(messages, at)[1] :]
        except Failure:
            after = None
        end = self.place(self.messages, at)[1]
        rest = text[end:]
        if after is None:
            found = self.encoded(rest)
            ends = zip(found["input_ids"], found["offset_mapping"], strict=True)
            stops = (stop for id, (_, stop) in ends if id in self.control_ids)
            return end + next(stops, 0)
        if rest.startswith(after):
            return end + len(after)
        # The rest may start with a part of a token of `after`.
        most = bisect.bisect_right(self.stops, end + common(after, rest))
        return max([end, *self.stops[most - 1 : most]])

    def marked(self, chosen):
        """Returns the spans of the text that the template marks as generated, of the
        chosen messages."""
        text = self.text
        marks = [chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text]
        begin, end = marks[:2]
        source = BEGIN_TAG.sub(
            r"{%\1 generation %}" + begin + r"{% if true \2%}", self.source
        )
        source = END_TAG.sub(r"{%\1 endif %}" + end + r"{% endgeneration \2%}", source)
        spans, pieces, size = [], [], 0
        for piece in re.split(
            f"([{begin}{end}])", self.write(self.messages, source=source)
        ):
            if piece == begin:
                spans.append((size, size))
            elif piece == end:
                spans[-1] = (spans[-1][0], size)
            else:
                pieces.append(piece)
                size += len(piece)
        if "".join(pieces) != text:
            raise Failure(
                "the chat template changes the text between {% generation %} and "
                "{% endgeneration %} afterwards, so its tokens cannot be found; remove "
                "the tags from the template"
            )
        answers = [at for at, m in enumerate(self.messages) if m["role"] == ASSISTANT]
        if len(chosen) == len(answers):
            return spans
        # A span is of the first answer that does not end before it.
        ends = []
        for at in answers:
            try:
                ends.append(self.end_of(at))
            except Failure:  # an answer that the template does not write
                ends.append(ends[-1] if ends else 0)
        last = len(ends) - 1
        owners = [min(bisect.bisect_left(ends, stop), last) for _, stop in spans]
        pairs = zip(spans, owners, strict=True)
        return [span for span, owner in pairs if answers[owner] in chosen]

    def tokens(self, chosen, is_all):
        """Returns the token ids, and the mask of the conversation: 1 for the tokens of
        the chosen messages, or (`is_all`) of all others.

        Tokens of a message are those that differ from the tokens of its prompt, to the
        last one that has a character of it. In a template with {% generation %} they
        are those with a character between the tags."""
        if BEGIN_TAG.search(COMMENT.sub("", self.source)) and not is_all:
            spans = [
                (bisect.bisect_right(self.stops, begin), end)
                for begin, end in self.marked(chosen)
                if begin < end
            ]
        else:
            spans = [
                (common(self.ids(self.prompt_before(at)), self.token_ids), end)
                for at, end in ((at, self.end_of(at)) for at in chosen)
            ]
        mask = [int(is_all)] * len(self.token_ids)
        for first, end in spans:
            last = bisect.bisect_left(self.starts, end)
            # Some control tokens include the spaces before them, but the spaces belong to
            # the message.
            if last > first and self.stops[last - 1] > end:
                last -= self.token_ids[last - 1] in self.control_ids
            for token in range(first, last):
                mask[token] = int(not is_all)
        return self.token_ids, mask


def with_arguments(call, arguments, is_text):
    """Returns a call with other arguments, as an object or as JSON text."""
    if is_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def of_form(message, filled, is_text):
    """Returns a message with `filled` in place of an empty content, and the arguments
    of its calls as objects or as JSON text."""
    if message["content"] is None:
        message = {**without_null(message), **filled}
    if "tool_calls" in message:
        calls = [
            with_arguments(call, call["function"]["arguments"], is_text)
            for call in message["tool_calls"]
        ]
        message = {**message, "tool_calls": calls}
    return message


def lost_calls(messages, text):
    """Returns the names of functions that messages call and a text does not have."""
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    names = [call["function"]["name"] for call in calls]
    return [name for name in names if text.count(name) < names.count(name)]
