#include "flatshard/train/run/weight_sender.h"

#include "flatshard/comm/all_gather_values.h"
#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/train/plan/planned_send.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace flatshard {
namespace {

constexpr double kBytesPerGb = 1e9;

/// Tensors, one after another in one buffer. The engine makes views of it, so
/// each tensor starts at a multiple of its element.
class Bucket {
 public:
  /// @param nbytes  of the buffer, if no tensor is larger.
  Bucket(at::Device device, std::int64_t nbytes)
      : device_(device), capacity_(nbytes) {}

  bool has_room_for(const at::Tensor& tensor) const {
    return tensors_.empty() || (nbytes_ % tensor.element_size() == 0 &&
                                nbytes_ + nbytes_of(tensor) <= buffer_.numel());
  }

  void add(const std::string& name, const at::Tensor& tensor) {
    const std::int64_t nbytes = nbytes_of(tensor);
    if (!buffer_.defined() || nbytes > buffer_.numel()) {
      buffer_ = at::Tensor();  // freed first
      buffer_ = at::empty(
          {std::max(nbytes, capacity_)},
          at::TensorOptions(device_).dtype(at::kByte));
    }
    if (nbytes > 0) {
      buffer_.narrow(0, nbytes_, nbytes)
          .copy_(tensor.contiguous().view(-1).view(at::kByte));
    }
    nbytes_ += nbytes;
    tensors_.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }

  void send(SglangEngine& engine, bool last) const {
    engine.send(tensors_, buffer_.narrow(0, 0, nbytes_), last);
  }

  std::int64_t clear() {
    tensors_.clear();
    return std::exchange(nbytes_, 0);
  }

  void free() { buffer_.reset(); }

 private:
  static std::int64_t nbytes_of(const at::Tensor& tensor) {
    return static_cast<std::int64_t>(tensor.nbytes());
  }

  at::Device device_;
  std::int64_t capacity_;
  at::Tensor buffer_;
  std::vector<SentTensor> tensors_;
  std::int64_t nbytes_ = 0;
};

}  // namespace

WeightSender::WeightSender(const Options& options, Parts parts)
    : options_(options), parts_(std::move(parts)) {
  if (parts_.mesh->rank() == 0) {
    engine_ =
        std::make_unique<SglangEngine>(options.engine, parts_.mesh->device());
  }
}

bool WeightSender::due(std::int64_t step) const {
  return step % options_.every == 0 || step == options_.last_step;
}

void WeightSender::send(std::int64_t step) {
  const CollectiveScope scope("weights");
  Mesh& mesh = *parts_.mesh;
  const auto begin = std::chrono::steady_clock::now();
  error_.clear();
  with_engine([&](SglangEngine& engine) {
    engine.begin(step, begin + options_.timeout);
  });
  // The others all-gather only if there is an engine.
  const int num_engines = engine_ && error_.empty() ? 1 : 0;
  const bool is_there =
      all_gather_values(mesh.world(), num_engines).front() == 1;
  mesh.check();  // an aborted collective ends without a result
  const std::int64_t nbytes = is_there ? send_all() : 0;
  with_engine([](SglangEngine& engine) { engine.finish(); });
  if (!engine_) {
    return;
  }
  const HttpServer& server = options_.engine.server;
  if (!error_.empty()) {
    // Not earlier: the other ranks have already waited for the time limit.
    engine_->give_up();
    ++failures_;
    log_warning(
        "the weights of step {} were not sent to weights.send = "
        "\"http://{}:{}\"; {}{}: {}",
        step,
        server.host,
        server.port,
        step == options_.last_step
            ? "this was the last send"
            : "training continues, and the next send is tried as usual",
        engine_->has_some_weights() ? "; an engine that still runs stays "
                                      "paused until it has all weights"
                                    : "",
        error_);
    parts_.output->weights_error(step, error_, failures_);
    return;
  }
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - begin;
  log_info(
      "sent the weights of step {} to http://{}:{}: {:.3f} GB in {:.2f} s",
      step,
      server.host,
      server.port,
      static_cast<double>(nbytes) / kBytesPerGb,
      seconds.count());
  parts_.output->weights(step, seconds.count(), nbytes);
}

void WeightSender::with_engine(const std::function<void(SglangEngine&)>& work) {
  if (!engine_ || !error_.empty()) {
    return;
  }
  try {
    work(*engine_);
  } catch (const Error& error) {
    error_ = error.what();
    if (error.code() == ErrorCode::timeout) {
      error_ += fmt::format(
          "; weights.timeout_s = {} is the limit of a send, and "
          "weights.engine_ranks = {} must be the engine's tensor-parallel "
          "degree",
          std::chrono::duration<double>(options_.timeout).count(),
          options_.engine.num_ranks);
    }
  } catch (const c10::Error& error) {  // such as too little memory
    error_ = error.what_without_backtrace();
  } catch (const std::exception& error) {
    error_ = error.what();
  }
}

std::int64_t WeightSender::send_all() {
  const at::NoGradGuard no_grad;
  WeightStream stream(
      parts_.groups,
      {.dtype_of = compute_dtype_of,
       .entries_of = parts_.entries_of,
       .mesh = parts_.mesh});
  std::int64_t all = 0;
  for (const StreamedSpec& spec : stream.metadata()) {
    all += c10::multiply_integers(spec.shape) *
           static_cast<std::int64_t>(c10::elementSize(spec.dtype));
  }
  Bucket bucket(parts_.mesh->device(), std::min(all, kSendBucketNbytes));
  std::int64_t nbytes = 0;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    with_engine([&](SglangEngine& engine) {
      if (!bucket.has_room_for(tensor)) {
        bucket.send(engine, /*last=*/false);
        nbytes += bucket.clear();
      }
      bucket.add(name, tensor);
    });
    if (!error_.empty()) {
      bucket.free();
    }
  };
  while (const auto tensors = stream.next()) {
    stream.gather_ahead();
    for (const StreamedTensor& streamed : *tensors) {
      add(streamed.name, streamed.tensor);
    }
  }
  for (const WholeTensor& buffer : parts_.buffers) {
    add(buffer.name, buffer.tensor);
  }
  with_engine([&](SglangEngine& engine) {
    bucket.send(engine, /*last=*/true);
    nbytes += bucket.clear();
  });
  return nbytes;
}

}  // namespace flatshard
