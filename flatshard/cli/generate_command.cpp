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
      "{}: expected a text in each line of {}, got none",
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
      "--messages, --system and --chat-template-kwargs belong to chats; add "
      "--chat");
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
      "--chat: expected a user's message; give --prompt, --prompts or "
      "--messages");
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
          "output_dir of a run (its last weights, or of an interrupted one the "
          "latest checkpoint), a checkpoint (.../step-100) or a Hugging Face "
          "folder")
      ->required();
  command.add_option("--step", options.step, "Checkpoint of that step")
      ->check(CLI::NonNegativeNumber);
  CLI::Option* prompt = command.add_option(
      "--prompt",
      options.prompt,
      "Text to continue; with --chat, a message of the user");
  CLI::Option* prompts =
      command
          .add_option(
              "--prompts",
              arguments.prompts,
              "A file with such a text in each line, in place of --prompt")
          ->excludes(prompt);
  command.add_flag(
      "--chat",
      options.chat,
      "Put messages through the tokenizer's own chat template, and print the "
      "assistant's answer; needs the Python package transformers");
  command
      .add_option(
          "--messages",
          arguments.messages,
          "With --chat: a JSON file with a list of messages, or JSON lines "
          "with \"messages\", one conversation each")
      ->excludes(prompt)
      ->excludes(prompts);
  command.add_option(
      "--system",
      arguments.additions.system,
      "With --chat: a system message in front of the others");
  command.add_option(
      "--chat-template-kwargs",
      arguments.additions.template_kwargs,
      "With --chat: variables of the chat template as a JSON object, for "
      "example '{\"enable_thinking\": false}'. Variables in the field "
      "chat_template_kwargs of a conversation take precedence [none]");
  command.add_flag(
      "--parse-special",
      options.parse_special,
      "Take control tokens that the prompt spells out (<|im_start|>) as these "
      "tokens and not as text");
  command.add_option(
      "--corpus",
      options.corpus,
      "Corpus folder whose tokenizer is used [the run's data.train, or the "
      "Hugging Face folder's own]");
  command.add_option(
      "--python",
      options.python,
      "Python with the tokenizers package, for a tokenizer.json "
      "[$FLATSHARD_PYTHON, else .venv/bin/python here or next to the program, "
      "else python3]");
}

void add_sampling(CLI::App& command, GenerateOptions& options) {
  command.add_option(
      "--max-new-tokens",
      options.max_new_tokens,
      "Tokens to add at most [200]");
  command.add_option(
      "--temperature",
      options.temperature,
      "0 takes the likeliest token, 1 the model's own distribution [0.8]");
  command.add_option(
      "--top-k",
      options.top_k,
      "Draw among the k likeliest; 0: all [0]");
  command.add_option(
      "--top-p",
      options.top_p,
      "Draw among the likeliest tokens whose probabilities add up to this; 1: "
      "all [1]");
  command.add_option(
      "--seed",
      options.seed,
      "Of the draws of each prompt, which do not depend on the others [0]");
}

}  // namespace

void add_generate_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "generate",
      "Continue texts or answer chats with the weights of a run, a checkpoint "
      "or a Hugging Face folder");
  const auto arguments = std::make_shared<GenerateArguments>();
  GenerateOptions& options = arguments->options;
  add_inputs(*command, *arguments);
  add_sampling(*command, options);
  command->add_option(
      "--batch-size",
      options.batch_size,
      "Prompts that run at a time; each keeps the keys and values of its "
      "tokens [8]");
  command
      ->add_option(
          "--dtype",
          options.dtype,
          "Of weights, keys and values; auto is the run's precision.compute, "
          "and float32 for a Hugging Face folder [auto]")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16"}));
  command->add_option("--device", options.device, "auto, cpu or cuda [auto]");
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
