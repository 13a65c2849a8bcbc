#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::data {

/// Reads one field of JSON objects. The other fields are only passed over, so
/// they may hold what no parser takes: NaN, 1e400, half of a surrogate pair.
class JsonScanner {
 public:
  /// Why a text is no such object, and where.
  struct Problem {
    std::string what;
    std::size_t at = 0;
    bool incomplete = false;  ///< the text ended within a value
  };
  /// The field's value in an object.
  struct Field {
    enum class Kind { missing, null, text, other } kind = Kind::missing;
    std::string other;               ///< what it is instead: "a number"
    std::vector<std::string> names;  ///< of all fields, in their order
    std::vector<std::string> lists;  ///< of the fields that hold a list
  };

  explicit JsonScanner(std::string_view json, std::size_t at = 0)
      : json_(json), at_(at) {}

  std::size_t at() const { return at_; }
  /// Returns the next character that is no white space; 0 at the end.
  char peek();
  /// Passes over `c` when it is next.
  bool take(char c);
  /// Passes over a value of any kind.
  void skip_value();

  /// Reads the object that is next. In `text`, half of a surrogate pair is
  /// U+FFFD. @throws Problem.
  Field object(std::string_view field, std::string& text);
  /// "an object", "a list", "text", "null", "true or false" or "a number".
  std::string describe_next();

 private:
  [[noreturn]] void fail(std::string what, bool incomplete = false) const;
  char next();
  void string(std::string* out);
  void escape(std::string& out);
  unsigned hex4();

  std::string_view json_;
  std::size_t at_;
};

}  // namespace flatshard::data
