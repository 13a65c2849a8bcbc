#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdlib>
#include <map>
#include <mutex>

#include "flatshard/comm/backend.h"

namespace flatshard::detail {
namespace {

using c10d::ProcessGroupGloo;
using GlooDevice = std::shared_ptr<::gloo::transport::Device>;

// Ranks that meet on this machine use loopback: a container's hostname often
// does not resolve.
bool meets_locally(const StoreHandle& store) {
  const c10d::Store* plain = store.get();
  StoreHandle owner;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    owner = prefixed->getUnderlyingNonPrefixStore();
    plain = owner.get();
  }
  if (dynamic_cast<const c10d::HashStore*>(plain) != nullptr) {
    return true;
  }
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(plain);
  return tcp != nullptr &&
         (tcp->getHost() == "localhost" || tcp->getHost() == "::1" ||
          tcp->getHost().starts_with("127."));
}

// One network device, with its event thread, serves all groups of the process
// that use the same interface.
GlooDevice shared_device(bool local) {
  static std::mutex mutex;
  // Never freed: groups in static objects may still use it at exit.
  static auto& devices = *new std::map<std::string, GlooDevice>;
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  const std::string key = interface != nullptr ? interface
      : local                                  ? "loopback"
                                               : "default";
  const std::lock_guard lock(mutex);
  GlooDevice& device = devices[key];
  if (!device) {
    device = interface != nullptr
                 ? ProcessGroupGloo::createDeviceForInterface(interface)
             : local ? ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                     : ProcessGroupGloo::createDefaultDevice();
  }
  return device;
}

}  // namespace

BackendHandle make_gloo_backend(
    StoreHandle store,
    int rank,
    int size,
    const CommunicatorOptions& options) {
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices = {shared_device(meets_locally(store))};
  gloo->threads = 1;  // each collective is waited for before the next starts
  return c10::make_intrusive<ProcessGroupGloo>(store, rank, size, gloo);
}

}  // namespace flatshard::detail
