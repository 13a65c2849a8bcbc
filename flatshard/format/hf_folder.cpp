#include "flatshard/format/hf_folder.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "flatshard/core/error.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/format/manifest.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

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

/// Returns whether a file of the folder has weights of some kind.
bool is_weights_file(std::string_view name) {
  constexpr std::string_view kBegins[] = {
      "model",
      "pytorch_model",
      "consolidated",
      "adapter_model",
      "flax_model",
      "tf_model"};
  constexpr std::string_view kEnds[] = {
      ".safetensors",
      ".safetensors.index.json",
      ".bin",
      ".bin.index.json",
      ".pth",
      ".pt",
      ".gguf",
      ".h5",
      ".msgpack"};
  const auto begins = [&](std::string_view text) {
    return name.starts_with(text);
  };
  const auto ends = [&](std::string_view text) { return name.ends_with(text); };
  return (std::any_of(std::begin(kBegins), std::end(kBegins), begins) &&
          std::any_of(std::begin(kEnds), std::end(kEnds), ends)) ||
         name.ends_with(".gguf");
}

std::set<std::string> weights_files(const fs::path& folder) {
  std::set<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (is_weights_file(name)) {
      names.insert(name);
    }
  }
  return names;
}

/// Returns advice for a folder with neither form.
std::string advice(const fs::path& folder) {
  const auto files = weights_files(folder);
  const auto has = [&](std::string_view begin, std::string_view end) {
    return std::any_of(files.begin(), files.end(), [&](const auto& name) {
      return name.starts_with(begin) && name.ends_with(end);
    });
  };
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    return "; it is not a directory";
  }
  if (has("adapter_model", "")) {
    return "; it has a LoRA adapter, not a model: merge it into its base model "
           "with merge_and_unload() of peft and save_pretrained()";
  }
  if (files.empty()) {
    return ", and no other weights";
  }
  if (has("model.", ".safetensors")) {
    return fmt::format(
        "; {} is a variant: rename it to {}",
        *std::find_if(
            files.begin(),
            files.end(),
            [](const auto& name) { return name.ends_with(".safetensors"); }),
        kHfSingleName);
  }
  return fmt::format(
      "; {} is not a safetensors file: convert it with "
      "AutoModelForCausalLM.from_pretrained('{}').save_pretrained(TO)",
      *files.begin(),
      folder.string());
}

}  // namespace

HfFolder::HfFolder(
    const fs::path& folder,
    std::string_view base_prefix,
    std::string_view single_name)
    : folder_(folder), single_name_(single_name) {
  std::error_code error;
  const bool single = fs::is_regular_file(folder / single_name_, error);
  FLATSHARD_CHECK(
      single || single_name_ == kHfSingleName,
      io,
      "expected {} in {}, found none",
      single_name_,
      folder.string());
  FLATSHARD_CHECK(
      single || fs::is_regular_file(folder / kHfIndexName, error),
      io,
      "expected {} or {} in {}, found neither{}",
      kHfSingleName,
      kHfIndexName,
      folder.string(),
      advice(folder));
  if (single) {
    open_single();
  } else {
    open_index();
  }
  find_pairs();
  find_passed_over();
  const std::string_view word =
      base_prefix.substr(0, base_prefix.find_last_not_of('.') + 1);
  if (word.empty() ||
      std::any_of(places_.begin(), places_.end(), [&](const auto& place) {
        return place.first.starts_with(word);
      })) {
    return;
  }
  std::map<std::string, Place, std::less<>> places;
  for (const auto& [name, place] : places_) {
    places[std::string(base_prefix) + name] = place;
  }
  places_ = std::move(places);
}

void HfFolder::open_single() {
  files_.push_back(std::make_unique<SafetensorsReader>(folder_ / single_name_));
  for (const SafetensorsEntry& entry : files_.front()->entries()) {
    places_[entry.name] = {0, entry.name};
  }
}

