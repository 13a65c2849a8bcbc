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
      "          {:.4f} nats per token\nperplexity     {:.4f}\n",
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
      "Evaluate the loss of a run, a checkpoint or a Hugging Face model on the "
      "validation split of a dataset");
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
          "output_dir of a run (its final weights, or the latest checkpoint if "
          "it was interrupted), a checkpoint (.../step-100) or a Hugging Face "
          "model directory")
      ->required();
  command->add_option("--step", options.step, "Step of the checkpoint to load")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--data", options.data, "Dataset directory")->required();
  command
      ->add_option(
          "--sequences",
          options.sequences,
          "Number of sequences to evaluate, from the start of the split (-1 "
          "for all) [-1]")
      ->check(CLI::PositiveNumber | CLI::IsMember({-1}));
  command
      ->add_option(
          "--seq-len",
          options.seq_len,
          "Number of tokens per sequence [training.seq_len of the run, or the "
          "maximum of a Hugging Face model, but at most 4096]")
      ->check(CLI::PositiveNumber);
  command
      ->add_option(
          "--batch-size",
          options.batch_size,
          "Number of sequences per forward [1]")
      ->check(CLI::PositiveNumber);
  command
      ->add_option(
          "--packing",
          arguments->packing,
          "Packing of sequences: stream or documents [data.packing of the "
          "run, or stream for a Hugging Face model]")
      ->check(CLI::IsMember({"stream", "documents"}));
  command->add_option(
      "--per-document",
      arguments->per_document,
      "Write one line of JSON per document to this file: index, tokens, loss, "
      "bytes. Also reports bits per byte for any tokenizer");
  command->add_option(
      "--python",
      options.python,
      "Python interpreter with the tokenizers package, for --per-document with "
      "a tokenizer.json [$FLATSHARD_PYTHON, or .venv/bin/python in the current "
      "directory or next to the program, or python3]");
  command
      ->add_option(
          "--dtype",
          options.dtype,
          "Data type of weights and activations. auto: precision.compute of "
          "the run, or float32 for a Hugging Face model [auto]")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16"}));
  command->add_option(
      "--device",
      options.device,
      "Device: auto, cpu or cuda [auto]");
  command->add_flag(
      "--json",
      arguments->json,
      "Print the result as one line of JSON");
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
