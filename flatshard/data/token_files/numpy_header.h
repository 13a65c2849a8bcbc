#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/core/file_reader.h"
#include "flatshard/data/token_files/token_words.h"

namespace flatshard::data {

/// The header of a file that numpy.save has written.
struct NumpyHeader {
  const WordType* type = nullptr;
  std::vector<std::int64_t> shape;
  std::int64_t num_elements = 1;
  std::int64_t nbytes = 0;  ///< of the header, after which the elements begin
};

/// Reads it; nothing for files that do not begin with NumPy's magic.
/// @throws Error{format} for types other than little-endian integers, several
/// dimensions in Fortran order, and headers that are cut off.
/// Source: numpy.lib.format, versions 1.0 to 3.0.
std::optional<NumpyHeader> read_numpy_header(const FileReader& file);

}  // namespace flatshard::data
