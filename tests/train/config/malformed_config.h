#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace flatshard::testing {

/// Configs that are wrong in one to three ways, the same ones for one seed.
/// Some changes do no harm: a reader has to decide which of them it rejects.
class MalformedConfigs {
 public:
  MalformedConfigs(std::string good, std::uint64_t seed)
      : good_(std::move(good)), random_(seed) {}

  std::string next() {
    std::string text = good_;
    for (std::uint64_t n = 1 + pick(3); n > 0; --n) {
      change(text);
    }
    return text;
  }

 private:
  std::uint64_t pick(std::uint64_t n) { return random_() % n; }

  std::size_t place(const std::string& text) {
    return static_cast<std::size_t>(pick(text.size() + 1));
  }

  // Returns the start of a random line.
  std::size_t line(const std::string& text) {
    const auto at = text.rfind('\n', place(text));
    return at == std::string::npos ? 0 : at + 1;
  }

  std::string literal() {
    static const std::vector<std::string> kLiterals{
        "",
        "0",
        "-1",
        "-0.0",
        "1e400",
        "nan",
        "-inf",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775808",
        "99999999999999999999999999",
        "4611686018427387904",
        "1099511627776",
        "0x7fffffff",
        "0b2",
        "1_000",
        "1__0",
        "tru",
        "true",
        "[]",
        "[1, 2",
        "{}",
        "{a = 1}",
        "[[1]]",
        "\"\"",
        "\"\\u0000\"",
        "\"a\\u0000b\"",
        "\"\\ud800\"",
        "\"\\q\"",
        "'''",
        "\"unclosed",
        "1979-05-27",
        "07:32:00",
        "1979-05-27T07:32:00Z",
        "\xff\xfe",
        "\xf0\x9f\x92\xa5",
        "\x01",
        "\"zero9\"",
        "\"block:99999999999999999999\"",
        "\"block:-1\"",
        "= =",
        "3.5",
        "1e-320"};
    return kLiterals[pick(kLiterals.size())];
  }

  void change(std::string& text) {
    switch (pick(12)) {
      case 0:  // a byte goes
        if (!text.empty()) {
          text.erase(pick(text.size()), 1);
        }
        break;
      case 1:  // some byte comes
        text.insert(place(text), 1, static_cast<char>(pick(256)));
        break;
      case 2:  // a bit tips over
        if (!text.empty()) {
          text[pick(text.size())] ^= static_cast<char>(1 << pick(8));
        }
        break;
      case 3:  // the end is missing
        text.resize(place(text));
        break;
      case 4: {  // a line comes twice
        const auto at = line(text);
        text.insert(at, text.substr(at, text.find('\n', at) - at) + "\n");
        break;
      }
      case 5: {  // a line goes
        const auto at = line(text);
        const auto end = text.find('\n', at);
        text.erase(at, end == std::string::npos ? end : end - at + 1);
        break;
      }
      case 6:
      case 7:
      case 8: {  // another value
        const auto equals = text.find('=', place(text));
        if (equals != std::string::npos) {
          const auto end = text.find('\n', equals);
          text.replace(
              equals + 1,
              (end == std::string::npos ? text.size() : end) - equals - 1,
              " " + literal());
        }
        break;
      }
      case 9: {  // an unknown key or section
        const std::string name(1 + pick(40), static_cast<char>('a' + pick(26)));
        text.insert(
            line(text),
            pick(2) == 0 ? "[" + name + "]\n"
                         : name + " = " + literal() + "\n");
        break;
      }
      case 10: {  // deep
        const std::size_t depth = std::size_t{1} << pick(14);
        std::string deep;
        const auto kind = pick(3);
        for (std::size_t i = 0; i < depth; ++i) {
          deep += kind == 0 ? "[" : kind == 1 ? "a." : "{a=";
        }
        text.insert(
            line(text),
            kind == 1 ? deep + "a = 1\n" : "deep = " + deep + "\n");
        break;
      }
      default: {  // two pieces change places
        const auto a = place(text);
        const auto b = place(text);
        const std::string tail = text.substr(std::max(a, b));
        text = tail + text.substr(0, std::max(a, b));
        break;
      }
    }
  }

  std::string good_;
  std::mt19937_64 random_;
};

}  // namespace flatshard::testing
