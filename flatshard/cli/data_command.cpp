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

/// The options that a module of the Python package reads. Here they have their
/// types and their help; what they mean stands there alone.
struct PythonOptions {
  std::vector<std::string> inputs;
  std::vector<std::string> validation;
  std::string output;
  std::string text;  ///< of any other option
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

/// Adds where the corpus is written to.
void add_output(CLI::App& command, PythonOptions& options) {
  command
      .add_option(
          "--output,-o",
          options.output,
          "The corpus folder to make; it appears only when it is whole")
      ->required();
}

/// Adds how the corpus is written.
void add_writing(
    CLI::App& command,
    PythonOptions& options,
    const char* python) {
  command.add_option("--python", options.python, python);
  command.add_option(
      "--shard-tokens",
      options.count,
      "Tokens after which a new file begins [268435456]");
  command.add_flag(
      "--force",
      options.flag,
      "Replace an older corpus at --output");
}

void add_prepare(CLI::App& data) {
  CLI::App* command = data.add_subcommand(
      "prepare",
      "Tokenize text files into a corpus folder for training");
  const auto options = std::make_shared<PythonOptions>();
  command
      ->add_option(
          "--input,-i",
          options->inputs,
          "Files, folders or globs (quote them: 'texts/**/*.txt'; ** is any "
          "number of folders): text, JSON rows (.jsonl, .ndjson, .json; one a "
          "line or one list) and CSV, each as it is or in .gz or .zst, "
          "Parquet, "
          "Arrow, and folders that datasets' save_to_disk wrote. A text is one "
          "document, and so is each row")
      ->required();
  add_output(*command, *options);
  command->add_option(
      "--tokenizer,-t",
      options->text,
      "'bytes' (a byte is a token, 256 ends a document, vocabulary 257), or a "
      "Hugging Face tokenizer: its folder or its tokenizer.json (needs Python "
      "with the tokenizers package) [bytes]");
  command->add_option(
      "--text-field",
      options->text,
      "Field of JSON rows, and column of CSV, Parquet and Arrow (the latter "
      "two need Python with the pyarrow package), that has the documents "
      "[text]");
  command->add_option(
      "--format",
      options->text,
      "Kind of the files: auto (by their first bytes and names), text (bytes "
      "that are not UTF-8 become U+FFFD), json, parquet, arrow, csv, or bytes "
      "(each byte as it is, for --tokenizer bytes) [auto]");
  command->add_flag(
      "--chat",
      options->flag,
      "Each row of JSON is a conversation, which the tokenizer's chat template "
      "writes: the field messages (a list of role and content), or prompt and "
      "completion; tools if there are any (needs Python with the transformers "
      "and jinja2 packages)");
  command->add_option(
      "--train-on",
      options->text,
      "With --chat, the tokens whose loss is taken: assistant (the assistant's "
      "messages), last (the last of them) or all [assistant]");
  command->add_option(
      "--chat-template-kwargs",
      options->text,
      "With --chat, variables of the chat template as a JSON object, for "
      "example '{\"enable_thinking\": false}'. Variables in the field "
      "chat_template_kwargs of a row take precedence [none]");
  command->add_flag(
      "--parse-special",
      options->flag,
      "Take control tokens that a text spells out (<|endoftext|>) as these "
      "tokens and not as text");
  command->add_option(
      "--validation-fraction",
      options->number,
      "Share of the documents that become the validation split, chosen by the "
      "hash of their names; of a single document, its end [0.05]");
  command->add_option(
      "--end-of-document",
      options->text,
      "Text of the token that ends a document, for a tokenizer.json "
      "[the folder's eos_token, or <|end_of_text|>, <|endoftext|>, </s> or "
      "<eos>, whichever it has]");
  command->add_option(
      "--begin-of-document,--bos",
      options->text,
      "Text of a token to put before each document, for a tokenizer.json, or "
      "none [what AutoTokenizer puts before a text, if anything]");
  add_writing(
      *command,
      *options,
      "Python that reads the files [$FLATSHARD_PYTHON, else .venv/bin/python "
      "here or next to the program, else python3]");
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
      "Make a corpus folder of tokens that another program has written");
  const auto options = std::make_shared<PythonOptions>();
  command
      ->add_option(
          "--input,-i",
          options->inputs,
          "Token files, folders or globs: nanoGPT's and llm.c's .bin, "
          "Megatron's .bin with its .idx, NumPy's .npy")
      ->required();
  command->add_option(
      "--validation",
      options->validation,
      "The same for the validation split [documents of --input]");
  add_output(*command, *options);
  command
      ->add_option(
          "--tokenizer,-t",
          options->text,
          "The Hugging Face tokenizer that the tokens are of (its folder or "
          "its tokenizer.json), or none with --vocab-size and "
          "--end-of-document")
      ->required();
  command->add_option(
      "--vocab-size",
      options->count,
      "Every token is below this [the tokenizer's]");
  command->add_option(
      "--end-of-document",
      options->text,
      "Text or id of the token that ends a document [the tokenizer's own]");
  command->add_option(
      "--dtype",
      options->text,
      "Type of the tokens of files without a header: uint16, uint32, int64 or "
      "another type of integers [uint16]");
  command->add_option(
      "--validation-fraction",
      options->number,
      "Without --validation: the share of the documents for that split [0.05]");
  add_writing(
      *command,
      *options,
      "Python with the numpy package, and tokenizers for a tokenizer, as for "
      "data prepare");
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
      "Print a sample as training sees it, with what is trained highlighted");
  struct Show {
    std::string folder;
    data::ShowOptions options;
    std::string packing = "documents";
  };
  const auto show = std::make_shared<Show>();
  command->add_option("folder", show->folder, "A corpus folder")->required();
  command->add_option(
      "--sample",
      show->options.sample,
      "Number of the sample, in the order of the corpus [0]");
  command->add_option(
      "--split",
      show->options.split,
      "train or validation [train]");
  command->add_option(
      "--seq-len",
      show->options.packing.seq_len,
      "Tokens of a sample, as training.seq_len [2048]");
  command
      ->add_option(
          "--packing",
          show->packing,
          "documents or stream, as data.packing [documents]")
      ->check(CLI::IsMember({"documents", "stream"}));
  command->add_option(
      "--documents-per-sample",
      show->options.packing.max_documents,
      "As data.documents_per_sample [seq_len / 64, at least 16]");
  command->add_option(
      "--python",
      show->options.python,
      "Python with the tokenizers package, as for data prepare");
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
      "Show what a corpus folder holds, and check that it is whole");
  const auto folder = std::make_shared<std::string>();
  command->add_option("folder", *folder, "A corpus folder")->required();
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
  CLI::App* data = program.add_subcommand(
      "data",
      "Prepare and inspect the token files that training reads");
  data->require_subcommand(1);
  add_prepare(*data);
  add_import(*data);
  add_info(*data);
  add_show(*data);
}

}  // namespace flatshard
