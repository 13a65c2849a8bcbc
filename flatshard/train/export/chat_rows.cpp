#include "flatshard/train/export/chat_rows.h"

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

std::string to_row(Json row, const std::string& system) {
  // Rows of prompt and completion have no place for it.
  if (!system.empty() && row.contains("messages") &&
      row["messages"].is_array()) {
    Json& messages = row["messages"];
    const bool has_system = !messages.empty() && messages[0].is_object() &&
                            messages[0].value("role", Json()) == Json("system");
    if (!has_system) {
      messages.insert(messages.begin(), message("system", system));
    }
  }
  return row.dump();
}

}  // namespace

std::string chat_row(const std::string& system, const std::string& user) {
  return to_row({{"messages", Json::array({message("user", user)})}}, system);
}

std::vector<std::string> read_chat_rows(
    const std::filesystem::path& path,
    const std::string& system) {
  std::ifstream file(path);
  std::stringstream content;
  content << file.rdbuf();
  FLATSHARD_CHECK(file.good(), io, "--messages: cannot read {}", path.string());
  const std::string text = content.str();
  const Json whole = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (whole.is_array()) {
    return {to_row({{"messages", whole}}, system)};
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
    rows.push_back(to_row(row, system));
  }
  FLATSHARD_CHECK(
      !rows.empty(),
      format,
      "--messages: expected a conversation in {}, got none",
      path.string());
  return rows;
}

}  // namespace flatshard
