#pragma once

#include <string>
#include <vector>

#include "flatshard/data/corpus_identity.h"
#include "flatshard/data/loader.h"
#include "flatshard/train/data/validation_set.h"

namespace flatshard {

/// Identifies the data of a run by content. A checkpoint stores it as text, and
/// a run that resumes from the checkpoint compares it. Only on rank 0.
class RunData {
 public:
  /// Reads a sample of each dataset.
  /// @param train  the datasets of the loader.
  RunData(
      const std::vector<data::SourceChoice>& train,
      const data::Loader& loader,
      const std::vector<ValidationSet>& validation_sets);

  std::string to_json() const;

  /// Compares with the data of a checkpoint. Logs a warning that names
  /// data.validation, or data.train, if validation reads other data.
  /// @param origin  the checkpoint, for messages.
  /// @throws Error{config} naming data.train if its datasets have other
  /// contents; Error{format} if the text is damaged.
  void check(
      const std::string& saved,
      bool continues_training_data,
      const std::string& origin) const;

 private:
  struct Source {
    std::string path;
    data::CorpusIdentity identity;
  };
  using Sources = std::vector<Source>;
  static Sources
  parse(const std::string& saved, const char* key, const std::string& origin);

  Sources train_;
  Sources validation_;
  std::string validation_option_;
};

}  // namespace flatshard
