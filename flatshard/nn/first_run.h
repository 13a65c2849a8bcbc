#pragma once

namespace flatshard::nn {

/// While one exists, this thread is in the first run of a part that is run
/// again in its backward: see in_checkpointed_forward.
class FirstRun {
 public:
  FirstRun();
  ~FirstRun();
  FirstRun(const FirstRun&) = delete;
  FirstRun& operator=(const FirstRun&) = delete;
};

}  // namespace flatshard::nn
