#pragma once

#include "flatshard/core/error.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>
#include <utility>

namespace flatshard::models {

/// Reads one JSON object of a config.json. Errors name the file and the key.
/// A key whose value is null counts as absent.
class HfReader {
 public:
  /// @param json  is not owned: it outlives the reader.
  HfReader(std::string file, const nlohmann::json& json)
      : file_(std::move(file)), json_(json) {}

  const std::string& file() const { return file_; }

  bool has(const char* key) const {
    return json_.contains(key) && !json_.at(key).is_null();
  }
  bool is_null(const char* key) const {
    return json_.contains(key) && json_.at(key).is_null();
  }
  bool has_list(const char* key) const {
    return has(key) && json_.at(key).is_array();
  }

  template <class T>
  T need(const char* key) const {
    FLATSHARD_CHECK(
        has(key),
        format,
        "{}: expected the key '{}', found none",
        file_,
        key);
    try {
      return json_.at(key).get<T>();
    } catch (const nlohmann::json::exception& e) {
      FLATSHARD_THROW(
          format,
          "{}: key '{}' has the value {}: {}",
          file_,
          key,
          json_.at(key).dump(),
          e.what());
    }
  }

  template <class T>
  T get(const char* key, T otherwise) const {
    return has(key) ? need<T>(key) : otherwise;
  }

  /// The key has this value, or is absent.
  template <class T>
  void expect(const char* key, const T& supported) const {
    const T value = get<T>(key, supported);
    FLATSHARD_CHECK(
        value == supported,
        config,
        "{}: expected {} = {}, got {}; it is not supported",
        file_,
        key,
        nlohmann::json(supported).dump(),
        nlohmann::json(value).dump());
  }

  void refuse(const char* key) const {
    FLATSHARD_CHECK(
        !has(key),
        config,
        "{}: expected {} = null, got {}; it is not supported",
        file_,
        key,
        json_.at(key).dump());
  }

  /// Reads the object of a key. The key must be present.
  HfReader inside(const char* key) const {
    return {file_ + ": " + key, json_.at(key)};
  }

 private:
  std::string file_;
  const nlohmann::json& json_;
};

/// @throws Error{io} if the file cannot be read, Error{format} if it is not a
/// JSON object.
nlohmann::json read_json_object(const std::filesystem::path& path);

}  // namespace flatshard::models
