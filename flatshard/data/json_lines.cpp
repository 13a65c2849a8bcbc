#include "flatshard/data/json_lines.h"

#include <fmt/ranges.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "flatshard/core/error.h"

namespace flatshard::data {

JsonLines::JsonLines(std::filesystem::path path, std::string text_field)
    : path_(std::move(path)),
      text_field_(std::move(text_field)),
      file_(path_, std::ios::binary) {
  FLATSHARD_CHECK(
      file_.is_open(),
      io,
      "cannot read {}: {}",
      path_.string(),
      std::strerror(errno));
}

bool JsonLines::next(std::string& text) {
  for (std::string line; std::getline(file_, line);) {
    ++line_;
    if (line.find_first_not_of(" \t\r") == std::string::npos) {
      continue;
    }
    const auto object = nlohmann::json::parse(line, nullptr, false);
    FLATSHARD_CHECK(
        object.is_object(),
        format,
        "{}:{}: expected a JSON object in UTF-8",
        path_.string(),
        line_);
    const auto found = object.find(text_field_);
    if (found == object.end()) {
      std::vector<std::string> names;
      for (const auto& [name, value] : object.items()) {
        names.push_back(name);
      }
      FLATSHARD_THROW(
          format,
          "{}:{}: expected the text field '{}', found {}; name another with "
          "--text-field",
          path_.string(),
          line_,
          text_field_,
          names.empty() ? "no field" : fmt::to_string(fmt::join(names, ", ")));
    }
    FLATSHARD_CHECK(
        found->is_string() || found->is_null(),
        format,
        "{}:{}: expected text in the field '{}', got {}",
        path_.string(),
        line_,
        text_field_,
        found->type_name());
    text = found->is_string() ? found->get<std::string>() : std::string();
    if (!text.empty()) {
      return true;
    }
  }
  FLATSHARD_CHECK(
      !file_.bad(),
      io,
      "cannot read {}: {}",
      path_.string(),
      std::strerror(errno));
  return false;
}

}  // namespace flatshard::data
