#include "flatshard/format/read_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>

#include "flatshard/core/error.h"
#include "flatshard/format/block_writer.h"
#include "flatshard/format/digest.h"
#include "flatshard/format/safetensors_layout.h"
#include "tests/support/temp_folder.h"

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A checkpoint with one weight of random bytes, split over several files.
struct Stored {
  TempFolder folder;
  Manifest manifest;
  std::vector<std::byte> values;

  const StoredTensor& tensor() const {
    return manifest.tensors.at("weight").at("w");
  }
};

/// @param cuts  elements of each file's piece.
void write(Stored& stored, const std::vector<std::int64_t>& cuts) {
  std::mt19937_64 random(7);
  StoredTensor tensor{.dtype = "BF16", .shape = {0}, .pieces = {}};
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    const std::int64_t begin = tensor.shape[0];
    const std::string entry = fmt::format("w[{}]", i);
    const SafetensorsLayout layout(
        {{entry, "BF16", {cuts[i]}}},
        {{"format", "pt"}},
        "x");
    std::vector<std::byte> image(layout.nbytes());
    std::memcpy(image.data(), layout.head().data(), layout.head().size());
    const auto slot = layout.slots().at(entry);
    for (std::uint64_t at = 0; at < slot.nbytes; ++at) {
      const auto value = static_cast<std::byte>(random());
      image[slot.begin + at] = value;
      stored.values.push_back(value);
    }
    const std::string name = fmt::format("{}.safetensors", i);
    const auto digests = write_digested(stored.folder / name, image);
    stored.manifest.files.push_back({name, image.size(), digests});
    tensor.shape[0] += cuts[i];
    tensor.pieces.push_back(
        {.box = {{begin}, {cuts[i]}},
         .file = static_cast<std::int64_t>(i),
         .offset = slot.begin,
         .entry = entry});
  }
  stored.manifest.tensors["weight"]["w"] = tensor;
  // A reader accepts the tests' manifests.
  EXPECT_EQ(parse_manifest(to_json(stored.manifest), "x"), stored.manifest);
}

/// Returns the elements [`begin`, `end`) of the weight.
WantedBox wanted_range(
    const Stored& stored,
    std::int64_t begin,
    std::int64_t end,
    std::uint64_t destination = 0) {
  return {&stored.tensor(), {{begin}, {end - begin}}, destination};
}

std::string refused(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.message();
  }
  return "no error";
}

void flip_byte(const std::filesystem::path& path, std::uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(at));
  file.put(static_cast<char>(byte ^ 1));
}

TEST(ReadPlan, ReadsRandomRanges) {
  Stored stored;
  // Some of several blocks, some of a few elements, one of none.
  write(stored, {3, 1500000, 0, 700001, 17});
  const std::int64_t numel = stored.tensor().shape[0];
  std::mt19937_64 random(3);
  for (int round = 0; round < 40; ++round) {
    std::vector<WantedBox> wanted;
    std::uint64_t nbytes = 0;
    for (int i = 0; i < 5; ++i) {
      std::int64_t begin = static_cast<std::int64_t>(random() % numel);
      std::int64_t end = static_cast<std::int64_t>(random() % numel);
      if (begin > end) {
        std::swap(begin, end);
      }
      end = round % 2 == 0 ? end : std::min(end, begin + 30);
      wanted.push_back(wanted_range(stored, begin, end, nbytes));
      nbytes += static_cast<std::uint64_t>(end - begin) * 2;
    }
    const std::uint64_t max_nbytes = (1 + random() % 3) * kDigestBlock;
    const auto chunks = plan_reads(stored.manifest, wanted, max_nbytes);
    std::vector<std::byte> out(nbytes);
    read_chunks(
        stored.folder.path(),
        stored.manifest,
        chunks,
        out,
        static_cast<int>(1 + random() % 4));
    for (const WantedBox& range : wanted) {
      ASSERT_EQ(
          std::memcmp(
              out.data() + range.destination,
              stored.values.data() + range.box.start[0] * 2,
              static_cast<std::size_t>(range.box.length[0]) * 2),
          0)
          << to_string(range.box);
    }
    for (const ReadChunk& chunk : chunks) {
      EXPECT_LE(chunk.end - chunk.begin, max_nbytes);
      EXPECT_EQ(chunk.begin % kDigestBlock, 0u);
    }
  }
}

