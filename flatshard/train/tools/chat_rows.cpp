#include "flatshard/train/tools/chat_rows.h"

#include "flatshard/core/error.h"

#include <nlohmann/json.hpp>

#include <fstream>
#include <sstream>

namespace flatshard {
namespace {

using Json = nlohmann::ordered_json;

Json message(const char* role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}

Json parse_kwargs(const std::string& text) {
  const Json kwargs = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  FLATSHARD_CHECK(
      kwargs.is_object(),
      config,
      "--chat-template-kwargs: expected a JSON object such as "
      "{{\"enable_thinking\": false}}, got '{}'",
      text);
  return kwargs;
}

/// Replaces JSON text of a value by the value.
void parse_text(Json& value) {
  if (value.is_string()) {
    Json parsed = Json::parse(value.get<std::string>(), nullptr, false);
    if (!parsed.is_discarded()) {
      value = std::move(parsed);
    }
  }
}

std::string to_row(Json row, const ChatAdditions& additions) {
  parse_text(row["messages"]);
  if (!additions.template_kwargs.empty()) {
    Json kwargs = parse_kwargs(additions.template_kwargs);
    Json& own = row["chat_template_kwargs"];
    parse_text(own);
    if (own.is_object()) {
      kwargs.update(own);
    }
    if (own.is_object() || own.is_null()) {
      own = kwargs;
    }
  }
  if (!additions.system.empty() && row["messages"].is_array()) {
    Json& messages = row["messages"];
    const bool has_system = !messages.empty() && messages[0].is_object() &&
                            messages[0].value("role", Json()) == Json("system");
    if (!has_system) {
      messages.insert(messages.begin(), message("system", additions.system));
    }
  }
  return row.dump();
}

}  // namespace

std::string chat_row(const ChatAdditions& additions, const std::string& user) {
  return to_row(
      {{"messages", Json::array({message("user", user)})}},
      additions);
}

std::vector<std::string> read_chat_rows(
    const std::filesystem::path& path,
    const ChatAdditions& additions) {
  std::ifstream file(path);
  std::stringstream content;
  content << file.rdbuf();
  FLATSHARD_CHECK(file.good(), io, "--messages: cannot read {}", path.string());
  const std::string text = content.str();
  const Json whole = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (whole.is_array()) {
    return {to_row({{"messages", whole}}, additions)};
  }
  std::vector<std::string> rows;
  std::istringstream lines(whole.is_object() ? whole.dump() : text);
  for (std::string line; std::getline(lines, line);) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) {
      continue;
    }
    const Json row = Json::parse(line, nullptr, false);
    FLATSHARD_CHECK(
        row.is_object() && row.contains("messages"),
        format,
        "--messages: expected a list of messages, or an object with 'messages' "
        "in each line, got '{}' in {}",
        line.substr(0, 80),
        path.string());
    rows.push_back(to_row(row, additions));
  }
  FLATSHARD_CHECK(
      !rows.empty(),
      format,
      "--messages: {} has no conversation",
      path.string());
  return rows;
}

}  // namespace flatshard
