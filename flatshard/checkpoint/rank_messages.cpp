#include "flatshard/checkpoint/rank_messages.h"

#include <thread>

#include "flatshard/core/error.h"

namespace flatshard {

RankMessages::RankMessages(std::shared_ptr<Mesh> mesh, const std::string& name)
    : mesh_(std::move(mesh)) {
  StoreHandle store = mesh_->store();
  if (!store) {  // there is one rank
    store = make_local_store();
  }
  store_ = make_prefix_store("checkpoint/" + name, std::move(store));
}

int RankMessages::rank() const {
  return mesh_->rank();
}

int RankMessages::world() const {
  return mesh_->size();
}

void RankMessages::send(const std::string& key, const std::string& text) {
  store_->set(key, text);
}

std::string RankMessages::receive(
    const std::string& key,
    const std::string& what,
    std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kPause(10);
  const auto end = Clock::now() + timeout;
  while (!store_->check({key})) {
    mesh_->check();
    FLATSHARD_CHECK(
        Clock::now() < end,
        timeout,
        "waited {:.0f} s for {}",
        std::chrono::duration<double>(timeout).count(),
        what);
    std::this_thread::sleep_for(kPause);
  }
  return store_->get_to_str(key);
}

void RankMessages::forget(const std::string& key) {
  store_->deleteKey(key);
}

}  // namespace flatshard
