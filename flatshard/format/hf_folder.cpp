#include "flatshard/format/hf_folder.h"

#include <nlohmann/json.hpp>

#include "flatshard/core/error.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/format/manifest.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kSingleName = "model.safetensors";

std::uint64_t nbytes_of(const SafetensorsSpec& tensor) {
  std::uint64_t nbytes = 0;
  FLATSHARD_CHECK(
      safetensors_nbytes(
          tensor.shape,
          safetensors_item_nbytes(tensor.dtype),
          nbytes),
      usage,
      "tensor '{}': the shape has a negative size or too many elements",
      tensor.name);
  return nbytes;
}

/// Tensor to file name.
std::map<std::string, std::string> read_index(const fs::path& path) {
  const MappedFile file(path);
  const json parsed = json::parse(file.text(), nullptr, false);
  FLATSHARD_CHECK(
      parsed.is_object() && parsed.contains("weight_map") &&
          parsed["weight_map"].is_object(),
      format,
      "{}: expected a JSON object with a weight_map",
      path.string());
  std::map<std::string, std::string> files;
  for (const auto& [name, value] : parsed["weight_map"].items()) {
    FLATSHARD_CHECK(
        value.is_string() && is_plain_file_name(value.get<std::string>()),
        format,
        "{}: tensor '{}': expected the name of a file in the same folder, got "
        "{}",
        path.string(),
        name,
        value.dump());
    files[name] = value.get<std::string>();
  }
  return files;
}

}  // namespace

HfFolder::HfFolder(const fs::path& folder) : folder_(folder) {
  const fs::path index = folder / kHfIndexName;
  if (!fs::exists(index)) {
    FLATSHARD_CHECK(
        fs::exists(folder / kSingleName),
        io,
        "expected {} or {} in {}, found neither",
        kSingleName,
        kHfIndexName,
        folder.string());
    files_.push_back(std::make_unique<SafetensorsReader>(folder / kSingleName));
    for (const SafetensorsEntry& entry : files_.front()->entries()) {
      file_of_[entry.name] = 0;
    }
    return;
  }
  std::map<std::string, std::size_t> known;
  for (const auto& [tensor, file] : read_index(index)) {
    const auto [found, is_new] = known.try_emplace(file, files_.size());
    if (is_new) {
      files_.push_back(std::make_unique<SafetensorsReader>(folder / file));
    }
    files_[found->second]->entry(tensor);  // names it when it is not there
    file_of_[tensor] = found->second;
  }
}

bool HfFolder::contains(std::string_view name) const {
  return file_of_.find(name) != file_of_.end();
}

HfFolder::Found HfFolder::find(std::string_view name) const {
  const auto found = file_of_.find(name);
  FLATSHARD_CHECK(
      found != file_of_.end(),
      format,
      "{} has no tensor '{}'; the nearest name is '{}'",
      folder_.string(),
      name,
      nearest_name(name, names()));
  const SafetensorsReader& file = *files_[found->second];
  return {&file, &file.entry(name)};
}

std::vector<std::string> HfFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : file_of_) {
    names.push_back(name);
  }
  return names;
}

std::vector<HfFile> plan_hf_files(
    const std::vector<SafetensorsSpec>& tensors,
    std::uint64_t max_file_nbytes) {
  std::vector<HfFile> files(1);
  std::uint64_t nbytes = 0;
  for (const SafetensorsSpec& tensor : tensors) {
    const std::uint64_t more = nbytes_of(tensor);
    if (!files.back().tensors.empty() && nbytes + more > max_file_nbytes) {
      files.emplace_back();
      nbytes = 0;
    }
    files.back().tensors.push_back(tensor);
    nbytes += more;
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    files[i].name = files.size() == 1 ? std::string(kSingleName)
                                      : fmt::format(
                                            "model-{:05}-of-{:05}.safetensors",
                                            i + 1,
                                            files.size());
  }
  return files;
}

std::string hf_index_json(const std::vector<HfFile>& files) {
  std::uint64_t nbytes = 0;
  json map = json::object();
  for (const HfFile& file : files) {
    for (const SafetensorsSpec& tensor : file.tensors) {
      nbytes += nbytes_of(tensor);
      map[tensor.name] = file.name;
    }
  }
  const json index{
      {"metadata", {{"total_size", nbytes}}},
      {"weight_map", std::move(map)}};
  return index.dump(2) + "\n";
}

}  // namespace flatshard
