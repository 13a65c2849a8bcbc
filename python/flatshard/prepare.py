"""Tokenizes files into a dataset folder for training: `python -m flatshard.prepare`, or
`flatshard data prepare`."""

from flatshard._data import core
from flatshard._data.command import Arguments, check_fraction, run, write_corpus
from flatshard._data.documents import BYTE_END, ByteTokens, Chats, HfTokens
from flatshard._data.failures import expect, warn
from flatshard._data.formats import FORMATS, TextOptions, read_documents
from flatshard._data.survey import choose_validation, survey_inputs


def parser():
    parser = Arguments("prepare")
    parser.text("--tokenizer", "-t", default="bytes")
    for name in ("--text-field", "--train-on", "--chat-template-kwargs"):
        parser.text(name)
    parser.text("--end-of-document")
    parser.text("--begin-of-document", "--bos")
    parser.text("--format", default="auto")
    parser.flag("--chat")
    parser.flag("--parse-special")
    return parser


def parse(arguments=None):
    return parser().parse_args(arguments)


def check_format(options):
    options.format = {"": "auto", "jsonl": "json"}.get(options.format, options.format)
    names = ["auto", *(name for name in FORMATS if name != "bytes")]
    expect(
        options.format in (*names, "bytes"),
        f"--format: expected {', '.join(names)} or bytes, got '{options.format}'",
    )
    expect(
        options.format != "bytes" or options.tokenizer == "bytes",
        f"--format bytes: expected --tokenizer bytes, got {options.tokenizer}; a "
        "tokenizer.json encodes text",
    )


def check_chat(options):
    """Checks the options of chats, and those that chats do not go with."""
    if not options.chat:
        expect(not options.train_on, "--train-on belongs to --chat")
        expect(
            not options.chat_template_kwargs, "--chat-template-kwargs belongs to --chat"
        )
        return
    expect(
        options.train_on in ("", "assistant", "all", "last"),
        f"--train-on: expected assistant, all or last, got {options.train_on}",
    )
    expect(
        options.tokenizer != "bytes",
        "--chat: expected --tokenizer with the folder of a Hugging Face tokenizer, because "
        "its chat template is used; byte tokens have none",
    )
    expect(
        options.format in ("auto", "json"),
        f"--chat needs JSON rows: expected --format auto or json, got {options.format}",
    )
    for name in ("text_field", "begin_of_document", "parse_special"):
        expect(
            not getattr(options, name),
            f"--{name.replace('_', '-')} does not go with --chat: the chat template "
            "decides",
        )


def open_tokens(options, tokenizer):
    if options.chat:
        train_on = options.train_on or "assistant"
        end, variables = options.end_of_document, options.chat_template_kwargs
        return Chats(tokenizer, end, train_on, variables)
    if tokenizer:
        return HfTokens(
            tokenizer,
            options.end_of_document,
            options.begin_of_document,
            options.parse_special,
        )
    expect(
        not options.parse_special,
        "--parse-special belongs to a tokenizer.json; byte tokens have no control tokens "
        "that a text could spell",
    )
    for name in ("end_of_document", "begin_of_document"):
        expect(
            not getattr(options, name),
            f"--{name.replace('_', '-')} belongs to a tokenizer.json; byte tokens end a "
            f"document with token {BYTE_END} and have none at its start",
        )
    return ByteTokens()


def texts_of(files, options):
    """Yields the place and the text of each document that is not empty."""
    for file in files:
        has_lines = file.format.name == "json"
        for number, text in read_documents(file, options):
            if text:
                yield f"{file.path}:{number}" if has_lines else file.path, text


def prepare(options):
    """Tokenizes files and writes a dataset folder.

    A file of text is one document, and so is each row of another file. Empty ones are
    left out. A document goes to validation when the hash of its name (file#row) falls
    below `validation_fraction`. So adding files never moves one from a split to the
    other. With two or more documents and a fraction above 0 each split gets at least
    one. A single document is split, and its last part is for validation. Nothing appears
    under `output` until it is complete.

    @return a Survey of the inputs, the content of meta.json, and lines that describe the
      dataset."""
    check_fraction(options)
    check_format(options)
    check_chat(options)
    is_bytes = options.tokenizer == "bytes"
    tokenizer = "" if is_bytes else core.find_tokenizer(options.tokenizer)
    texts = TextOptions(
        field=options.text_field or "text",
        replaces_invalid=options.format == "text",
        is_chat=options.chat,
    )
    core.check_output(options.output, options.force)
    survey = survey_inputs(options.input, options.format, texts)
    expect(
        not options.text_field or any(file.format.title for file in survey.files),
        "--text-field belongs to files of rows (JSON and Parquet); --input has none",
    )
    if texts.num_replaced:
        warn(f"{texts.num_replaced} bytes that are not UTF-8 became U+FFFD")
    tokens = open_tokens(options, tokenizer)
    fraction = options.validation_fraction
    meta, lines = write_corpus(
        options,
        survey.files,
        choose_validation(survey.files, fraction),
        fraction,
        tokens,
        tokens.documents(texts_of(survey.files, texts)),
        copy=tokenizer,
        tokenizer=tokens.name,
        input_hash=survey.hash,
    )
    return survey, meta, lines


def main(arguments=None):
    options = parse(arguments)
    survey, meta, lines = prepare(options)
    skipped = survey.found.describe_skipped()
    num_tokens = meta["num_tokens"]
    print(
        f"files            {survey.describe_files()}\n"
        + (f"skipped          {skipped}\n" if skipped else "")
        + f"documents        {survey.num_documents}, {survey.num_empty} empty ones left "
        f"out\n"
        f"tokens per byte  {num_tokens / survey.nbytes:.3f} ({num_tokens} tokens, "
        f"{survey.nbytes} bytes of text)\n"
        f"{lines}",
        end="",
    )


if __name__ == "__main__":
    run(main)
