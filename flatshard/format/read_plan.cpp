#include "flatshard/format/read_plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/file_reader.h"
#include "flatshard/core/share_work.h"
#include "flatshard/format/digest.h"
#include "flatshard/format/safetensors.h"

namespace flatshard {
namespace {

struct FileCopy {
  std::int64_t file = 0;
  ReadChunk::Copy copy;
};

/// Calls f for each run of a box that is contiguous in both of two boxes around
/// it.
/// @param visit  (first element in `a`, first element in `b`, numel)
template <class F>
void for_each_common_run(
    const Rectangle& common,
    const Rectangle& around_a,
    const Rectangle& around_b,
    F&& visit) {
  const auto within = [&](const Rectangle& around) {
    Rectangle moved = common;
    for (std::size_t d = 0; d < moved.start.size(); ++d) {
      moved.start[d] -= around.start[d];
    }
    return FlatRuns(around.length, moved);
  };
  const FlatRuns a = within(around_a);
  const FlatRuns b = within(around_b);
  const std::int64_t step = std::min(a.numel(), b.numel());
  for_each_run(
      a.numel() == step ? a : b,
      0,
      common.numel(),
      [&](std::int64_t, std::int64_t at, std::int64_t n) {
        visit(
            a.begin(at / a.numel()) + at % a.numel(),
            b.begin(at / b.numel()) + at % b.numel(),
            n);
      });
}

std::vector<FileCopy> copies_of(std::span<const WantedBox> wanted) {
  std::vector<FileCopy> copies;
  for (const WantedBox& want : wanted) {
    const auto item =
        static_cast<std::uint64_t>(safetensors_item_nbytes(want.tensor->dtype));
    const auto bytes = [&](std::int64_t elements) {
      return static_cast<std::uint64_t>(elements) * item;
    };
    for (const StoredPiece& piece : want.tensor->pieces) {
      const Rectangle common = want.box.intersection(piece.box);
      if (common.numel() == 0) {
        continue;
      }
      for_each_common_run(
          common,
          piece.box,
          want.box,
          [&](std::int64_t from, std::int64_t to, std::int64_t n) {
            copies.push_back(
                {piece.file,
                 {.source = piece.offset + bytes(from),
                  .nbytes = bytes(n),
                  .destination = want.destination + bytes(to)}});
          });
    }
  }
  std::sort(
      copies.begin(),
      copies.end(),
      [](const FileCopy& a, const FileCopy& b) {
        return std::tie(a.file, a.copy.source) <
               std::tie(b.file, b.copy.source);
      });
  return copies;
}

std::uint64_t block_begin(std::uint64_t offset) {
  return offset / kDigestBlock * kDigestBlock;
}

void read_chunk(
    const FileReader& file,
    const StoredFile& stored,
    const ReadChunk& chunk,
    std::vector<std::byte>& buffer,
    std::span<std::byte> out) {
  buffer.resize(static_cast<std::size_t>(chunk.end - chunk.begin));
  file.read_at(static_cast<std::int64_t>(chunk.begin), buffer);
  for (std::uint64_t at = chunk.begin; at < chunk.end; at += kDigestBlock) {
    const auto offset = static_cast<std::size_t>(at - chunk.begin);
    const std::size_t n =
        std::min<std::size_t>(kDigestBlock, buffer.size() - offset);
    const std::uint64_t found = digest(std::span(buffer).subspan(offset, n));
    const std::uint64_t expected =
        stored.digests.at(static_cast<std::size_t>(at / kDigestBlock));
    FLATSHARD_CHECK(
        found == expected,
        format,
        "{}: bytes [{}, {}) are damaged: expected digest {:016x}, got {:016x}",
        file.path().string(),
        at,
        at + n,
        expected,
        found);
  }
  for (const ReadChunk::Copy& copy : chunk.copies) {
    std::memcpy(
        out.subspan(static_cast<std::size_t>(copy.destination)).data(),
        buffer.data() + (copy.source - chunk.begin),
        static_cast<std::size_t>(copy.nbytes));
  }
}

/// Place of a safetensors entry in its file.
struct EntryPlace {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
};

/// Returns the manifest's entries of a tensor, by file and name.
std::map<std::pair<std::int64_t, std::string>, EntryPlace> entries_of(
    const StoredTensor& tensor) {
  const auto item =
      static_cast<std::uint64_t>(safetensors_item_nbytes(tensor.dtype));
  std::map<std::pair<std::int64_t, std::string>, EntryPlace> entries;
  for (const StoredPiece& piece : tensor.pieces) {
    const auto nbytes = static_cast<std::uint64_t>(piece.box.numel()) * item;
    if (nbytes > 0) {
      EntryPlace& place = entries
                              .try_emplace(
                                  {piece.file, piece.entry},
                                  EntryPlace{piece.offset, 0})
                              .first->second;
      place.offset = std::min(place.offset, piece.offset);
      place.nbytes += nbytes;
    }
  }
  return entries;
}

}  // namespace

std::vector<ReadChunk> plan_reads(
    const Manifest& manifest,
    std::span<const WantedBox> wanted,
    std::uint64_t max_nbytes) {
  FLATSHARD_CHECK(
      max_nbytes > 0 && max_nbytes % kDigestBlock == 0,
      usage,
      "expected reads of a multiple of {} bytes, got {}",
      kDigestBlock,
      max_nbytes);
  std::vector<ReadChunk> chunks;
  for (const FileCopy& item : copies_of(wanted)) {
    const std::uint64_t file_nbytes =
        manifest.files.at(static_cast<std::size_t>(item.file)).nbytes;
    ReadChunk::Copy rest = item.copy;
    while (rest.nbytes > 0) {
      const std::uint64_t block = block_begin(rest.source);
      // A chunk continues into the next block, but not past its length.
      const bool goes_on = !chunks.empty() && chunks.back().file == item.file &&
                           block <= chunks.back().end &&
                           block - chunks.back().begin < max_nbytes;
      if (!goes_on) {
        chunks.push_back({.file = item.file, .begin = block, .end = block});
      }
      ReadChunk& chunk = chunks.back();
      const std::uint64_t limit =
          std::min(chunk.begin + max_nbytes, file_nbytes);
      const std::uint64_t n = std::min(rest.nbytes, limit - rest.source);
      chunk.copies.push_back({rest.source, n, rest.destination});
      const std::uint64_t end = rest.source + n;
      chunk.end = std::max(
          chunk.end,
          std::min(block_begin(end + kDigestBlock - 1), file_nbytes));
      rest = {end, rest.nbytes - n, rest.destination + n};
    }
  }
  return chunks;
}

std::vector<ReadChunk> plan_whole_files(const Manifest& manifest) {
  constexpr std::uint64_t kChunk = 8 * kDigestBlock;
  std::vector<ReadChunk> chunks;
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    const std::uint64_t nbytes = manifest.files[i].nbytes;
    for (std::uint64_t begin = 0; begin < nbytes; begin += kChunk) {
      chunks.push_back(
          {.file = static_cast<std::int64_t>(i),
           .begin = begin,
           .end = std::min(begin + kChunk, nbytes)});
    }
  }
  return chunks;
}

