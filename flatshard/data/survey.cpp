#include "flatshard/data/survey.h"

#include <algorithm>
#include <string_view>

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"

namespace flatshard::data {
namespace {

void read_texts(Survey& survey, const TextOptions& options) {
  TextDocuments documents(survey.found.files, options);
  std::uint64_t hash = survey.found.files.size();
  std::string text;
  while (const auto i = documents.next_file()) {
    InputFile& file = survey.found.files[*i];
    hash = mix_keys(hash, stable_hash(file.name));
    file.num_documents = 0;
    while (documents.next_text(text)) {
      ++file.num_documents;
      survey.nbytes += static_cast<std::int64_t>(text.size());
      hash = mix_keys(hash, stable_hash(text));
    }
  }
  survey.num_empty = documents.num_empty();
  survey.num_replaced = documents.num_replaced();
  survey.hash = fmt::format("{:016x}", hash);
  std::erase_if(survey.found.files, [&](const InputFile& file) {
    if (file.num_documents == 0) {
      survey.found.skipped.push_back({file.name, "without documents"});
    }
    return file.num_documents == 0;
  });
}

}  // namespace

std::int64_t Survey::num_documents() const {
  std::int64_t sum = 0;
  for (const InputFile& file : found.files) {
    sum += file.num_documents;
  }
  return sum;
}

std::string Survey::describe_files() const {
  const auto count = [&](auto&& is) {
    return std::ranges::count_if(found.files, is);
  };
  const auto of_kind = [&](InputKind kind) {
    return count([&](const InputFile& file) { return file.kind == kind; });
  };
  const auto json = of_kind(InputKind::json);
  const auto parquet = of_kind(InputKind::parquet);
  const auto bytes = of_kind(InputKind::bytes);
  const auto compressed =
      count([](const InputFile& file) { return !file.compression.empty(); });
  return fmt::format(
      "{} of rows ({} JSON, {} Parquet), {} of plain text, {}{}{} links "
      "followed, {} skipped",
      json + parquet,
      json,
      parquet,
      of_kind(InputKind::text),
      bytes > 0 ? fmt::format("{} of bytes, ", bytes) : "",
      compressed > 0 ? fmt::format("{} compressed, ", compressed) : "",
      found.num_links,
      found.skipped.size());
}

std::string Survey::describe_skipped() const {
  constexpr std::size_t kMost = 10;
  std::string text;
  for (std::size_t i = 0; i < std::min(found.skipped.size(), kMost); ++i) {
    text += fmt::format(
        "{}{} ({})",
        i > 0 ? ", " : "",
        found.skipped[i].name,
        found.skipped[i].reason);
  }
  return found.skipped.size() > kMost
             ? fmt::format("{} and {} more", text, found.skipped.size() - kMost)
             : text;
}

Survey survey_inputs(
    const std::vector<std::string>& inputs,
    InputFormat format,
    const TextOptions& options) {
  Survey survey{.found = find_input_files(inputs)};
  const std::size_t num_found = survey.found.files.size();
  decide_kinds(survey.found, format);
  if (!survey.found.files.empty()) {
    read_texts(survey, options);
  }
  FLATSHARD_CHECK(
      !survey.found.files.empty(),
      format,
      "--input: none of {} files has a document, so the corpus would be empty: "
      "{}",
      num_found,
      survey.describe_skipped());
  return survey;
}

}  // namespace flatshard::data
