#include "flatshard/cli/generate_command.h"

#include "flatshard/core/error.h"
#include "flatshard/train/tools/chat_rows.h"
#include "flatshard/train/tools/generate_text.h"

#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace flatshard {
namespace {

struct GenerateArguments {
  GenerateOptions options;
  std::string prompts;   // a file
  std::string messages;  // a file
  ChatAdditions additions;
};

/// Returns the lines of a file that are not empty. @throws Error{io} when it
/// cannot be read, Error{config} when there are none.
std::vector<std::string> lines_of(
    const std::string& option,
    const std::string& path) {
  std::ifstream file(path);
  FLATSHARD_CHECK(file, io, "{}: cannot read {}", option, path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty()) {
      lines.push_back(line);
    }
  }
  FLATSHARD_CHECK(
      !lines.empty(),
      config,
      "{}: {} contains no text; write one prompt per line",
      option,
      path);
  return lines;
}

/// Returns the texts to continue, as in GenerateOptions::chat.
std::vector<std::string> prompts_of(const GenerateArguments& arguments) {
  const bool chat = arguments.options.chat;
  const ChatAdditions& additions = arguments.additions;
  FLATSHARD_CHECK(
      chat || (arguments.messages.empty() && additions.system.empty() &&
               additions.template_kwargs.empty()),
      config,
      "--messages, --system and --chat-template-kwargs require --chat");
  if (!arguments.messages.empty()) {
    return read_chat_rows(arguments.messages, additions);
  }
  std::vector<std::string> prompts =
      arguments.prompts.empty()
          ? std::vector<std::string>{arguments.options.prompt}
          : lines_of("--prompts", arguments.prompts);
  FLATSHARD_CHECK(
      !chat || !prompts.front().empty(),
      config,
      "--chat requires a user message: give --prompt, --prompts or --messages");
  for (std::string& prompt : prompts) {
    prompt = chat ? chat_row(additions, prompt) : prompt;
  }
  return prompts;
}

void add_inputs(CLI::App& command, GenerateArguments& arguments) {
  GenerateOptions& options = arguments.options;
  command
      .add_option(
          "--run,--hf",
          options.run,
          "output_dir of a run (its final weights, or the latest checkpoint if "
          "it was interrupted), a checkpoint (.../step-100) or a Hugging Face "
          "model directory")
      ->required();
  command.add_option("--step", options.step, "Step of the checkpoint to load")
      ->check(CLI::NonNegativeNumber);
  CLI::Option* prompt = command.add_option(
      "--prompt",
      options.prompt,
      "Text to continue, or with --chat a user message");
  CLI::Option* prompts =
      command
          .add_option(
              "--prompts",
              arguments.prompts,
              "File with one prompt per line, instead of --prompt")
          ->excludes(prompt);
  command.add_flag(
      "--chat",
      options.chat,
      "Format messages with the tokenizer's chat template and print the answer "
      "of the assistant (requires the Python package transformers)");
  command
      .add_option(
          "--messages",
          arguments.messages,
          "With --chat: JSON file with a list of messages, or JSON lines with "
          "\"messages\", one conversation per line")
      ->excludes(prompt)
      ->excludes(prompts);
  command.add_option(
      "--system",
      arguments.additions.system,
      "With --chat: system message, placed before all others");
  command.add_option(
      "--chat-template-kwargs",
      arguments.additions.template_kwargs,
      "With --chat: variables for the chat template as a JSON object, for "
      "example '{\"enable_thinking\": false}'. The field chat_template_kwargs "
      "of a conversation overrides them [none]");
  command.add_flag(
      "--parse-special",
      options.parse_special,
      "Parse control tokens that are spelled out in the prompt (<|im_start|>) "
      "as tokens instead of text");
  command.add_option(
      "--corpus",
      options.corpus,
      "Dataset directory whose tokenizer to use [data.train of the run, or the "
      "tokenizer of the Hugging Face model]");
  command.add_option(
      "--python",
      options.python,
      "Python interpreter with the tokenizers package, for a tokenizer.json "
      "[$FLATSHARD_PYTHON, or .venv/bin/python in the current directory or "
      "next to the program, or python3]");
}

void add_sampling(CLI::App& command, GenerateOptions& options) {
  command.add_option(
      "--max-new-tokens",
      options.max_new_tokens,
      "Maximum number of tokens to generate [200]");
  command.add_option(
      "--temperature",
      options.temperature,
      "Sampling temperature: 0 always selects the most likely token, 1 samples "
      "from the model's distribution [0.8]");
  command.add_option(
      "--top-k",
      options.top_k,
      "Sample from the k most likely tokens (0 for all) [0]");
  command.add_option(
      "--top-p",
      options.top_p,
      "Sample from the most likely tokens whose probabilities sum to this "
      "value (1 for all) [1]");
  command.add_option(
      "--seed",
      options.seed,
      "Random seed, applied to each prompt independently [0]");
}

}  // namespace

void add_generate_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "generate",
      "Generate text or chat answers with a run, a checkpoint or a Hugging "
      "Face model");
  const auto arguments = std::make_shared<GenerateArguments>();
  GenerateOptions& options = arguments->options;
  add_inputs(*command, *arguments);
  add_sampling(*command, options);
  command->add_option(
      "--batch-size",
      options.batch_size,
      "Number of prompts to generate in parallel; the KV cache grows with it "
      "[8]");
  command
      ->add_option(
          "--dtype",
          options.dtype,
          "Data type of weights and KV cache. auto: precision.compute of the "
          "run, or float32 for a Hugging Face model [auto]")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16"}));
  command->add_option(
      "--device",
      options.device,
      "Device: auto, cpu or cuda [auto]");
  command->footer(
      "Examples:\n  flatshard generate --run outputs/run --prompt \"Once upon "
      "a time\"\n  flatshard generate --run outputs/run --prompts prompts.txt "
      "--top-p 0.9\n  flatshard generate --hf models/chat --chat --system \"Be "
      "brief.\" --prompt \"Why is the sky blue?\"");
  command->callback([arguments] {
    const std::vector<std::string> prompts = prompts_of(*arguments);
    int printed = 0;
    generate_texts(arguments->options, prompts, [&](const std::string& text) {
      // A text may have many lines.
      fmt::print(
          "{}{}\n",
          prompts.size() > 1 ? fmt::format("--- prompt {}\n", ++printed) : "",
          text);
      std::fflush(stdout);
    });
  });
}

}  // namespace flatshard
