#include "flatshard/data/hf_tokenizer.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/data/byte_tokens.h"

namespace flatshard::data {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::array kFiles{
    kTokenizerFile,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json"};

OrderedJson parse_tokenizer(
    const std::string& text,
    const std::string& origin) {
  OrderedJson json = OrderedJson::parse(text, nullptr, false);
  FLATSHARD_CHECK(
      json.is_object() && json.contains("model"),
      format,
      "{}: expected a tokenizer.json of Hugging Face's tokenizers",
      origin);
  return json;
}

std::string utf8(unsigned code) {
  if (code < 0x80) {
    return {static_cast<char>(code)};
  }
  return {
      static_cast<char>(0xC0 | (code >> 6)),
      static_cast<char>(0x80 | (code & 0x3F))};
}

/// Returns the character that byte-level vocabularies write for each byte:
/// itself where it can be printed, else the next one from U+0100 on. Source:
/// GPT-2's encoder.py.
std::vector<std::string> byte_characters() {
  std::vector<std::string> characters;
  unsigned next = 256;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool printed = (byte >= 33 && byte <= 126) ||
                         (byte >= 161 && byte <= 172) || byte >= 174;
    characters.push_back(utf8(printed ? byte : next++));
  }
  return characters;
}

/// A copy whose mode follows the umask, as no copy_file does.
void write_copy(
    const std::filesystem::path& from,
    const std::filesystem::path& to) {
  const MappedFile file(from);
  write_file_atomic(to, file.text());
}

/// Returns how to fetch the tokenizer of a name such as "gpt2" or
/// "Qwen/Qwen3-8B" of the Hugging Face Hub; empty for other texts.
std::string hub_hint(const std::filesystem::path& path) {
  const std::string name = path.string();
  std::error_code error;
  const bool is_name = !name.empty() &&
                       std::isalnum(static_cast<unsigned char>(name[0])) != 0 &&
                       std::ranges::count(name, '/') <= 1 &&
                       path.has_filename() && path.extension() != ".json" &&
                       !std::filesystem::exists(path.parent_path(), error) &&
                       std::ranges::all_of(name, [](unsigned char c) {
                         return std::isalnum(c) != 0 || c == '.' || c == '_' ||
                                c == '-' || c == '/';
                       });
  return is_name ? fmt::format(
                       "; a model of the Hugging Face Hub is fetched with: hf "
                       "download {0} --local-dir models/{1}, and named with "
                       "models/{1}",
                       name,
                       path.filename().string())
                 : "";
}

}  // namespace

std::filesystem::path find_tokenizer(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    FLATSHARD_CHECK(
        std::filesystem::is_regular_file(path, error),
        config,
        "tokenizer: expected \"bytes\", the path of a tokenizer.json or of a "
        "folder that has one, got '{}'{}",
        path.string(),
        hub_hint(path));
    return path;
  }
  FLATSHARD_CHECK(
      std::filesystem::is_regular_file(path / kTokenizerFile, error),
      config,
      "tokenizer: {} has no {}; transformers writes one with "
      "AutoTokenizer.from_pretrained('{}').save_pretrained('{}')",
      path.string(),
      kTokenizerFile,
      path.string(),
      path.string());
  return path / kTokenizerFile;
}

std::vector<std::string> tokenizer_files(const std::filesystem::path& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (const char* name : kFiles) {
    if (std::filesystem::is_regular_file(folder / name, error)) {
      found.emplace_back(name);
    }
  }
  return found;
}

void copy_tokenizer_files(
    const std::filesystem::path& from,
    const std::filesystem::path& to) {
  for (const std::string& name : tokenizer_files(from)) {
    write_copy(from / name, to / name);
  }
}

void copy_tokenizer(
    const std::filesystem::path& tokenizer,
    const std::filesystem::path& to) {
  if (tokenizer.filename() == kTokenizerFile) {
    copy_tokenizer_files(
        tokenizer.has_parent_path() ? tokenizer.parent_path() : ".",
        to);
  } else {
    write_copy(tokenizer, to / kTokenizerFile);
  }
}

