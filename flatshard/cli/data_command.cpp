#include "flatshard/cli/data_command.h"

#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/data/corpus_summary.h"
#include "flatshard/data/python_tokenizer.h"
#include "flatshard/data/show_sample.h"

namespace flatshard {
namespace {

/// Options that a module of the Python package parses. Only their types and
/// help are defined here; the module defines their semantics.
struct PythonOptions {
  std::vector<std::string> inputs;
  std::vector<std::string> validation;
  std::string output;
  std::string text;  ///< for any other option
  double number = 0;
  std::int64_t count = 0;
  bool flag = false;
  std::string python;
};

/// Becomes the Python module, with the options that were given.
void run_python(
    const CLI::App& command,
    const PythonOptions& options,
    const std::string& module) {
  std::vector<std::string> arguments;
  for (const CLI::Option* option : command.get_options()) {
    const std::string& name = option->get_name();
    if (option->count() == 0 || name == "--python") {
      continue;
    }
    if (option->get_items_expected_max() == 0) {
      arguments.push_back(name);
      continue;
    }
    for (const std::string& value : option->results()) {
      arguments.push_back(name + "=" + value);
    }
  }
  data::exec_python(options.python, module, arguments);
}

/// Adds the option for the output folder of the dataset.
void add_output(CLI::App& command, PythonOptions& options) {
  command
      .add_option(
          "--output,-o",
          options.output,
          "Output directory for the dataset; created only once complete")
      ->required();
}

/// Adds the options for writing the dataset.
void add_writing(
    CLI::App& command,
    PythonOptions& options,
    const char* python) {
  command.add_option("--python", options.python, python);
  command.add_option(
      "--shard-tokens",
      options.count,
      "Maximum number of tokens per file [268435456]");
  command.add_flag(
      "--force",
      options.flag,
      "Replace an existing dataset at --output");
}

void add_prepare(CLI::App& data) {
  CLI::App* command = data.add_subcommand(
      "prepare",
      "Tokenize text files into a dataset for training");
  const auto options = std::make_shared<PythonOptions>();
  command
      ->add_option(
          "--input,-i",
          options->inputs,
          "Files, directories or glob patterns (quote them: 'texts/**/*.txt'; "
          "** matches any number of directories): text, JSON rows (.jsonl, "
          ".ndjson, .json; one per line or one list) and CSV, optionally "
          "compressed (.gz, .zst), Parquet, Arrow, and directories written by "
          "save_to_disk of datasets. Each text file and each row is one "
          "document")
      ->required();
  add_output(*command, *options);
  command->add_option(
      "--tokenizer,-t",
      options->text,
      "Tokenizer: 'bytes' (one token per byte, 256 ends a document, vocabulary "
      "size 257), or a Hugging Face tokenizer directory or tokenizer.json "
      "(requires Python with the tokenizers package) [bytes]");
  command->add_option(
      "--text-field",
      options->text,
      "Field of JSON rows, or column of CSV, Parquet and Arrow (the latter two "
      "require Python with the pyarrow package), that contains the documents "
      "[text]");
  command->add_option(
      "--format",
      options->text,
      "File format: auto (detected from content and name), text (bytes that "
      "are not valid UTF-8 become U+FFFD), json, parquet, arrow, csv, or bytes "
      "(raw bytes, for --tokenizer bytes) [auto]");
  command->add_flag(
      "--chat",
      options->flag,
      "Treat each JSON row as a conversation and format it with the "
      "tokenizer's chat template. Rows have messages (a list of role and "
      "content), or prompt and completion, and optionally tools (requires "
      "Python with the transformers and jinja2 packages)");
  command->add_option(
      "--train-on",
      options->text,
      "With --chat, the tokens that contribute to the loss: assistant (all "
      "assistant messages), last (the last assistant message), or all "
      "[assistant]");
  command->add_option(
      "--chat-template-kwargs",
      options->text,
      "With --chat, variables for the chat template as a JSON object, for "
      "example '{\"enable_thinking\": false}'. The field chat_template_kwargs "
      "of a row overrides them [none]");
  command->add_flag(
      "--parse-special",
      options->flag,
      "Parse control tokens that are spelled out in a text (<|endoftext|>) as "
      "tokens instead of text");
  command->add_option(
      "--validation-fraction",
      options->number,
      "Fraction of the documents in the validation split, selected by the hash "
      "of their names; for a single document, its last part [0.05]");
  command->add_option(
      "--end-of-document",
      options->text,
      "Text of the end-of-document token, for a tokenizer.json [eos_token of "
      "the tokenizer directory, or the first of <|end_of_text|>, "
      "<|endoftext|>, </s>, <eos> in the vocabulary]");
  command->add_option(
      "--begin-of-document,--bos",
      options->text,
      "Text of the token to insert before each document, for a tokenizer.json, "
      "or none [the token that AutoTokenizer inserts, if any]");
  add_writing(
      *command,
      *options,
      "Python interpreter that reads the files [$FLATSHARD_PYTHON, or "
      ".venv/bin/python in the current directory or next to the program, or "
      "python3]");
  command->footer("Example:\n"
                  "  flatshard data prepare --input 'texts/**/*.txt' --output "
                  "corpora/texts\n"
                  "Then set in the training config:\n"
                  "  [data]\n"
                  "  train = \"corpora/texts\"");
  command->callback(
      [command, options] { run_python(*command, *options, "prepare"); });
}

void add_import(CLI::App& data) {
  CLI::App* command = data.add_subcommand(
      "import",
      "Create a dataset from token files that another program has written");
  const auto options = std::make_shared<PythonOptions>();
  command
      ->add_option(
          "--input,-i",
          options->inputs,
          "Token files, directories or glob patterns: .bin of nanoGPT and "
          "llm.c, .bin with .idx of Megatron, .npy of NumPy")
      ->required();
  command->add_option(
      "--validation",
      options->validation,
      "Token files for the validation split [a fraction of the documents of "
      "--input]");
  add_output(*command, *options);
  command
      ->add_option(
          "--tokenizer,-t",
          options->text,
          "Tokenizer that produced the tokens (a Hugging Face directory or "
          "tokenizer.json), or none with --vocab-size and --end-of-document")
      ->required();
  command->add_option(
      "--vocab-size",
      options->count,
      "Vocabulary size; every token must be smaller [the tokenizer's "
      "vocabulary size]");
  command->add_option(
      "--end-of-document",
      options->text,
      "Text or id of the end-of-document token [eos_token of the tokenizer]");
  command->add_option(
      "--dtype",
      options->text,
      "Integer type of tokens in files without a header, such as uint16, "
      "uint32 or int64 [uint16]");
  command->add_option(
      "--validation-fraction",
      options->number,
      "Without --validation: fraction of the documents in the validation split "
      "[0.05]");
  add_writing(
      *command,
      *options,
      "Python interpreter with the numpy package, and with tokenizers for a "
      "tokenizer, as for data prepare");
  command->footer(
      "Example:\n"
      "  flatshard data import --input train.bin --validation val.bin "
      "--tokenizer models/gpt2 --output corpora/openwebtext");
  command->callback(
      [command, options] { run_python(*command, *options, "import_tokens"); });
}

void add_show(CLI::App& data) {
  CLI::App* command = data.add_subcommand(
      "show",
      "Print a training sample, with the tokens that contribute to the loss "
      "highlighted");
  struct Show {
    std::string folder;
    data::ShowOptions options;
    std::string packing = "documents";
  };
  const auto show = std::make_shared<Show>();
  command->add_option("folder", show->folder, "Dataset directory")->required();
  command->add_option(
      "--sample",
      show->options.sample,
      "Index of the sample, in dataset order [0]");
  command->add_option(
      "--split",
      show->options.split,
      "Split: train or validation [train]");
  command->add_option(
      "--seq-len",
      show->options.packing.seq_len,
      "Number of tokens per sample, as training.seq_len [2048]");
  command
      ->add_option(
          "--packing",
          show->packing,
          "Packing of samples, as in data.packing: documents or stream "
          "[documents]")
      ->check(CLI::IsMember({"documents", "stream"}));
  command->add_option(
      "--documents-per-sample",
      show->options.packing.max_documents,
      "Maximum number of documents per sample, as data.documents_per_sample "
      "[seq_len / 64, but at least 16]");
  command->add_option(
      "--python",
      show->options.python,
      "Python interpreter with the tokenizers package, as for data prepare");
  command->footer(
      "Trained tokens are green on a terminal, and between [[ and ]] "
      "elsewhere.\n"
      "Example:\n"
      "  flatshard data show corpora/chats --sample 3");
  command->callback([show] {
    show->options.packing.packing = show->packing == "stream"
                                        ? data::Packing::stream
                                        : data::Packing::documents;
    show->options.colors = ::isatty(STDOUT_FILENO) == 1;
    fmt::print("{}", data::show_sample(show->folder, show->options));
  });
}

void add_info(CLI::App& data) {
  CLI::App* command = data.add_subcommand(
      "info",
      "Describe a dataset and check that it is complete");
  const auto folder = std::make_shared<std::string>();
  command->add_option("folder", *folder, "Dataset directory")->required();
  command->callback([folder] {
    const data::CorpusMeta meta = data::CorpusMeta::load(*folder);
    for (const data::SplitMeta& split : meta.splits) {
      data::Corpus::open(*folder, split.name);
    }
    fmt::print("{}", data::summary(meta));
  });
}

}  // namespace

void add_data_command(CLI::App& program) {
  CLI::App* data =
      program.add_subcommand("data", "Prepare and inspect datasets");
  data->require_subcommand(1);
  add_prepare(*data);
  add_import(*data);
  add_info(*data);
  add_show(*data);
}

}  // namespace flatshard
