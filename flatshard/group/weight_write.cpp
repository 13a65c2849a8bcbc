#include "flatshard/group/weight_write.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

namespace flatshard {

WeightWrite::WeightWrite(std::vector<ParamGroup*> groups, Stream& stream)
    : open_(std::move(groups)), stream_(stream) {
  for (ParamGroup* group : open_) {
    group->weights().readers().wait();
    group->weights().adopt_foreign_writes();
  }
  if (open_.empty()) {
    return;
  }
  const auto current = current_stream(open_.front()->mesh()->device());
  if (current.get() != &stream_) {
    Event before;
    before.record(*current);
    before.wait(stream_);
  }
}

WeightWrite::~WeightWrite() {
  for (ParamGroup* group : open_) {
    try {
      group->weights().end_write(stream_, WeightPlanes::Written::main);
    } catch (const std::exception& error) {
      log_error("while a write of weights was given up: {}", error.what());
    }
  }
}

void WeightWrite::end(ParamGroup& group, Cast cast) {
  const auto found = std::find(open_.begin(), open_.end(), &group);
  FLATSHARD_CHECK(
      found != open_.end(),
      internal,
      "{} was not being written, or its write has ended",
      group.name());
  open_.erase(found);
  group.weights().end_write(
      stream_,
      cast == Cast::here ? WeightPlanes::Written::main_to_cast
                         : WeightPlanes::Written::all);
}

}  // namespace flatshard
