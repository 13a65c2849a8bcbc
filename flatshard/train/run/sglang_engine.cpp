#include "flatshard/train/run/sglang_engine.h"

#include "flatshard/comm/network.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <exception>
#include <future>
#include <random>
#include <utility>

// Source: SGLang of 2026, `python/sglang/srt/entrypoints/http_server.py` for
// the routes, `managers/io_struct.py` for their fields, and the class
// WeightUpdater for the group and the order of bytes.
namespace flatshard {
namespace {

using Json = nlohmann::json;

/// The limit of each request after a failure, also after the deadline.
constexpr std::chrono::seconds kGiveUpTimeout(5);

/// Returns a name that no earlier group has: torch.distributed refuses the name
/// of a group that exists, as it does after a send that failed.
std::string new_group_name(std::int64_t step) {
  std::random_device random;
  return fmt::format("flatshard_{}_{:08x}", step, random());
}

/// Returns this machine's address as the engine reaches it.
std::string own_address(const HttpServer& server) {
  if (is_loopback(server.host)) {
    return "127.0.0.1";
  }
  std::string address = address_towards(server.host, server.port);
  FLATSHARD_CHECK(
      !address.empty(),
      comm,
      "no route to {}:{}",
      server.host,
      server.port);
  return address;
}

/// Posts to the engine. Status 200 with a false `success` is an error.
void post(
    const HttpServer& server,
    const std::string& route,
    const std::string& body,
    std::chrono::steady_clock::time_point deadline) {
  const std::string text = http_post(server, route, body, deadline);
  const Json answer = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  FLATSHARD_CHECK(
      !answer.is_object() || answer.value("success", Json()) != Json(false),
      comm,
      "http://{}:{}{}: the engine failed: {}",
      server.host,
      server.port,
      route,
      text);
}

/// Returns at least a millisecond: zero means "no limit" in torch.
std::chrono::milliseconds until(
    std::chrono::steady_clock::time_point deadline) {
  return std::max(
      std::chrono::milliseconds(1),
      std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now()));
}

}  // namespace

void SglangEngine::begin(
    std::int64_t step,
    std::chrono::steady_clock::time_point deadline) {
  step_ = step;
  deadline_ = deadline;
  group_name_ = new_group_name(step);
  is_paused_ = true;
  try {
    // Requests that wait are computed again, with the new weights.
    call("/pause_generation", Json{{"mode", "retract"}}.dump());
  } catch (const Error& error) {
    // Without an answer in time it may be paused.
    is_paused_ = error.code() == ErrorCode::timeout;
    throw;
  }
  const std::string address = own_address(options_.server);
  const ServedStore served = serve_store(address, until(deadline_));
  store_ = served.store;
  const int size = 1 + options_.num_ranks;
  const Json init{
      {"master_address", address},
      {"master_port", served.port},
      {"rank_offset", 1},
      {"world_size", size},
      {"group_name", group_name_},
      {"backend", device_.is_cuda() ? "nccl" : "gloo"}};
  group_ = make_torch_group(
      store_,
      {.size = size,
       .name = group_name_,
       .device = device_,
       .deadline = deadline_});
  has_group_ = true;
  call_during("/init_weights_update_group", init.dump(), [&] {
    group_->join();
  });
}

void SglangEngine::send(
    const std::vector<SentTensor>& tensors,
    const at::Tensor& bytes,
    bool last) {
  Json update{
      {"group_name", group_name_},
      {"load_format", "flattened_bucket"},
      {"flush_cache", last},
      {"names", Json::array()},
      {"dtypes", Json::array()},
      {"shapes", Json::array()}};
  for (const SentTensor& tensor : tensors) {
    update["names"].push_back(tensor.name);
    update["dtypes"].push_back(c10::getDtypeNames(tensor.dtype).first);
    update["shapes"].push_back(tensor.shape);
  }
  if (last) {
    update["weight_version"] = std::to_string(step_);
  }
  has_some_weights_ = true;
  call_during("/update_weights_from_distributed", update.dump(), [&] {
    group_->broadcast(bytes);
  });
  has_some_weights_ = !last;
}

void SglangEngine::finish() {
  end_group(deadline_);
  call("/continue_generation", "{}");
  is_paused_ = false;
  give_up();
}

void SglangEngine::give_up() noexcept {
  const auto limit = [] {
    return std::chrono::steady_clock::now() + kGiveUpTimeout;
  };
  group_.reset();  // first: the engine may wait for a broadcast
  store_.reset();
  try {
    if (has_group_) {
      end_group(limit());
    }
  } catch (const std::exception&) {
    // The engine is away, or had not joined the group.
    has_group_ = false;
  }
  try {
    if (std::exchange(is_paused_, false) && !has_some_weights_) {
      post(options_.server, "/continue_generation", "{}", limit());
    }
  } catch (const std::exception& error) {
    log_warning("the engine may stay paused: {}", error.what());
  }
}

void SglangEngine::end_group(std::chrono::steady_clock::time_point deadline) {
  post(
      options_.server,
      "/destroy_weights_update_group",
      Json{{"group_name", group_name_}}.dump(),
      deadline);
  has_group_ = false;
}

void SglangEngine::call(const std::string& route, const std::string& body)
    const {
  post(options_.server, route, body, deadline_);
}

void SglangEngine::call_during(
    const std::string& route,
    const std::string& body,
    const std::function<void()>& work) {
  auto answered = std::async(std::launch::async, [&] {
    try {
      call(route, body);
    } catch (...) {
      group_->abort();  // or `work` would wait for an engine that is gone
      throw;
    }
  });
  std::exception_ptr failure;
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  answered.get();  // its error names the reason of the other
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace flatshard
