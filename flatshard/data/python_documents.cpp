#include "flatshard/data/python_documents.h"

#include <algorithm>

#include "flatshard/core/error.h"

namespace flatshard::data {

PythonDocuments::PythonDocuments(
    const PythonTokenizerOptions& options,
    const std::vector<InputFile>& files,
    TextOptions texts)
    : is_chat_(texts.whole_rows),
      trains_all_(options.train_on == "all"),
      child_(options, is_chat_ ? "chat" : "tokens", std::nullopt),
      documents_(files, std::move(texts)),
      feeder_([this] { feed(); }) {
}

PythonDocuments::~PythonDocuments() {
  stop_ = true;
  // The feeder thread may wait to send to the child. The end of the child ends
  // this wait.
  child_.kill();
  if (feeder_.joinable()) {
    feeder_.join();
  }
}

bool PythonDocuments::send(std::string_view text) {
  const auto nbytes = static_cast<std::int64_t>(text.size());
  return !stop_ &&
         child_.send(
             {reinterpret_cast<const char*>(&nbytes), sizeof(nbytes)}) &&
         child_.send(text);
}

void PythonDocuments::feed() {
  try {
    std::string text;
    while (documents_.next_file()) {
      while (documents_.next_text(text)) {
        if ((is_chat_ && !send(documents_.where())) || !send(text)) {
          return;
        }
      }
    }
  } catch (...) {
    failure_ = std::current_exception();
    // A child without the end of its input would return what it has.
    child_.kill();
    return;
  }
  child_.end_input();
}

void PythonDocuments::rethrow_of_feeder() {
  if (feeder_.joinable()) {
    stop_ = true;
    child_.kill();
    feeder_.join();
  }
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

std::int64_t PythonDocuments::next_document() {
  try {
    return is_chat_ ? next_chat() : child_.read_count();
  } catch (const Error&) {
    rethrow_of_feeder();
    throw;
  }
}

std::int64_t PythonDocuments::next_chat() {
  const auto count = static_cast<std::size_t>(child_.read_count());
  ids_.resize(count);
  mask_.resize(count);
  child_.read(ids_.data(), count * sizeof(std::uint32_t));
  child_.read(mask_.data(), count);
  at_ = 0;
  // Templates often end with the token that ends a document anyway.
  trains_end_ = trains_all_;
  if (!ids_.empty() &&
      static_cast<std::int64_t>(ids_.back()) == end_of_document()) {
    trains_end_ = mask_.back() != 0;
    ids_.pop_back();
    mask_.pop_back();
  }
  return static_cast<std::int64_t>(ids_.size());
}

void PythonDocuments::read_mask(std::span<std::uint8_t> out) {
  std::copy_n(
      mask_.begin() + static_cast<std::ptrdiff_t>(at_ - out.size()),
      out.size(),
      out.begin());
}

void PythonDocuments::read(std::span<std::uint32_t> out) {
  if (is_chat_) {
    std::copy_n(
        ids_.begin() + static_cast<std::ptrdiff_t>(at_),
        out.size(),
        out.begin());
    at_ += out.size();
    return;
  }
  try {
    child_.read(out.data(), out.size_bytes());
  } catch (const Error&) {
    rethrow_of_feeder();
    throw;
  }
}

}  // namespace flatshard::data