std::uint64_t read_nbytes(std::span<const ReadChunk> chunks) {
  std::uint64_t nbytes = 0;
  for (const ReadChunk& chunk : chunks) {
    nbytes += chunk.end - chunk.begin;
  }
  return nbytes;
}

void read_chunks(
    const std::filesystem::path& folder,
    const Manifest& manifest,
    std::span<const ReadChunk> chunks,
    std::span<std::byte> out,
    int num_threads) {
  share_work(chunks.size(), num_threads, [&] {
    return [&,
            buffer = std::vector<std::byte>(),
            file = FileReader(),
            open = std::int64_t{-1}](std::size_t i) mutable {
      const ReadChunk& chunk = chunks[i];
      const StoredFile& stored =
          manifest.files.at(static_cast<std::size_t>(chunk.file));
      if (open != chunk.file) {
        file = FileReader(folder / stored.name);
        open = chunk.file;
      }
      read_chunk(file, stored, chunk, buffer, out);
    };
  });
}

void check_files(
    const std::filesystem::path& folder,
    const Manifest& manifest,
    std::span<const std::int64_t> files) {
  std::set<std::int64_t> wanted(files.begin(), files.end());
  if (files.empty()) {
    for (std::size_t i = 0; i < manifest.files.size(); ++i) {
      wanted.insert(static_cast<std::int64_t>(i));
    }
  }
  std::map<std::int64_t, SafetensorsReader> readers;
  for (const std::int64_t index : wanted) {
    const StoredFile& stored =
        manifest.files.at(static_cast<std::size_t>(index));
    const auto path = folder / stored.name;
    // Checked first: this message is more detailed than the one of the reader.
    const auto nbytes = static_cast<std::uint64_t>(FileReader(path).nbytes());
    FLATSHARD_CHECK(
        nbytes == stored.nbytes,
        format,
        "{}: expected {} bytes as in {}, got {}",
        path.string(),
        stored.nbytes,
        kManifestName,
        nbytes);
    readers.try_emplace(index, path);
  }
  for (const auto& [role, tensors] : manifest.tensors) {
    for (const auto& [name, tensor] : tensors) {
      for (const auto& [place, expected] : entries_of(tensor)) {
        const auto found = readers.find(place.first);
        if (found == readers.end()) {
          continue;
        }
        const SafetensorsReader& reader = found->second;
        const SafetensorsEntry& entry = reader.entry(place.second);
        const std::uint64_t offset = reader.offset(entry);
        FLATSHARD_CHECK(
            entry.dtype == tensor.dtype && offset == expected.offset,
            format,
            "{}: tensor '{}' ({}): expected {} at byte {} as in {}, got {} "
            "at byte {}",
            reader.path().string(),
            entry.name,
            describe_tensor(role, name),
            tensor.dtype,
            expected.offset,
            kManifestName,
            entry.dtype,
            offset);
        FLATSHARD_CHECK(
            entry.nbytes() == expected.nbytes,
            format,
            "{}: tensor '{}' ({}): expected {} bytes as in {}, got {}",
            reader.path().string(),
            entry.name,
            describe_tensor(role, name),
            expected.nbytes,
            kManifestName,
            entry.nbytes());
      }
    }
  }
}

}  // namespace flatshard
