#include "flatshard/group/weight_readers.h"

#include <utility>

namespace flatshard {

void WeightReaders::wait() {
  wait_for_uploads();
  const PeerBuffer* const copied = std::exchange(copied_, nullptr);
  if (copied != nullptr) {
    current_stream(copied->local().local().device())->submit([copied] {
      copied->fence_writes();
    });
  }
}

}  // namespace flatshard
