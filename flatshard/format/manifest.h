#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/layout/rectangle.h"

namespace flatshard {

/// The version this build writes. It reads the earlier ones, too.
///
/// 1: a piece is a run of the flattened tensor. 2: a piece is a box.
inline constexpr std::int64_t kManifestVersion = 2;
inline constexpr std::string_view kManifestName = "manifest.json";
/// The role of weights among the tensors of a checkpoint; other roles are the
/// names of optimizer states, e.g. exp_avg.
inline constexpr std::string_view kWeightRole = "weight";

/// One safetensors file of a checkpoint.
struct StoredFile {
  std::string name;  ///< next to the manifest; no folders
  std::uint64_t nbytes = 0;
  std::vector<std::uint64_t> digests;  ///< one per kDigestBlock bytes

  bool operator==(const StoredFile&) const = default;
};

/// A box of a tensor and where its elements are in row-major order: in file
/// `file`, from byte `offset` on, in the safetensors entry `entry`. A run of
/// the flattened tensor that version 1 has as one piece may be several boxes of
/// one entry.
struct StoredPiece {
  Rectangle box;
  std::int64_t file = 0;     ///< index into Manifest::files
  std::uint64_t offset = 0;  ///< from the start of the file
  std::string entry;

  bool operator==(const StoredPiece&) const = default;
};

struct StoredTensor {
  std::string dtype;  ///< safetensors' name, e.g. "F32"
  std::vector<std::int64_t> shape;
  std::vector<StoredPiece> pieces;  ///< by their start, without gap or overlap

  std::int64_t numel() const;
  bool operator==(const StoredTensor&) const = default;
};

/// The contents of a checkpoint, from its manifest.json.
struct Manifest {
  std::int64_t step = 0;
  // Configuration of the writer, for information only; not used on load.
  std::string mesh;  ///< e.g. "{dp: 8}"
  /// E.g. "zero3", or of groups that differ "zero1 (2 of 9 groups), ...".
  std::string strategy;
  std::vector<StoredFile> files;
  /// Role, then the parameter's name in the unsharded model.
  std::map<std::string, std::map<std::string, StoredTensor>> tensors;
  /// Number of optimizer updates of each parameter. If ranks store slices of
  /// one parameter, the maximum over them.
  std::map<std::string, std::int64_t> updates;
  /// The run's other state, each a separate text (JSON or TOML).
  std::map<std::string, std::string> state;

  bool operator==(const Manifest&) const = default;
};

/// E.g. "weight of model.norm.weight", for messages.
std::string describe_tensor(std::string_view role, std::string_view name);

/// JSON, a tensor a line.
std::string to_json(const Manifest& manifest);

/// Reads what `to_json` wrote, and trusts none of it: every piece is inside
/// its tensor and its file, pieces cover their tensor exactly and do not
/// overlap, file names do not leave the folder.
///
/// @param origin  the file's name, for messages.
/// @param complete  false for the part of one rank, because it leaves gaps.
/// @throws Error{format} naming `origin`, the tensor or file, and what was
/// expected.
Manifest parse_manifest(
    std::string_view text,
    const std::string& origin,
    bool complete = true);

/// Returns the manifest of a step-N folder. @throws like parse_manifest, or
/// Error{io}.
Manifest read_manifest(const std::filesystem::path& folder);

/// Merges what several ranks wrote. Step, mesh, strategy and state come from
/// the first manifest.
/// @throws Error{format} when the parts disagree on a tensor or leave a gap.
Manifest merge_manifests(const std::vector<Manifest>& parts);

/// `text` names a file in the same folder and nothing else.
bool is_plain_file_name(std::string_view text);

}  // namespace flatshard
