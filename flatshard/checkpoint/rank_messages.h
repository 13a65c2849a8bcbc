#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "flatshard/mesh/mesh.h"

namespace flatshard {

/// Texts between the ranks of a mesh, through its store: for threads that have
/// no part in the order of collectives.
class RankMessages {
 public:
  /// @param name  of these messages, equal on all ranks and used once.
  /// @throws Error{usage} when the mesh has several ranks and no store.
  RankMessages(std::shared_ptr<Mesh> mesh, const std::string& name);

  int rank() const;
  int world() const;

  void send(const std::string& key, const std::string& text);
  /// Waits until somebody has sent it. Asks the store now and then and never
  /// blocks in it, so that others may use it meanwhile.
  /// @throws Error{timeout} naming `what`; what the mesh's watcher found.
  std::string receive(
      const std::string& key,
      const std::string& what,
      std::chrono::milliseconds timeout);
  /// Drops a message that no rank will request again.
  void forget(const std::string& key);

 private:
  std::shared_ptr<Mesh> mesh_;
  StoreHandle store_;
};

}  // namespace flatshard
