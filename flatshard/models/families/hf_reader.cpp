#include "flatshard/models/families/hf_reader.h"

#include "flatshard/core/placeholder.h"

#include <fstream>
#include <iterator>

namespace flatshard::models {

nlohmann::json read_json_object(const std::filesystem::path& path) {
  std::ifstream in(path);
  FLATSHARD_CHECK(
      in.good(),
      io,
      "expected a readable file, got '{}'",
      path.string());
  const std::string text{
      std::istreambuf_iterator<char>(in),
      std::istreambuf_iterator<char>()};
  refuse_placeholder(path, text);
  try {
    nlohmann::json json = nlohmann::json::parse(text);
    FLATSHARD_CHECK(
        json.is_object(),
        format,
        "{}: expected a JSON object, got {}",
        path.string(),
        json.type_name());
    return json;
  } catch (const nlohmann::json::parse_error& e) {
    FLATSHARD_THROW(format, "{}: expected JSON: {}", path.string(), e.what());
  }
}

}  // namespace flatshard::models
