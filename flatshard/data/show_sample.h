#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "flatshard/data/packing/packing.h"

namespace flatshard::data {

struct ShowOptions {
  std::string split = "train";
  std::int64_t sample = 0;  ///< index in the order of the dataset
  /// max_documents 0: the default.
  PackingOptions packing{.packing = Packing::documents, .seq_len = 2048};
  std::string python;   ///< see find_python
  bool colors = false;  ///< terminal colors instead of brackets
};

/// Returns a sample as text: a line for each document, then the document with
/// its trained tokens highlighted.
/// @throws Error{config} if the dataset has no such sample; what `Corpus::open`
/// and TextCodec::open throw.
std::string show_sample(
    const std::filesystem::path& corpus,
    const ShowOptions& options);

}  // namespace flatshard::data
