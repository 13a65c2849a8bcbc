#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flatshard/core/append_file.h"

namespace flatshard {

/// Returns the CRC-32C of `bytes` (Castagnoli, reflected polynomial
/// 0x82f63b78). Source: RFC 3720, appendix B.4.
std::uint32_t crc32c(std::string_view bytes);

/// Returns `data` as one TFRecord: its length as 8 bytes, the masked CRC-32C of
/// these, the data, and the masked CRC-32C of the data. Little-endian.
/// Source: tensorflow/core/lib/io/record_writer.h.
std::string tf_record(std::string_view data);

/// A TensorBoard event file: TFRecords with Event messages in the wire format
/// of protocol buffers. Each event is passed to the operating system before the
/// call returns, completely or not at all.
/// Source: tensorflow/core/util/event.proto, framework/summary.proto.
class EventFile {
 public:
  using Scalars = std::vector<std::pair<std::string, double>>;

  /// Creates a new file in an existing `folder`. Its name sorts after the names
  /// of earlier attempts, since TensorBoard reads the files in that order.
  /// @param wall_time  seconds since 1970 (UTC).
  /// @param attempt  counts the starts of the run from 1.
  /// @throws Error{io}.
  EventFile(const std::filesystem::path& folder, double wall_time, int attempt);

  /// Writes one event with values by their tags, as float32.
  void write(double wall_time, std::int64_t step, const Scalars& values);
  /// Has readers drop earlier events of `first_step` and later steps.
  void restart(double wall_time, std::int64_t first_step);

  const std::filesystem::path& path() const { return file_.path(); }

 private:
  AppendFile file_;
};

}  // namespace flatshard
