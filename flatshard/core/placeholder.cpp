#include "flatshard/core/placeholder.h"

#include "flatshard/core/error.h"

namespace flatshard {

// Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md; releases
// before 1.0 wrote the second URL.
void refuse_placeholder(
    const std::filesystem::path& path,
    std::string_view head) {
  FLATSHARD_CHECK(
      !head.starts_with("version https://git-lfs.github.com/spec/") &&
          !head.starts_with("version https://hawser.github.com/spec/"),
      format,
      "{} is a Git LFS pointer, because the file itself was not downloaded; "
      "run 'git lfs pull' in {}, or download the file again",
      path.string(),
      path.has_parent_path() ? path.parent_path().string() : ".");
}

}  // namespace flatshard
