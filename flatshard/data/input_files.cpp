#include "flatshard/data/input_files.h"

#include <fnmatch.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <utility>

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

/// Returns the entries of a folder by name, so that the order is no accident.
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

fs::path real_path(const fs::path& path) {
  std::error_code error;
  fs::path real = fs::canonical(path.empty() ? "." : path, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot follow {}: {}; restore what the link names, or remove the link",
      path.string(),
      error.message());
  return real;
}

/// Returns whether `folder` is `inner` or above it.
bool contains(const fs::path& folder, const fs::path& inner) {
  return std::mismatch(folder.begin(), folder.end(), inner.begin(), inner.end())
             .first == folder.end();
}

/// Returns whether `flatshard data prepare` has written the folder.
bool is_corpus(const fs::path& folder) {
  std::ifstream meta(folder / "meta.json");
  std::string line;
  return std::getline(meta, line) && std::getline(meta, line) &&
         line.find("\"flatshard-corpus\"") != std::string::npos;
}

/// Walks a pattern's components. Links to folders are kept for later, so that
/// what a path without links reaches has the name of that path.
class Walker {
 public:
  Walker(std::vector<std::string> components, FoundFiles& found)
      : components_(std::move(components)), found_(found) {
    const std::string& last = components_.back();
    takes_all_ = last.find_first_not_of('*') == std::string::npos;
  }

  void walk(const fs::path& base) {
    pending_.push_back({base, {}, 0, false});
    for (std::size_t i = 0; i < pending_.size(); ++i) {
      const Folder folder = pending_[i];
      walk(folder);
    }
  }

  std::vector<InputFile> files;

 private:
  struct Folder {
    fs::path path;
    fs::path relative;   ///< to the fixed part of the pattern
    std::size_t at = 0;  ///< the component for its entries
    bool is_link = false;
  };

  void walk(const Folder& folder) {
    if (!visited_.insert({real_path(folder.path).string(), folder.at}).second) {
      return;
    }
    const std::string& component = components_[folder.at];
    const bool last = folder.at + 1 == components_.size();
    if (component == "**" && !last) {
      Folder same = folder;
      ++same.at;
      walk(same);
    }
    for (const auto& entry : sorted_entries(folder.path)) {
      const fs::path name = entry.path().filename();
      // Only a pattern that begins with a dot finds hidden names, as in a
      // shell.
      if (is_hidden(name) && !is_hidden(component)) {
        if (takes_all_) {
          found_.skipped.push_back(
              {(folder.relative / name).generic_string(), "hidden"});
        }
        continue;
      }
      const bool any = component == "**";
      if (!any && ::fnmatch(component.c_str(), name.c_str(), 0) != 0) {
        continue;
      }
      Folder inner{
          folder.path / name,
          folder.relative / name,
          any ? folder.at : folder.at + 1,
          folder.is_link || entry.is_symlink()};
      if (entry.is_symlink()) {
        real_path(inner.path);  // a link to nothing is an error
      }
      if (fs::is_directory(inner.path)) {
        if (any || !last) {
          enter(std::move(inner), entry.is_symlink());
        }
      } else if (last) {
        add(inner, entry.is_symlink());
      }
    }
  }

  void enter(Folder folder, bool by_link) {
    if (is_corpus(folder.path)) {
      found_.skipped.push_back({folder.relative.generic_string(), "a corpus"});
      return;
    }
    if (!by_link) {
      walk(folder);
      return;
    }
    if (contains(
            real_path(folder.path),
            real_path(folder.path.parent_path()))) {
      found_.skipped.push_back(
          {folder.relative.generic_string(),
           "a link to a folder that it is in"});
      return;
    }
    ++found_.num_links;
    pending_.push_back(std::move(folder));
  }

  void add(const Folder& file, bool by_link) {
    std::string name = file.relative.generic_string();
    if (!fs::is_regular_file(file.path)) {
      found_.skipped.push_back({std::move(name), "no regular file"});
      return;
    }
    if (takes_all_ && is_beside_data(file.path.filename().string())) {
      found_.skipped.push_back({std::move(name), "beside the data"});
      return;
    }
    found_.num_links += by_link ? 1 : 0;
    files.push_back(
        {.path = file.path,
         .name = std::move(name),
         .nbytes = static_cast<std::int64_t>(fs::file_size(file.path)),
         .listed = true,
         .modified = fs::last_write_time(file.path),
         .is_link = file.is_link});
  }

