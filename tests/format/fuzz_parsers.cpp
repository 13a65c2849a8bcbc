// libFuzzer's entry: what comes from disk is read or refused by an Error, and
// neither crashes nor runs out of bounds. scripts/fuzz builds and runs it.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "flatshard/core/error.h"
#include "flatshard/format/manifest.h"
#include "flatshard/format/read_plan.h"
#include "flatshard/format/safetensors.h"

namespace {

void parse(std::span<const std::byte> bytes, bool manifest) {
  using namespace flatshard;
  if (!manifest) {
    parse_safetensors(bytes, bytes.size(), "x.safetensors");
    return;
  }
  const Manifest parsed = parse_manifest(
      {reinterpret_cast<const char*>(bytes.data()), bytes.size()},
      "manifest.json");
  // An accepted manifest can be written, read again and planned with.
  if (!(parse_manifest(to_json(parsed), "again") == parsed)) {
    __builtin_trap();
  }
  for (const auto& [role, tensors] : parsed.tensors) {
    for (const auto& [name, tensor] : tensors) {
      // A corner of the tensor: plans of huge ones use too much memory.
      WantedBox wanted{&tensor, Rectangle::whole(tensor.shape), 0};
      for (std::int64_t& length : wanted.box.length) {
        length = std::min<std::int64_t>(length, 64);
      }
      if (wanted.box.length.size() > 3) {
        continue;
      }
      for (const ReadChunk& chunk : plan_reads(parsed, std::span(&wanted, 1))) {
        if (chunk.end > parsed.files.at(chunk.file).nbytes) {
          __builtin_trap();
        }
      }
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n) {
  if (n == 0) {
    return 0;
  }
  try {
    parse(std::as_bytes(std::span(data + 1, n - 1)), data[0] % 2 == 0);
  } catch (const flatshard::Error&) {}
  return 0;
}
