#include "flatshard/comm/make_communicator.h"

#include <csignal>
#include <exception>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/core/error.h"

namespace flatshard {

std::shared_ptr<Communicator> make_communicator(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    CommunicatorOptions options) {
  FLATSHARD_CHECK(
      size >= 1 && rank >= 0 && rank < size,
      config,
      "communicator '{}': expected 0 <= rank < size, got rank {} of {}",
      name,
      rank,
      size);
  FLATSHARD_CHECK(
      device.is_cpu() || device.is_cuda(),
      config,
      "communicator '{}': expected a device of type cpu or cuda, got '{}'",
      name,
      device.str());
  if (size == 1) {
    return make_self_communicator(name, device);
  }
  StoreHandle prefixed = make_prefix_store(name, std::move(store));
  if (device.is_cuda()) {
    return detail::make_nccl_communicator(
        std::move(prefixed),
        rank,
        size,
        name,
        device,
        options);
  }
  detail::BackendHandle backend;
  detail::with_comm_errors(
      fmt::format("rank {}/{} | {} | connect", rank, size, name),
      [&] {
        backend =
            detail::make_gloo_backend(std::move(prefixed), rank, size, options);
      });
  return detail::make_gloo_communicator(std::move(backend), name, options);
}

namespace detail {

void with_comm_errors(
    const std::string& where,
    const std::function<void()>& function) {
  std::string text;
  try {
    function();
    return;
  } catch (const Error& error) {
    throw error.with_context(where);
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  const bool timed_out = text.find("imed out") != std::string::npos ||
                         text.find("imeout") != std::string::npos;
  throw Error(
      timed_out ? ErrorCode::timeout : ErrorCode::comm,
      fmt::format(
          "{}: {}",
          timed_out ? "a peer did not answer in time; is every rank running "
                      "and doing the same collectives?"
                    : "a peer or the network failed",
          text),
      where);
}

void ignore_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) {
    ::signal(SIGPIPE, SIG_IGN);
  }
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.reshape({-1}).view(at::kByte);
}

}  // namespace detail
}  // namespace flatshard