  std::vector<std::string> components_;
  FoundFiles& found_;
  bool takes_all_ = false;
  std::set<std::pair<std::string, std::size_t>> visited_;
  std::vector<Folder> pending_;
};

std::vector<InputFile> expand(const std::string& input, FoundFiles& found) {
  const fs::path path(input);
  std::error_code error;
  if (fs::is_regular_file(path, error)) {
    const bool is_link = fs::is_symlink(path, error);
    found.num_links += is_link ? 1 : 0;
    return {
        {.path = path,
         .name = path.filename().generic_string(),
         .nbytes = static_cast<std::int64_t>(fs::file_size(path)),
         .modified = fs::last_write_time(path),
         .is_link = is_link}};
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
  std::vector<InputFile> files;
  const std::size_t skipped_before = found.skipped.size();
  if (!pattern.empty() && (base.empty() || fs::is_directory(base, error))) {
    Walker walker(pattern, found);
    walker.walk(base);
    files = std::move(walker.files);
  }
  // The error is not "no file" when the file exists and is out of reach.
  std::error_code reach;
  const bool exists = fs::exists(pattern.empty() ? path : base, reach);
  FLATSHARD_CHECK(
      reach != std::errc::permission_denied,
      io,
      "cannot read --input '{}': {}",
      input,
      reach.message());
  FLATSHARD_CHECK(
      exists || !fs::is_symlink(path, error),
      io,
      "--input '{}' is a link to nothing; restore what it names",
      input);
  FLATSHARD_CHECK(
      pattern.empty() && exists ? fs::is_regular_file(path) : true,
      io,
      "--input '{}' is a pipe or a device; expected a file, a folder or a glob",
      input);
  FLATSHARD_CHECK(
      !files.empty(),
      io,
      "--input '{}' matches no file{}{}",
      input,
      pattern.empty() || base.empty() || exists
          ? ""
          : fmt::format(" (there is no folder {})", base.string()),
      found.skipped.size() == skipped_before
          ? ""
          : fmt::format(
                " with data ({} is {}; a file that --input names itself is "
                "taken)",
                found.skipped.back().name,
                found.skipped.back().reason));
  std::sort(
      files.begin(),
      files.end(),
      [](const InputFile& a, const InputFile& b) { return a.name < b.name; });
  return files;
}

}  // namespace

FoundFiles find_input_files(const std::vector<std::string>& inputs) {
  FLATSHARD_CHECK(
      !inputs.empty(),
      config,
      "--input: expected at least one file, folder or glob");
  FoundFiles found;
  std::vector<InputFile> all;
  for (const std::string& input : inputs) {
    for (InputFile& file : expand(input, found)) {
      all.push_back(std::move(file));
    }
  }
  // Which paths stand for their file: first those without links.
  std::set<std::string> seen;
  std::vector<bool> taken(all.size());
  for (const bool is_link : {false, true}) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i].is_link == is_link) {
        taken[i] = seen.insert(real_path(all[i].path).string()).second;
      }
    }
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (taken[i]) {
      found.files.push_back(std::move(all[i]));
    } else if (all[i].is_link) {
      found.skipped.push_back({all[i].name, "a link to a file that is taken"});
    }
  }
  return found;
}

void decide_kinds(FoundFiles& found, InputFormat format) {
  std::erase_if(found.files, [&](InputFile& file) {
    if (file.nbytes == 0) {
      found.skipped.push_back({file.name, "empty"});
      return true;
    }
    KindOfFile kind = kind_of_file(file.path, format);
    file.kind = kind.kind;
    file.compression = std::move(kind.compression);
    if (kind.not_text.empty() ||
        (!file.listed && format != InputFormat::automatic)) {
      return false;
    }
    FLATSHARD_CHECK(
        file.listed,
        format,
        "{}: expected text, JSON rows or Parquet, got {} data; --format bytes "
        "takes each byte as it is, for --tokenizer bytes",
        file.path.string(),
        kind.not_text);
    found.skipped.push_back({file.name, kind.not_text});
    return true;
  });
}

void check_unchanged(const std::vector<InputFile>& files) {
  for (const InputFile& file : files) {
    std::error_code gone;
    std::error_code error;
    FLATSHARD_CHECK(
        static_cast<std::int64_t>(fs::file_size(file.path, gone)) ==
                file.nbytes &&
            fs::last_write_time(file.path, error) == file.modified && !gone &&
            !error,
        io,
        "{} changed while it was read; prepare the corpus again when it is "
        "whole",
        file.path.string());
  }
}

}  // namespace flatshard::data
