#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "flatshard/data/document_stream.h"
#include "flatshard/data/text_documents.h"

namespace flatshard::data {

/// Texts tokenized by the Hugging Face tokenizers package, or chats by a chat
/// template (TextOptions::whole_rows). A thread reads them and gives them to a
/// child process.
class PythonDocuments : public DocumentStream {
 public:
  /// @param files  must outlive this.
  PythonDocuments(
      const PythonTokenizerOptions& options,
      const std::vector<InputFile>& files,
      TextOptions texts);
  PythonDocuments(const PythonDocuments&) = delete;
  PythonDocuments& operator=(const PythonDocuments&) = delete;
  ~PythonDocuments() override;

  std::int64_t vocab_size() const override { return child_.vocab_size(); }
  std::int64_t end_of_document() const override {
    return child_.end_of_document();
  }
  std::optional<std::int64_t> begin_of_document() const override {
    return child_.begin_of_document();
  }
  std::int64_t next_document() override;
  void read(std::span<std::uint32_t> out) override;
  bool has_mask() const override { return is_chat_; }
  void read_mask(std::span<std::uint8_t> out) override;
  bool trains_end() const override { return trains_end_; }

 private:
  void feed();
  bool send(std::string_view text);
  std::int64_t next_chat();
  void rethrow_of_feeder();

  const bool is_chat_;
  const bool trains_all_;
  PythonChild child_;
  TextDocuments documents_;
  std::atomic<bool> stop_ = false;
  std::exception_ptr failure_;  ///< of the thread, read when it has ended
  std::thread feeder_;
  // The tokens of a chat.
  std::vector<std::uint32_t> ids_;
  std::vector<std::uint8_t> mask_;
  std::size_t at_ = 0;  ///< tokens that were read
  bool trains_end_ = true;
};

}  // namespace flatshard::data
