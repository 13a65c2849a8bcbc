#include "flatshard/cli/evaluate_command.h"

#include "flatshard/train/tools/evaluate.h"

#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <memory>
#include <string>

namespace flatshard {
namespace {

std::string to_text(const Evaluated& found) {
  std::string text = fmt::format(
      "weights        {}\nsequences      {} of {} tokens, packing {}, {}\nloss "
      "          {:.4f} nats a token\nperplexity     {:.4f}\n",
      found.model,
      found.sequences,
      found.seq_len,
      config::word_of(found.packing),
      found.dtype,
      found.metrics.loss,
      found.metrics.perplexity());
  if (found.metrics.bits_per_byte) {
    text +=
        fmt::format("bits per byte  {:.4f}\n", *found.metrics.bits_per_byte);
  }
  return text;
}

}  // namespace

void add_evaluate_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "evaluate",
      "Measure the loss of a run's weights, of a checkpoint or of a Hugging "
      "Face folder on the validation split of a corpus");
  struct Arguments {
    EvaluateOptions options;
    std::string packing;
    std::string per_document;  // a file
    bool json = false;
  };
  const auto arguments = std::make_shared<Arguments>();
  EvaluateOptions& options = arguments->options;
  command
      ->add_option(
          "--run,--hf",
          options.model,
          "output_dir of a run (its last weights, or of an interrupted one the "
          "latest checkpoint), a checkpoint (.../step-100) or a Hugging Face "
          "folder")
      ->required();
  command->add_option("--step", options.step, "Checkpoint of that step")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--data", options.data, "Corpus folder")->required();
  command
      ->add_option(
          "--sequences",
          options.sequences,
          "How many sequences from the split's begin; -1: all [-1]")
      ->check(CLI::PositiveNumber | CLI::IsMember({-1}));
  command
      ->add_option(
          "--seq-len",
          options.seq_len,
          "Tokens of a sequence [the model's longest, at most 4096]")
      ->check(CLI::PositiveNumber);
  command
      ->add_option(
          "--batch-size",
          options.batch_size,
          "Sequences of one forward [1]")
      ->check(CLI::PositiveNumber);
  command
      ->add_option(
          "--packing",
          arguments->packing,
          "How documents become sequences, stream or documents [the run's "
          "data.packing; stream for a Hugging Face folder]")
      ->check(CLI::IsMember({"stream", "documents"}));
  command->add_option(
      "--per-document",
      arguments->per_document,
      "Write a line of JSON for each document to this file: index, tokens, "
      "loss, bytes; also counts bits per byte for any tokenizer");
  command->add_option(
      "--python",
      options.python,
      "Python with the tokenizers package, for --per-document with a "
      "tokenizer.json [$FLATSHARD_PYTHON, else .venv/bin/python here or next "
      "to the program, else python3]");
  command
      ->add_option(
          "--dtype",
          options.dtype,
          "Of weights and activations; auto is the run's precision.compute, "
          "and float32 for a Hugging Face folder [auto]")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16"}));
  command->add_option("--device", options.device, "auto, cpu or cuda [auto]");
  command->add_flag("--json", arguments->json, "Print one line of JSON");
  command->footer("Examples:\n  flatshard evaluate --run outputs/run --data "
                  "corpora/texts\n  flatshard evaluate --hf models/base --data "
                  "corpora/texts --per-document losses.jsonl");
  command->callback([arguments] {
    if (!arguments->packing.empty()) {
      arguments->options.packing = arguments->packing == "stream"
                                       ? data::Packing::stream
                                       : data::Packing::documents;
    }
    arguments->options.per_document = !arguments->per_document.empty();
    const Evaluated found = evaluate(arguments->options);
    if (arguments->options.per_document) {
      write_document_losses(arguments->per_document, found.documents);
    }
    fmt::print("{}", arguments->json ? to_json(found) : to_text(found));
  });
}

}  // namespace flatshard
