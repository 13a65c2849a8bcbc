#pragma once

#include <cstdint>
#include <string>

#include "flatshard/data/input_files.h"
#include "flatshard/data/text_documents.h"

namespace flatshard::data {

/// The inputs of a corpus. They and their errors are found before anything is
/// tokenized.
struct Survey {
  FoundFiles found;  ///< files that hold documents, with their numbers
  std::int64_t num_empty = 0;     ///< documents that were left out
  std::int64_t nbytes = 0;        ///< of all texts, in UTF-8
  std::int64_t num_replaced = 0;  ///< bytes that became U+FFFD
  std::string hash;               ///< of the texts and the files' names

  std::int64_t num_documents() const;
  /// "3 files of rows (2 JSON, 1 Parquet; 1 gzip), 1 of plain text, 2 links
  /// followed, 0 skipped".
  std::string describe_files() const;
  /// "README.md (beside the data), a.png (binary) and 4 more"; "" for none.
  std::string describe_skipped() const;
};

/// Finds the files of `inputs` and reads them once.
/// @throws what find_input_files, kind_of_file and TextDocuments throw;
/// Error{io} when there is no document.
Survey survey_inputs(
    const std::vector<std::string>& inputs,
    InputFormat format,
    const TextOptions& options);

}  // namespace flatshard::data
