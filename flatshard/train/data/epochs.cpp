#include "flatshard/train/data/epochs.h"

#include <fmt/format.h>

#include <cmath>

#include "flatshard/train/metrics/number_text.h"

namespace flatshard {
namespace {

/// 0.25, 6.5, 155, 12,345
std::string amount(double value) {
  constexpr double kWhole = 100;
  return value < kWhole ? fmt::format("{:.3g}", value)
                        : with_commas(std::llround(value));
}

}  // namespace

std::vector<DataEpochs> data_epochs(
    const std::vector<data::SourceChoice>& train,
    const data::Loader& loader,
    std::int64_t steps) {
  constexpr double kWholeShare = 4294967296.0;  // see Mixture::shares
  const data::LoaderState state = loader.state();
  const auto batch = static_cast<double>(loader.options().global_batch_size);
  std::vector<DataEpochs> all;
  for (std::size_t i = 0; i < train.size(); ++i) {
    const data::SourceChoice& source = train[i];
    if (source.is_random()) {
      continue;
    }
    const bool is_mixed = !state.parts.empty();
    const std::int64_t samples =
        is_mixed ? state.parts.at(i).num_sequences : state.num_sequences;
    const double share =
        is_mixed ? static_cast<double>(state.parts.at(i).share) / kWholeShare
                 : 1;
    const double epoch = static_cast<double>(samples) / (batch * share);
    all.push_back(
        {.path = source.path,
         .samples = samples,
         .steps = epoch,
         .epochs = static_cast<double>(steps) / epoch});
  }
  return all;
}

std::string to_string(const DataEpochs& data) {
  return fmt::format(
      "data: {}: one epoch has {} samples, {} steps; the run has {} epochs",
      data.path,
      with_commas(data.samples),
      amount(data.steps),
      amount(data.epochs));
}

}  // namespace flatshard
