#include <gloo/context.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/comm/network.h"

namespace flatshard::detail {
namespace {

using c10d::ProcessGroupGloo;
using GlooDevice = std::shared_ptr<::gloo::transport::Device>;

// Returns Gloo's listening address. It is loopback for ranks with a store on
// this machine, since a container's hostname often does not resolve. Otherwise
// it is this machine's address on the route to the store. An empty text lets
// torch choose, from the hostname.
std::string own_address(const StoreHandle& store) {
  const c10d::Store* plain = store.get();
  StoreHandle owner;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    owner = prefixed->getUnderlyingNonPrefixStore();
    plain = owner.get();
  }
  if (dynamic_cast<const c10d::HashStore*>(plain) != nullptr) {
    return "127.0.0.1";
  }
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(plain);
  if (tcp == nullptr) {
    return {};
  }
  return is_loopback(tcp->getHost())
             ? "127.0.0.1"
             : address_towards(tcp->getHost(), tcp->getPort());
}

// A thread that starts while this exists does not preempt others when it wakes.
// Gloo's event loop tries to lock a connection again and again. With more ranks
// than cores, the thread with the lock has often been preempted by the loop
// that its own message woke. Loops then need more time than all else.
class CalmThreads {
 public:
  CalmThreads() : is_plain_(::sched_getscheduler(0) == SCHED_OTHER) {
    set(SCHED_BATCH);
  }
  CalmThreads(const CalmThreads&) = delete;
  CalmThreads& operator=(const CalmThreads&) = delete;
  ~CalmThreads() { set(SCHED_OTHER); }

 private:
  void set(int policy) const {
    const sched_param none{};
    if (is_plain_) {
      ::sched_setscheduler(0, policy, &none);
    }
  }

  bool is_plain_;  // else the user has chosen something
};

// One network device, with its event thread, serves all groups of the process
// that use the same interface.
GlooDevice shared_device(const std::string& address) {
  static std::mutex mutex;
  // Never freed: groups in static objects may still use it at exit.
  static auto& devices = *new std::map<std::string, GlooDevice>;
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  const std::string key = interface != nullptr ? interface : address;
  const std::lock_guard lock(mutex);
  GlooDevice& device = devices[key];
  if (!device) {
    const CalmThreads calm;
    device = interface != nullptr
                 ? ProcessGroupGloo::createDeviceForInterface(interface)
             : address.empty()
                 ? ProcessGroupGloo::createDefaultDevice()
                 : ProcessGroupGloo::createDeviceForHostname(address);
  }
  return device;
}

// ProcessGroupGloo keeps its connections from the public.
struct Contexts : ProcessGroupGloo {
  static auto member() { return &Contexts::contexts_; }
};

}  // namespace

BackendHandle connect_gloo_backend(
    StoreHandle store,
    int rank,
    int size,
    const CommunicatorOptions& options) {
  ignore_broken_pipes();
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices = {shared_device(own_address(store))};
  gloo->threads = 1;  // each collective is waited for before the next starts
  return c10::make_intrusive<ProcessGroupGloo>(store, rank, size, gloo);
}

BackendHandle make_gloo_backend(
    StoreHandle store,
    int rank,
    int size,
    const CommunicatorOptions& options) {
  BackendHandle backend =
      connect_gloo_backend(std::move(store), rank, size, options);
  // A rank is connected before its peers are: it must not leave until then, or
  // they fail, or wait for the timeout of the connect.
  c10::intrusive_ptr<c10d::Work> connected;
  {
    const std::lock_guard lock(gloo_launch_mutex());
    connected = backend->barrier();
  }
  connected->wait();
  return backend;
}

std::mutex& gloo_launch_mutex() {
  static std::mutex mutex;
  return mutex;
}

// torch's abort does nothing for Gloo. A signal on every connection wakes the
// threads that wait there; closing them would not.
void abort_gloo_backend(c10d::Backend& backend) {
  auto* group = dynamic_cast<ProcessGroupGloo*>(&backend);
  if (group == nullptr) {
    backend.abort();
    return;
  }
  for (const auto& context : group->*Contexts::member()) {
    for (int rank = 0; rank < group->getSize(); ++rank) {
      const auto& pair = context->getPair(rank);
      if (auto* tcp = dynamic_cast<::gloo::transport::tcp::Pair*>(pair.get())) {
        tcp->signalExceptionExternal("aborted by the flight recorder");
      }
    }
  }
}

}  // namespace flatshard::detail
