#include "flatshard/format/event_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <climits>

namespace flatshard {
namespace {

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  constexpr std::uint32_t kPolynomial = 0x82f63b78;
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < CHAR_BIT; ++bit) {
      crc = (crc & 1) != 0 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    }
    table[byte] = crc;
  }
  return table;
}

/// A CRC of data that itself contains CRCs is weak, hence the mask.
std::uint32_t masked_crc32c(std::string_view bytes) {
  constexpr std::uint32_t kMaskDelta = 0xa282ead8;
  return std::rotr(crc32c(bytes), 15) + kMaskDelta;
}

template <class T>
void put_little_endian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out += static_cast<char>(value >> (CHAR_BIT * i));
  }
}

// The wire format of protocol buffers: a key, (field number << 3) | type, then
// a varint, 8 bytes, a length and bytes, or 4 bytes.
enum class Wire : std::uint64_t {
  varint = 0,
  fixed64 = 1,
  bytes = 2,
  fixed32 = 5
};

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) {
    out += static_cast<char>(value | 0x80);
  }
  out += static_cast<char>(value);
}

void put_key(std::string& out, std::uint64_t field, Wire wire) {
  put_varint(out, field << 3 | static_cast<std::uint64_t>(wire));
}

void put_bytes(std::string& out, std::uint64_t field, std::string_view bytes) {
  put_key(out, field, Wire::bytes);
  put_varint(out, bytes.size());
  out += bytes;
}

/// Returns an Event with its time and step, to which one of the others is
/// added.
std::string begin_event(double wall_time, std::int64_t step) {
  std::string event;
  put_key(event, 1, Wire::fixed64);
  put_little_endian(event, std::bit_cast<std::uint64_t>(wall_time));
  if (step != 0) {
    put_key(event, 2, Wire::varint);
    put_varint(event, static_cast<std::uint64_t>(step));
  }
  return event;
}

constexpr std::uint64_t kFileVersion = 3;
constexpr std::uint64_t kSummary = 5;
constexpr std::uint64_t kSessionLog = 7;

std::string file_name(double wall_time, int attempt) {
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), HOST_NAME_MAX);
  return fmt::format(
      "events.out.tfevents.{:010}.{:04}.{}.{}",
      static_cast<std::int64_t>(wall_time),
      attempt,
      host.data(),
      ::getpid());
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = make_crc_table();
  std::uint32_t crc = ~std::uint32_t{0};
  for (const char byte : bytes) {
    crc = kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}

std::string tf_record(std::string_view data) {
  std::string record;
  put_little_endian(record, static_cast<std::uint64_t>(data.size()));
  put_little_endian(record, masked_crc32c(record));
  record += data;
  put_little_endian(record, masked_crc32c(data));
  return record;
}

EventFile::EventFile(
    const std::filesystem::path& folder,
    double wall_time,
    int attempt)
    : file_(folder / file_name(wall_time, attempt), AppendFile::Mode::append) {
  std::string event = begin_event(wall_time, 0);
  put_bytes(event, kFileVersion, "brain.Event:2");
  file_.append(tf_record(event));
}

void EventFile::write(
    double wall_time,
    std::int64_t step,
    const Scalars& values) {
  std::string summary;
  for (const auto& [tag, scalar] : values) {
    std::string value;
    put_bytes(value, 1, tag);
    put_key(value, 2, Wire::fixed32);
    put_little_endian(
        value,
        std::bit_cast<std::uint32_t>(static_cast<float>(scalar)));
    put_bytes(summary, 1, value);
  }
  std::string event = begin_event(wall_time, step);
  put_bytes(event, kSummary, summary);
  file_.append(tf_record(event));
}

void EventFile::restart(double wall_time, std::int64_t first_step) {
  constexpr std::uint64_t kStart = 1;  // SessionLog.SessionStatus
  std::string log;
  put_key(log, 1, Wire::varint);
  put_varint(log, kStart);
  std::string event = begin_event(wall_time, first_step);
  put_bytes(event, kSessionLog, log);
  file_.append(tf_record(event));
}

}  // namespace flatshard
