#include "flatshard/data/python_documents.h"

#include "flatshard/core/error.h"

namespace flatshard::data {

PythonDocuments::PythonDocuments(
    const PythonTokenizerOptions& options,
    const std::vector<InputFile>& files,
    TextOptions texts)
    : child_(options, "tokens", std::nullopt),
      documents_(files, std::move(texts)),
      feeder_([this] { feed(); }) {
}

PythonDocuments::~PythonDocuments() {
  stop_ = true;
  // A child that ends lets the thread go that waits to send.
  child_.kill();
  if (feeder_.joinable()) {
    feeder_.join();
  }
}

void PythonDocuments::feed() {
  try {
    std::string text;
    while (documents_.next_file()) {
      while (documents_.next_text(text)) {
        const auto nbytes = static_cast<std::int64_t>(text.size());
        const bool sent =
            !stop_ &&
            child_.send(
                {reinterpret_cast<const char*>(&nbytes), sizeof(nbytes)}) &&
            child_.send(text);
        if (!sent) {
          return;
        }
      }
    }
  } catch (...) {
    failure_ = std::current_exception();
    // Without the end of its input the child would give what it has.
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
    return child_.read_count();
  } catch (const Error&) {
    rethrow_of_feeder();
    throw;
  }
}

void PythonDocuments::read(std::span<std::uint32_t> out) {
  try {
    child_.read(out.data(), out.size_bytes());
  } catch (const Error&) {
    rethrow_of_feeder();
    throw;
  }
}

}  // namespace flatshard::data
