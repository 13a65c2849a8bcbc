#include "flatshard/cli/completion_command.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <memory>
#include <string>

#include "flatshard/train/config/run_config.h"

namespace flatshard {
namespace {

/// One case of the script for each command: the words that may follow it.
void add_cases(
    const CLI::App& command,
    const std::string& path,
    std::string& cases,
    std::string& paths) {
  std::string words;
  for (const CLI::App* sub :
       command.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string name = path + " " + sub->get_name();
    words += sub->get_name() + " ";
    paths += (paths.empty() ? "\"" : "|\"") + name + "\"";
    add_cases(*sub, name, cases, paths);
  }
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      words += "--" + name + " ";
    }
  }
  const bool takes_files =
      command.get_subcommands([](const CLI::App*) { return true; }).empty();
  cases += fmt::format(
      "    \"{}\") words=\"{}\" files={} ;;\n",
      path,
      words,
      takes_files ? 1 : 0);
}

std::string bash_script(const CLI::App& program) {
  std::string cases;
  std::string paths;
  add_cases(program, "flatshard", cases, paths);
  std::string keys;
  for (const ConfigKey& key : config_keys()) {
    keys += fmt::format("{}= ", key.full_name);
  }
  return fmt::format(
      R"sh(_flatshard() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  local path="flatshard" words="" files=0 i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$path ${{COMP_WORDS[i]}}" in
      {}) path="$path ${{COMP_WORDS[i]}}" ;;
    esac
  done
  case "$path" in
{}  esac
  if [[ "$before" == --set ]]; then
    words="{}"
    compopt -o nospace
  elif [[ $files == 1 && "$cur" != -* && -n "$cur" ]]; then
    words="$words $(compgen -f -- "$cur")"
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _flatshard flatshard
)sh",
      paths,
      cases,
      keys);
}

}  // namespace

void add_completion_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "completion",
      "Print a shell completion script for commands, options and config keys");
  const auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "Shell: bash or zsh")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh"}));
  command->footer(
      "Examples:\n"
      "  source <(flatshard completion bash)    # in ~/.bashrc\n"
      "  source <(flatshard completion zsh)     # in ~/.zshrc, after compinit");
  command->callback([&program, shell] {
    fmt::print(
        "{}{}",
        *shell == "zsh" ? "autoload -U +X bashcompinit && bashcompinit\n" : "",
        bash_script(program));
  });
}

}  // namespace flatshard
