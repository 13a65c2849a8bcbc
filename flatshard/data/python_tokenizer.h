#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/data/document_stream.h"
#include "flatshard/data/input_files.h"

namespace flatshard::data {

/// The interpreter for the tokenizers and pyarrow packages: `wanted`, else
/// $FLATSHARD_PYTHON, else .venv/bin/python of the working folder, of the
/// program's folder or of the one above, else python3.
std::string find_python(const std::string& wanted);

/// How to reach a tokenizer.json, and texts in Parquet files.
struct PythonTokenizerOptions {
  std::string python;               ///< see find_python
  std::filesystem::path tokenizer;  ///< empty: none, texts come as bytes
  std::string end_of_document;      ///< token text; "" = the usual names
  std::string begin_of_document;    ///< token text; "" = none
  std::string text_field = "text";  ///< of .jsonl and .parquet files
};

/// The files' paths as the child's modes `files`, `count` and `texts` read
/// them.
/// @param only  files of this kind; unset: all.
std::string file_list(
    const std::vector<InputFile>& files,
    std::optional<InputKind> only = {});

/// A child process that runs python/flatshard/prepare_tokens.py with standard
/// input and output connected to this one.
class PythonChild {
 public:
  /// @param mode  see prepare_tokens.py.
  /// @throws Error{config} when Python cannot be started, lacks a package, or
  /// cannot load the tokenizer.
  PythonChild(
      const PythonTokenizerOptions& options,
      const std::string& mode,
      std::string_view input);
  PythonChild(const PythonChild&) = delete;
  PythonChild& operator=(const PythonChild&) = delete;
  /// Ends the child when it still runs.
  ~PythonChild();

  std::int64_t vocab_size() const { return vocab_size_; }
  std::int64_t end_of_document() const { return end_of_document_; }
  std::optional<std::int64_t> begin_of_document() const {
    return begin_of_document_;
  }
  struct Token {
    std::int64_t id = 0;
    std::string text;
  };
  /// What the tokenizer itself puts before a text.
  const std::optional<Token>& own_begin() const { return own_begin_; }

  /// @throws Error{io} when the child ends before that.
  void read(void* out, std::size_t nbytes);
  std::int64_t read_count();
  std::string read_text();

 private:
  void read_header();

  std::string python_;
  int pid_ = -1;
  std::FILE* stream_ = nullptr;
  std::int64_t vocab_size_ = 0;
  std::int64_t end_of_document_ = 0;
  std::optional<std::int64_t> begin_of_document_;
  std::optional<Token> own_begin_;
};

/// Files tokenized by the Hugging Face tokenizers package. Each file is held
/// in the child's memory as a whole.
class PythonDocuments : public DocumentStream {
 public:
  PythonDocuments(
      const PythonTokenizerOptions& options,
      const std::vector<InputFile>& files);

  std::int64_t vocab_size() const override { return child_.vocab_size(); }
  std::int64_t end_of_document() const override {
    return child_.end_of_document();
  }
  std::optional<std::int64_t> begin_of_document() const override {
    return child_.begin_of_document();
  }
  std::int64_t next_document() override;
  void read(std::span<std::uint32_t> out) override;

 private:
  PythonChild child_;
};

}  // namespace flatshard::data