std::string byte_tokenizer_json() {
  OrderedJson vocab = OrderedJson::object();
  std::int64_t id = 0;
  for (const std::string& character : byte_characters()) {
    vocab[character] = id++;
  }
  const OrderedJson end{
      {"id", kByteEndOfDocument},
      {"content", kByteEndText},
      {"single_word", false},
      {"lstrip", false},
      {"rstrip", false},
      {"normalized", false},
      {"special", true}};
  const auto byte_level = [](bool use_regex) {
    return OrderedJson{
        {"type", "ByteLevel"},
        {"add_prefix_space", false},
        {"trim_offsets", true},
        {"use_regex", use_regex}};
  };
  const OrderedJson json{
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", OrderedJson::array({end})},
      {"normalizer", nullptr},
      {"pre_tokenizer", byte_level(false)},
      {"post_processor", nullptr},
      {"decoder", byte_level(true)},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"ignore_merges", false},
        {"vocab", vocab},
        {"merges", OrderedJson::array()}}}};
  return json.dump(2) + "\n";
}

bool same_tokens(
    const std::string& a,
    const std::string& b,
    const std::string& origin) {
  if (a == b) {
    return true;
  }
  // Objects compare whatever their order.
  const auto relevant = [&](const std::string& text) {
    const nlohmann::json json = parse_tokenizer(text, origin);
    const nlohmann::json& model = json.at("model");
    nlohmann::json kept;
    for (const char* key : {"type", "vocab", "merges"}) {
      kept[key] = model.is_object() && model.contains(key) ? model.at(key)
                                                           : nlohmann::json();
    }
    kept["added_tokens"] = json.value("added_tokens", nlohmann::json::array());
    return kept;
  };
  return relevant(a) == relevant(b);
}

std::string token_text(
    const std::string& tokenizer_json,
    std::int64_t id,
    const std::string& origin) {
  const OrderedJson json = parse_tokenizer(tokenizer_json, origin);
  for (const OrderedJson& token :
       json.value("added_tokens", OrderedJson::array())) {
    if (token.value("id", std::int64_t{-1}) == id) {
      return token.value("content", "");
    }
  }
  const OrderedJson& model = json.at("model");
  const auto vocab = model.is_object() ? model.find("vocab") : model.end();
  if (vocab == model.end()) {
    return {};
  }
  if (vocab->is_object()) {
    for (const auto& [text, value] : vocab->items()) {
      if (value == id) {
        return text;
      }
    }
  } else if (
      vocab->is_array() && id >= 0 &&
      id < static_cast<std::int64_t>(vocab->size())) {
    // Unigram: [text, score] by id.
    const OrderedJson& entry = (*vocab)[static_cast<std::size_t>(id)];
    if (entry.is_array() && !entry.empty() && entry[0].is_string()) {
      return entry[0].get<std::string>();
    }
  }
  return {};
}

std::string with_first_token(
    const std::string& tokenizer_json,
    std::int64_t id,
    const std::string& origin) {
  const std::string text = token_text(tokenizer_json, id, origin);
  FLATSHARD_CHECK(
      !text.empty(),
      format,
      "{}: expected a token of id {}, found none",
      origin,
      id);
  OrderedJson json = parse_tokenizer(tokenizer_json, origin);
  OrderedJson& post = json["post_processor"];
  const OrderedJson quoted = text;
  if (post.dump().find(quoted.dump()) != std::string::npos) {
    return tokenizer_json;  // already has it
  }
  const auto special = [&](int type) {
    return OrderedJson{{"SpecialToken", {{"id", text}, {"type_id", type}}}};
  };
  const auto sequence = [](const char* name, int type) {
    return OrderedJson{{"Sequence", {{"id", name}, {"type_id", type}}}};
  };
  const OrderedJson first{
      {"type", "TemplateProcessing"},
      {"single", OrderedJson::array({special(0), sequence("A", 0)})},
      {"pair",
       OrderedJson::array(
           {special(0), sequence("A", 0), special(1), sequence("B", 1)})},
      {"special_tokens",
       {{text,
         {{"id", text},
          {"ids", OrderedJson::array({id})},
          {"tokens", OrderedJson::array({text})}}}}}};
  if (post.is_null()) {
    post = first;
  } else {
    post = OrderedJson{
        {"type", "Sequence"},
        {"processors", OrderedJson::array({post, first})}};
  }
  return json.dump(2) + "\n";
}

std::string tokenizer_config_json(
    const std::string& first,
    const std::string& end,
    std::int64_t max_tokens) {
  const OrderedJson json{
      {"tokenizer_class", "PreTrainedTokenizerFast"},
      {"bos_token", first},
      {"eos_token", end},
      {"model_max_length", max_tokens},
      // token_type_ids are left out, since `generate` of a Llama rejects them.
      {"model_input_names", {"input_ids", "attention_mask"}},
      {"clean_up_tokenization_spaces", false}};
  return json.dump(2) + "\n";
}

}  // namespace flatshard::data
