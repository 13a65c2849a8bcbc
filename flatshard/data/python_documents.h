#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "flatshard/data/document_stream.h"
#include "flatshard/data/text_documents.h"

namespace flatshard::data {

/// Texts tokenized by the Hugging Face tokenizers package. A thread reads them
/// and gives them to a child process.
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

 private:
  void feed();
  void rethrow_of_feeder();

  PythonChild child_;
  TextDocuments documents_;
  std::atomic<bool> stop_ = false;
  std::exception_ptr failure_;  ///< of the thread, read when it has ended
  std::thread feeder_;
};

}  // namespace flatshard::data