void HfFolder::open_index() {
  const auto file_of = read_index(folder_ / kHfIndexName);
  std::set<std::string> names;
  for (const auto& [tensor, file] : file_of) {
    names.insert(file);
  }
  for (const std::string& name : names) {
    std::error_code error;
    FLATSHARD_CHECK(
        fs::exists(folder_ / name, error),
        io,
        "{}: the file {} is listed in {} but missing; download it again",
        folder_.string(),
        name,
        kHfIndexName);
    files_.push_back(std::make_unique<SafetensorsReader>(folder_ / name));
    for (const SafetensorsEntry& entry : files_.back()->entries()) {
      if (file_of.contains(entry.name)) {
        places_[entry.name] = {files_.size() - 1, entry.name};
      } else {
        passed_over_.push_back(entry.name);
      }
    }
  }
  for (const auto& [tensor, file] : file_of) {
    FLATSHARD_CHECK(
        places_.contains(tensor),
        format,
        "{} has no tensor '{}', although {} lists it",
        (folder_ / file).string(),
        tensor,
        kHfIndexName);
  }
}

void HfFolder::find_pairs() {
  const auto part_of = [&](const Place& place) {
    const SafetensorsReader& file = *files_[place.file];
    return Mxfp4Tensors::Part{&file, &file.entry(place.stored_name)};
  };
  std::vector<std::string> names;
  for (const auto& [blocks, place] : places_) {
    if (blocks.ends_with(Mxfp4Tensors::kBlocks) &&
        part_of(place).entry->dtype == "U8") {
      names.push_back(
          blocks.substr(0, blocks.size() - Mxfp4Tensors::kBlocks.size()));
    }
  }
  for (const std::string& name : names) {
    const auto blocks =
        places_.find(fmt::format("{}{}", name, Mxfp4Tensors::kBlocks));
    const auto scales =
        places_.find(fmt::format("{}{}", name, Mxfp4Tensors::kScales));
    if (scales == places_.end()) {
      continue;
    }
    const Mxfp4Tensors::Pair& pair =
        mxfp4_->add(name, part_of(blocks->second), part_of(scales->second));
    places_[name] = {.file = blocks->second.file, .pair = &pair};
    places_.erase(blocks);
    places_.erase(scales);
  }
}

void HfFolder::find_passed_over() {
  std::set<std::string> files = weights_files(folder_);
  for (const auto& file : files_) {
    files.erase(file->path().filename().string());
  }
  if (files_.front()->path().filename() != single_name_) {
    files.erase(std::string(kHfIndexName));
  }
  passed_over_.insert(passed_over_.end(), files.begin(), files.end());
  std::sort(passed_over_.begin(), passed_over_.end());
}

bool HfFolder::contains(std::string_view name) const {
  return places_.find(name) != places_.end();
}

HfFolder::Found HfFolder::find(std::string_view name) const {
  const auto found = places_.find(name);
  if (found == places_.end()) {
    const auto wrapped =
        std::find_if(places_.begin(), places_.end(), [&](const auto& place) {
          return place.first.ends_with(fmt::format(".{}", name));
        });
    FLATSHARD_CHECK(
        wrapped == places_.end(),
        format,
        "{} has no tensor '{}' but '{}': save the model itself and not what it "
        "is wrapped in",
        folder_.string(),
        name,
        wrapped->first);
    FLATSHARD_THROW(
        format,
        "{} has no tensor '{}'; the nearest name is '{}'",
        folder_.string(),
        name,
        nearest_name(name, names()));
  }
  const SafetensorsReader& file = *files_[found->second.file];
  if (const Mxfp4Tensors::Pair* const pair = found->second.pair) {
    return {&file, &pair->entry, mxfp4_.get(), pair};
  }
  return {&file, &file.entry(found->second.stored_name)};
}

std::vector<std::string> HfFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : places_) {
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
    files[i].name = files.size() == 1 ? std::string(kHfSingleName)
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
