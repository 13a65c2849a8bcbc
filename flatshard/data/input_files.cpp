#include "flatshard/data/input_files.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <set>

#include "flatshard/core/error.h"

namespace flatshard::data {
namespace {

namespace fs = std::filesystem;

bool has_wildcard(const std::string& text) {
  return text.find_first_of("*?[") != std::string::npos;
}

bool is_hidden(const fs::path& name) {
  return name.string().starts_with(".");
}

/// The entries of a folder by name, so that the order is no accident.
std::vector<fs::directory_entry> sorted_entries(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::directory_entry> entries;
  fs::directory_iterator end;
  for (fs::directory_iterator it(folder.empty() ? "." : folder, error);
       !error && it != end;
       it.increment(error)) {
    entries.push_back(*it);
  }
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot read folder {}: {}",
      folder.string(),
      error.message());
  std::sort(entries.begin(), entries.end());
  return entries;
}

bool is_real_folder(const fs::directory_entry& entry) {
  std::error_code error;
  return !entry.is_symlink(error) && entry.is_directory(error);
}

/// Walks a pattern's components. `relative` is the name below the fixed part
/// of the pattern.
class Walker {
 public:
  explicit Walker(std::vector<std::string> components)
      : components_(std::move(components)) {}

  void walk(const fs::path& folder, const fs::path& relative, std::size_t at) {
    const std::string& component = components_[at];
    const bool last = at + 1 == components_.size();
    if (component == "**" && !last) {
      walk(folder, relative, at + 1);
    }
    for (const auto& entry : sorted_entries(folder)) {
      const fs::path name = entry.path().filename();
      // As in a shell, only a pattern that says so finds hidden names.
      if (is_hidden(name) && !is_hidden(component)) {
        continue;
      }
      const fs::path path = folder / name;
      if (component == "**") {
        if (is_real_folder(entry)) {
          walk(path, relative / name, at);
        } else if (last) {
          add(path, relative / name);
        }
      } else if (::fnmatch(component.c_str(), name.c_str(), 0) == 0) {
        if (last) {
          add(path, relative / name);
        } else if (fs::is_directory(path)) {
          walk(path, relative / name, at + 1);
        }
      }
    }
  }

  std::vector<InputFile> files;

 private:
  void add(const fs::path& path, const fs::path& relative) {
    std::error_code error;
    if (fs::is_regular_file(path, error)) {
      files.push_back(
          {path,
           relative.generic_string(),
           static_cast<std::int64_t>(fs::file_size(path)),
           /*listed=*/true});
    }
  }

  std::vector<std::string> components_;
};

std::vector<InputFile> expand(const std::string& input) {
  const fs::path path(input);
  std::error_code error;
  if (fs::is_regular_file(path, error)) {
    return {
        {path,
         path.filename().generic_string(),
         static_cast<std::int64_t>(fs::file_size(path))}};
  }
  fs::path base;
  std::vector<std::string> pattern;
  if (fs::is_directory(path, error)) {
    base = path;
    pattern = {"**"};
  } else if (has_wildcard(input)) {
    for (const fs::path& part : path) {
      if (pattern.empty() && !has_wildcard(part.string())) {
        base /= part;
      } else if (!part.empty()) {
        pattern.push_back(part.string());
      }
    }
  }
  Walker walker(pattern);
  if (!pattern.empty() && (base.empty() || fs::is_directory(base, error))) {
    walker.walk(base, {}, 0);
  }
  // Not "no file" when it is there and out of reach.
  std::error_code reach;
  const bool exists = fs::exists(pattern.empty() ? path : base, reach);
  FLATSHARD_CHECK(
      reach != std::errc::permission_denied,
      io,
      "cannot read --input '{}': {}",
      input,
      reach.message());
  FLATSHARD_CHECK(
      !walker.files.empty(),
      io,
      "--input '{}' matches no file{}",
      input,
      pattern.empty() || base.empty() || exists
          ? ""
          : fmt::format(" (there is no folder {})", base.string()));
  std::sort(
      walker.files.begin(),
      walker.files.end(),
      [](const InputFile& a, const InputFile& b) { return a.name < b.name; });
  return std::move(walker.files);
}

/// As git and grep tell it.
bool looks_binary(const InputFile& file) {
  if (file.path.extension() == ".pyc") {
    return true;
  }
  std::array<char, 8192> begin{};
  std::ifstream in(file.path, std::ios::binary);
  in.read(begin.data(), begin.size());
  const std::string_view read(
      begin.data(),
      static_cast<std::size_t>(in.gcount()));
  return read.find('\0') != std::string_view::npos;
}

}  // namespace

InputKind InputFile::kind() const {
  const fs::path extension = path.extension();
  return extension == ".jsonl"     ? InputKind::jsonl
         : extension == ".parquet" ? InputKind::parquet
                                   : InputKind::text;
}

std::vector<InputFile> take_binary_files(std::vector<InputFile>& files) {
  std::vector<InputFile> taken;
  std::erase_if(files, [&](const InputFile& file) {
    const bool binary =
        file.listed && file.kind() == InputKind::text && looks_binary(file);
    if (binary) {
      taken.push_back(file);
    }
    return binary;
  });
  return taken;
}

std::vector<InputFile> find_input_files(
    const std::vector<std::string>& inputs) {
  FLATSHARD_CHECK(
      !inputs.empty(),
      config,
      "--input: expected at least one file, folder or glob");
  std::vector<InputFile> all;
  std::set<std::string> seen;
  for (const std::string& input : inputs) {
    for (InputFile& file : expand(input)) {
      if (seen.insert(fs::absolute(file.path).lexically_normal().string())
              .second) {
        all.push_back(std::move(file));
      }
    }
  }
  return all;
}

}  // namespace flatshard::data
