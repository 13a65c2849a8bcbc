#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

/// Distribution of tokens over experts in one step, over all ranks and
/// microbatches. Values of the worst layer.
struct ExpertMetrics {
  double load = 1;     ///< tokens of the busiest expert, relative to the mean
  double dropped = 0;  ///< fraction of all choices
  double balance =
      1;  ///< load-balancing loss without its coefficient, the mean
  std::optional<double> bias;  ///< largest magnitude; unset: no bias
  /// This step's waits of compute for tokens under way; unset: they stay here.
  std::optional<double> exchange_ms;
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
  double program_s = 0;  ///< loading the program and its launcher
  double device_s = 0;   ///< opening the data and the device
  double ranks_s = 0;    ///< connecting the ranks
  double model_s = 0;    ///< making the model, with random weights
  double weights_s = 0;  ///< loading weights
  double step_s = 0;     ///< the first step

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
  /// Mean over the trained tokens of the global batch; unset without any.
  std::optional<double> loss;
  double grad_norm = 0;  ///< global 2-norm before clipping
  double lr = 0;
  std::int64_t tokens = 0;  ///< seen so far, of all ranks and attempts
  double step_ms = 0;
  double data_ms = 0;          ///< waiting for the loader
  double host_ms = 0;          ///< to queue the step, without waiting
  double exposed_comm_ms = 0;  ///< this step's waits for collectives
  double tokens_per_s = 0;     ///< over all ranks
  double tokens_per_s_per_rank = 0;
  double tflops_per_rank = 0;  ///< model FLOP/s by the run's convention, 1e12
  std::optional<double> mfu;   ///< in [0, 1]; unset: the peak is unknown
  std::int64_t memory_allocated_bytes = 0;
  std::int64_t memory_peak_bytes = 0;      ///< highest allocated so far
  std::int64_t memory_reserved_bytes = 0;  ///< highest reserved so far
  std::int64_t memory_total_bytes = 0;     ///< of the device
  std::optional<ExpertMetrics> experts;    ///< unset: there are none
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
  double loss = 0;  ///< nats, mean over the tokens of the sequences
  /// For byte tokens: total loss of all sequences in bits, over the bytes among
  /// their targets (ends of documents are not bytes).
  std::optional<double> bits_per_byte;
  /// Folder and loss of each dataset, for a data mix.
  std::vector<std::pair<std::string, double>> parts;

  double perplexity() const;  ///< exp(loss)
};

/// "step: 10  validation_loss: 1.8342  perplexity: 6.2604
///  bits_per_byte: 2.6532", in one line; the last only for byte tokens.
std::string format_validation(const ValidationMetrics& metrics);

}  // namespace flatshard