// Random pieces and random requested boxes of a tensor of three dimensions.
TEST(ReadPlan, ReadsRandomBoxes) {
  std::mt19937_64 random(13);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  for (int round = 0; round < 50; ++round) {
    const std::vector<std::int64_t> shape{
        1 + below(6),
        1 + below(6),
        1 + below(6)};
    // Pieces: a grid of boxes.
    std::vector<std::vector<std::int64_t>> cuts;
    for (const std::int64_t size : shape) {
      std::set<std::int64_t> at{0, size, below(size + 1), below(size + 1)};
      cuts.emplace_back(at.begin(), at.end());
    }
    Stored stored;
    StoredTensor tensor{.dtype = "BF16", .shape = shape, .pieces = {}};
    const auto value = [](std::int64_t element) {
      return static_cast<std::uint16_t>(element * 7 + 1);
    };
    std::vector<std::byte> file;
    for (std::size_t a = 1; a < cuts[0].size(); ++a) {
      for (std::size_t b = 1; b < cuts[1].size(); ++b) {
        for (std::size_t c = 1; c < cuts[2].size(); ++c) {
          const Rectangle box{
              {cuts[0][a - 1], cuts[1][b - 1], cuts[2][c - 1]},
              {cuts[0][a] - cuts[0][a - 1],
               cuts[1][b] - cuts[1][b - 1],
               cuts[2][c] - cuts[2][c - 1]}};
          tensor.pieces.push_back(
              {.box = box, .file = 0, .offset = file.size(), .entry = "w"});
          for_each_run(
              FlatRuns(shape, box),
              0,
              box.numel(),
              [&](std::int64_t first, std::int64_t, std::int64_t n) {
                for (std::int64_t i = first; i < first + n; ++i) {
                  const std::uint16_t number = value(i);
                  const auto* bytes =
                      reinterpret_cast<const std::byte*>(&number);
                  file.insert(file.end(), bytes, bytes + 2);
                }
              });
        }
      }
    }
    const auto digests = write_digested(stored.folder / "w.safetensors", file);
    stored.manifest.files = {{"w.safetensors", file.size(), digests}};
    stored.manifest.tensors["weight"]["w"] = tensor;
    EXPECT_EQ(parse_manifest(to_json(stored.manifest), "x"), stored.manifest);
    Rectangle box;
    for (const std::int64_t size : shape) {
      box.start.push_back(below(size));
      box.length.push_back(1 + below(size - box.start.back()));
    }
    const WantedBox wanted{&stored.tensor(), box, 0};
    std::vector<std::uint16_t> out(static_cast<std::size_t>(box.numel()));
    read_chunks(
        stored.folder.path(),
        stored.manifest,
        plan_reads(stored.manifest, std::span(&wanted, 1)),
        std::as_writable_bytes(std::span(out)),
        1);
    for_each_run(
        FlatRuns(shape, box),
        0,
        box.numel(),
        [&](std::int64_t first, std::int64_t at, std::int64_t n) {
          for (std::int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(out[static_cast<std::size_t>(at + i)], value(first + i))
                << to_string(box) << " of "
                << to_string(Rectangle::whole(shape));
          }
        });
  }
}

// One run of version 1 is several boxes of one entry.
TEST(ReadPlan, AnEntryMayHoldSeveralPieces) {
  Stored stored;
  write(stored, {1000, 2000});
  StoredTensor& tensor = stored.manifest.tensors["weight"]["w"];
  std::vector<StoredPiece>& pieces = tensor.pieces;
  StoredPiece rest = pieces[0];
  pieces[0].box.length = {300};
  rest.box = {{300}, {700}};
  rest.offset += 600;
  pieces.insert(pieces.begin() + 1, rest);
  const auto check = [&] {
    return refused([&] { check_files(stored.folder.path(), stored.manifest); });
  };
  EXPECT_EQ(check(), "no error");
  pieces.erase(pieces.begin() + 1);
  EXPECT_THAT(check(), HasSubstr("expected 600 bytes as in manifest.json"));
}

TEST(ReadPlan, ReadsNoByteTwice) {
  Stored stored;
  write(stored, {1500000, 700001});
  const std::int64_t numel = stored.tensor().shape[0];
  std::mt19937_64 random(5);
  for (int round = 0; round < 100; ++round) {
    std::vector<std::int64_t> cuts{0, numel};
    for (int i = 0; i < 6; ++i) {
      cuts.push_back(static_cast<std::int64_t>(random() % numel));
    }
    std::sort(cuts.begin(), cuts.end());
    std::vector<WantedBox> wanted;
    for (std::size_t i = 1; i < cuts.size(); ++i) {
      wanted.push_back(wanted_range(stored, cuts[i - 1], cuts[i]));
    }
    std::shuffle(wanted.begin(), wanted.end(), random);
    const auto chunks = plan_reads(stored.manifest, wanted, kDigestBlock);
    EXPECT_EQ(
        read_nbytes(chunks),
        stored.manifest.files[0].nbytes + stored.manifest.files[1].nbytes);
    for (std::size_t i = 1; i < chunks.size(); ++i) {
      if (chunks[i - 1].file == chunks[i].file) {
        EXPECT_LE(chunks[i - 1].end, chunks[i].begin);
      }
    }
  }
}

TEST(ReadPlan, ReadsOnlyTheBlocksOfARange) {
  Stored stored;
  write(stored, {4 * static_cast<std::int64_t>(kDigestBlock)});
  const WantedBox few = wanted_range(stored, 10, 20);
  EXPECT_EQ(
      read_nbytes(plan_reads(stored.manifest, std::span(&few, 1))),
      kDigestBlock);
  const WantedBox all = wanted_range(stored, 0, stored.tensor().shape[0]);
  EXPECT_EQ(
      read_nbytes(plan_reads(stored.manifest, std::span(&all, 1))),
      stored.manifest.files[0].nbytes);
  EXPECT_EQ(
      read_nbytes(plan_whole_files(stored.manifest)),
      stored.manifest.files[0].nbytes);
}

