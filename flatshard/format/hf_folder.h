#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/format/mxfp4.h"
#include "flatshard/format/safetensors.h"

namespace flatshard {

// A folder of weights as Hugging Face writes it: model.safetensors, or
// model-00001-of-0000N.safetensors with model.safetensors.index.json as the map
// from each tensor to its file.

inline constexpr std::string_view kHfSingleName = "model.safetensors";

/// Reads such a folder as transformers does: headers at once, tensors when they
/// are asked for.
/// - model.safetensors comes before an index.
/// - Of an index only the tensors that it names count. When several of its
/// files
///   have one, the last file by name does.
/// - A pair of tensors with MXFP4 is one tensor of bfloat16; see Mxfp4Tensors.
/// Source: transformers, modeling_utils.py, _get_resolved_checkpoint_files.
class HfFolder {
 public:
  /// A tensor and the file that contains it.
  struct Found {
    const SafetensorsReader* file;
    const SafetensorsEntry* entry;
    Mxfp4Tensors* unpacks = nullptr;           ///< null: it is stored as it is
    const Mxfp4Tensors::Pair* pair = nullptr;  ///< stored pair to unpack

    void read(std::uint64_t begin, std::span<std::byte> out) const {
      if (unpacks != nullptr) {
        unpacks->read(*pair, begin, out);
      } else {
        file->read(*entry, begin, out);
      }
    }
  };

  /// @param base_prefix  the prefix of names, "model.". A folder of the model
  ///   without its head leaves it out of all names, and is read as if it did
  ///   not. Empty: names are used unchanged.
  /// @param single_name  of the one file; another one has no index.
  /// @throws Error{io} or Error{format} naming the file. Neither form exists,
  /// the index names a file that is missing or outside the folder, or none of
  /// its files has a named tensor.
  explicit HfFolder(
      const std::filesystem::path& folder,
      std::string_view base_prefix = {},
      std::string_view single_name = kHfSingleName);

  const std::filesystem::path& folder() const { return folder_; }
  bool contains(std::string_view name) const;
  /// @throws Error{format} naming the nearest tensor of the folder.
  Found find(std::string_view name) const;
  std::vector<std::string> names() const;
  /// Returns the names of files with weights, and of tensors of its files, that
  /// are passed over, sorted.
  const std::vector<std::string>& passed_over() const { return passed_over_; }

 private:
  /// Place of a tensor in the files.
  struct Place {
    std::size_t file = 0;
    std::string stored_name;
    const Mxfp4Tensors::Pair* pair = nullptr;  ///< set: the blocks' file
  };

  void open_single();
  void open_index();
  void find_pairs();
  void find_passed_over();

  std::filesystem::path folder_;
  std::string single_name_;
  std::vector<std::unique_ptr<SafetensorsReader>> files_;
  std::unique_ptr<Mxfp4Tensors> mxfp4_ = std::make_unique<Mxfp4Tensors>();
  std::map<std::string, Place, std::less<>> places_;
  std::vector<std::string> passed_over_;
};

/// Assigns tensors to the files of a new folder in the given order, with a
/// new file whenever one would exceed `max_file_nbytes`. Also names the
/// files.
struct HfFile {
  std::string name;
  std::vector<SafetensorsSpec> tensors;
};
std::vector<HfFile> plan_hf_files(
    const std::vector<SafetensorsSpec>& tensors,
    std::uint64_t max_file_nbytes);

/// Returns the content of model.safetensors.index.json.
std::string hf_index_json(const std::vector<HfFile>& files);

inline constexpr std::string_view kHfIndexName = "model.safetensors.index.json";

}  // namespace flatshard
