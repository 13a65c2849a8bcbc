#include "flatshard/cli/data_command.h"

#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "flatshard/core/error.h"
#include "flatshard/data/prepare.h"

namespace flatshard {
namespace {

std::string summary(const data::CorpusMeta& meta) {
  std::string text = fmt::format(
      "tokenizer        {}\n"
      "vocab_size       {}    (model.vocab_size must be at least this)\n"
      "end of document  token {}\n{}"
      "stored as        {}\n",
      meta.tokenizer,
      meta.vocab_size,
      meta.end_of_document,
      meta.begin_of_document
          ? fmt::format("begins with      token {}\n", *meta.begin_of_document)
          : "",
      data::to_string(meta.token_type));
  for (const data::SplitMeta& split : meta.splits) {
    text += fmt::format(
        "{:<16} {} tokens, {} documents, {} files\n",
        split.name,
        split.num_tokens,
        split.num_documents,
        split.shard_tokens.size());
  }
  return text;
}

void add_prepare(CLI::App& data) {
  CLI::App* command = data.add_subcommand(
      "prepare",
      "Tokenize text files into a corpus folder for training");
  const auto options = std::make_shared<data::PrepareOptions>();
  command
      ->add_option(
          "--input,-i",
          options->inputs,
          "Files, folders or globs (quote them: 'texts/**/*.txt'; ** is any "
          "number of folders). Each file is one document, each line of a "
          ".jsonl "
          "and each row of a .parquet file as well. Binary files of folders "
          "and globs are skipped")
      ->required();
  command
      ->add_option(
          "--output,-o",
          options->output,
          "The corpus folder to make; it appears only when it is whole")
      ->required();
  command->add_option(
      "--tokenizer,-t",
      options->tokenizer,
      "'bytes' (a byte is a token, 256 ends a document, vocabulary 257), or a "
      "Hugging Face tokenizer: its folder or its tokenizer.json (needs Python "
      "with the tokenizers package) [bytes]");
  command->add_option(
      "--text-field",
      options->text_field,
      "Field of .jsonl files, and column of .parquet files (which need Python "
      "with the pyarrow package), that has the documents [text]");
  command->add_option(
      "--validation-fraction",
      options->validation_fraction,
      "Share of the documents that become the validation split, chosen by the "
      "hash of their names; of a single document, its end [0.05]");
  command->add_option(
      "--end-of-document",
      options->end_of_document,
      "Text of the token that ends a document, for a tokenizer.json "
      "[the folder's eos_token, or <|end_of_text|>, <|endoftext|>, </s> or "
      "<eos>, whichever it has]");
  command->add_option(
      "--begin-of-document,--bos",
      options->begin_of_document,
      "Text of a token to put before each document, for a tokenizer.json "
      "[none]");
  command->add_option(
      "--python",
      options->python,
      "Python for a tokenizer.json and .parquet files [$FLATSHARD_PYTHON, else "
      ".venv/bin/python here or beside the program, else python3]");
  command->add_option(
      "--shard-tokens",
      options->shard_tokens,
      "Tokens after which a new file begins [268435456]");
  command->add_flag(
      "--force",
      options->force,
      "Replace an older corpus at --output");
  command->footer("Example:\n"
                  "  flatshard data prepare --input 'texts/**/*.txt' --output "
                  "corpora/texts\n"
                  "Then set in the training config:\n"
                  "  [data]\n"
                  "  train = \"corpora/texts\"");
  command->callback([options] {
    options->progress = true;
    const data::CorpusMeta meta = data::prepare_corpus(*options);
    fmt::print("wrote {}\n{}", options->output.string(), summary(meta));
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
    fmt::print("{}", summary(meta));
  });
}

}  // namespace

void add_data_command(CLI::App& program) {
  CLI::App* data = program.add_subcommand(
      "data",
      "Prepare and inspect the token files that training reads");
  data->require_subcommand(1);
  add_prepare(*data);
  add_info(*data);
}

}  // namespace flatshard