TEST(ReadPlan, NamesADamagedBlock) {
  Stored stored;
  write(stored, {1500000, 700001});
  const auto path = stored.folder / "0.safetensors";
  flip_byte(path, kDigestBlock + 5);
  const auto read = [&](std::int64_t begin, std::int64_t end) {
    const WantedBox range = wanted_range(stored, begin, end);
    std::vector<std::byte> out(static_cast<std::size_t>(end - begin) * 2);
    const auto chunks = plan_reads(stored.manifest, std::span(&range, 1));
    read_chunks(stored.folder.path(), stored.manifest, chunks, out, 2);
  };
  // A reader of other blocks does not notice.
  EXPECT_EQ(refused([&] { read(0, 1000); }), "no error");
  EXPECT_EQ(refused([&] { read(1500000, 1600000); }), "no error");
  EXPECT_THAT(
      refused([&] { read(0, 600000); }),
      AllOf(
          HasSubstr(path.string()),
          HasSubstr("bytes [1048576, 2097152) are damaged: expected digest")));
  EXPECT_THAT(
      refused([&] {
        read_chunks(
            stored.folder.path(),
            stored.manifest,
            plan_whole_files(stored.manifest),
            {},
            2);
      }),
      HasSubstr("are damaged"));
}

TEST(ReadPlan, FilesHaveToBeTheManifests) {
  Stored stored;
  write(stored, {1000, 2000});
  const auto check = [&] {
    return refused([&] { check_files(stored.folder.path(), stored.manifest); });
  };
  EXPECT_EQ(check(), "no error");

  Manifest& manifest = stored.manifest;
  const Manifest good = manifest;
  manifest.tensors["weight"]["w"].dtype = "F16";
  EXPECT_THAT(check(), HasSubstr("expected F16 at byte"));
  manifest = good;
  manifest.tensors["weight"]["w"].pieces[1].entry = "v";
  EXPECT_THAT(check(), HasSubstr("has no tensor 'v'"));
  manifest = good;
  manifest.tensors["weight"]["w"].pieces[0].offset += 2;
  EXPECT_THAT(check(), HasSubstr("as in manifest.json, got BF16 at byte"));
  manifest = good;

  std::filesystem::resize_file(stored.folder / "1.safetensors", 3000);
  EXPECT_THAT(
      check(),
      AllOf(HasSubstr("1.safetensors"), HasSubstr("got 3000")));
  std::filesystem::remove(stored.folder / "1.safetensors");
  EXPECT_THAT(check(), HasSubstr("cannot open"));
  // A reader without need of it does not check it.
  const std::int64_t first = 0;
  check_files(stored.folder.path(), manifest, std::span(&first, 1));
}

TEST(ReadPlan, AFileThatEndsEarlyIsAnError) {
  Stored stored;
  write(stored, {1000});
  std::filesystem::resize_file(stored.folder / "0.safetensors", 500);
  const WantedBox range = wanted_range(stored, 0, 1000);
  const auto chunks = plan_reads(stored.manifest, std::span(&range, 1));
  std::vector<std::byte> out(2000);
  EXPECT_THAT(
      refused([&] {
        read_chunks(stored.folder.path(), stored.manifest, chunks, out, 1);
      }),
      HasSubstr("it is truncated"));
}

// A file size that is not a multiple of direct I/O's block size. Once from
// memory that is aligned for it and once from memory that is not.
TEST(WriteDigested, WritesAnyLength) {
  const TempFolder folder;
  constexpr std::size_t kMost = 3 * kDigestBlock;
  const std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(kDirectAlignment, kMost + kDirectAlignment),
      &std::free);
  auto* bytes = static_cast<std::byte*>(memory.get());
  for (std::size_t i = 0; i < kMost + kDirectAlignment; ++i) {
    bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  }
  for (const std::size_t shift : {0, 1}) {
    for (const std::size_t n :
         {std::size_t{0},
          std::size_t{1},
          kDirectAlignment,
          kDirectAlignment + 1,
          kDigestBlock - 1,
          kMost}) {
      const std::span<const std::byte> part(bytes + shift, n);
      const auto path = folder / "file";
      const auto digests = write_digested(path, part);
      std::ifstream file(path, std::ios::binary);
      const std::string read(std::istreambuf_iterator<char>(file), {});
      ASSERT_EQ(read.size(), n);
      ASSERT_EQ(std::memcmp(read.data(), part.data(), n), 0);
      ASSERT_EQ(digests.size(), num_digest_blocks(n));
      if (n > 0) {
        ASSERT_EQ(
            digests[0],
            digest(part.first(std::min<std::size_t>(n, kDigestBlock))));
      }
    }
  }
}

TEST(WriteDigested, NamesAFolderThatIsNotThere) {
  const TempFolder folder;
  EXPECT_THAT(
      refused([&] { write_digested(folder / "missing" / "file", {}); }),
      AllOf(HasSubstr("cannot write"), HasSubstr("missing/file")));
}

}  // namespace
}  // namespace flatshard
