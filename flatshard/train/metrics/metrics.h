#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

/// A file of rows/ has the numbers of one struct: a row METRIC(type, member,
/// "key", "help", .column = value...) is a member and a Metric. The struct
/// includes the file with this macro as METRIC, and metric_table.cpp with its
/// own. DERIVED(expression of `m`, "key", ...) is a Metric without a member.
#define METRIC_MEMBER(type, member, ...) type member{};

/// Distribution of tokens over experts in one step, over all ranks and
/// microbatches. Values of the worst layer.
struct ExpertMetrics {
#define METRIC METRIC_MEMBER
#include "flatshard/train/metrics/rows/experts.def"
};

/// Number of epochs of a run over one of its datasets.
struct DataEpochs {
  std::string path;          ///< of the dataset
  std::int64_t samples = 0;  ///< sequences of seq_len tokens
  double steps = 0;          ///< per epoch
  double epochs = 0;         ///< over the entire run
};

/// The properties of a start of a run, once for each attempt.
struct StartMetrics {
  std::int64_t done = 0;   ///< steps that earlier attempts trained
  std::int64_t steps = 0;  ///< of the entire run
  int ranks = 1;
  std::string device;  ///< of rank 0: "CPU" or the GPU's name
  std::int64_t parameters = 0;
  std::int64_t tokens_per_step = 0;  ///< over all ranks
  std::vector<DataEpochs> data;
  /// Keys of the config that were set to another value than the default.
  std::vector<std::string> changed_keys;
  /// Versions and machine of rank 0, by name.
  std::vector<std::pair<std::string, std::string>> environment;
};

/// The parts of a start, in their order and in seconds on this rank.
struct StartTimes {
#define METRIC METRIC_MEMBER
#define DERIVED(...)
#include "flatshard/train/metrics/rows/start.def"

  double total_s() const {
    return program_s + device_s + ranks_s + model_s + weights_s + step_s;
  }
};

/// The measurements of one logged step. Times are of the host's clock on this
/// rank and per step; where several steps are between two log lines the caller
/// gives their mean.
struct StepMetrics {
  std::int64_t step = 0;   ///< counted from 1
  std::int64_t steps = 0;  ///< of the entire run; 0: not shown
#define METRIC METRIC_MEMBER
#include "flatshard/train/metrics/rows/step.def"
  std::optional<ExpertMetrics> experts;   ///< unset: there are none
  std::optional<StartTimes> start_times;  ///< only of the first step of a start
};

/// Returns "step: 10/1000  loss: 9.9493  grad_norm: 4.4717  lr: 3e-04
///  memory: 49.66GiB(52.28%)  tps: 11,699 (5,850/rank)  tflops: 338.79
///  mfu: 34.26%", in one line. Memory is reserved memory, also as a fraction of
/// device memory. tps are tokens per second, in total and per rank if there are
/// several ranks. tflops are per rank, and mfu is N/A without a peak. A model
/// with experts adds "  experts: load 1.31x  dropped 0.00%  balance 1.0412",
/// and where tokens are exchanged "  exchange 1.2ms", the wait of compute for
/// them. A step without a trained token has "loss: none". The first step of a
/// start adds "  start: 6.1s (program 0.9, ...)".
std::string format_step(const StepMetrics& metrics);

/// The results of one validation.
struct ValidationMetrics {
  std::int64_t step = 0;
#define METRIC METRIC_MEMBER
#define DERIVED(...)
#include "flatshard/train/metrics/rows/validation.def"
  /// Folder and loss of each dataset, for a data mix.
  std::vector<std::pair<std::string, double>> parts;

  double perplexity() const;  ///< exp(loss)
};

/// "step: 10  validation_loss: 1.8342  perplexity: 6.2604
///  bits_per_byte: 2.6532", in one line; the last only for byte tokens.
std::string format_validation(const ValidationMetrics& metrics);

}  // namespace flatshard
