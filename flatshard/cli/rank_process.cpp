#include "flatshard/cli/rank_process.h"

#include "flatshard/core/log.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <cstdlib>

namespace flatshard {
namespace {

/// torch::Warning as a line of the log.
class LoggedWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    log_warning("torch: {}", warning.msg());
  }
};

/// c10d writes a dozen lines of C++ frames whenever the process that serves its
/// store ends. By then the errors of ranks have named that process. Warnings
/// that torch means for its users stay. Set TORCH_CPP_LOG_LEVEL to see all of
/// them.
void quiet_torch() {
  static LoggedWarnings warnings;
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
    setenv("TORCH_CPP_LOG_LEVEL", "ERROR", 0);
    c10::WarningUtils::set_warning_handler(&warnings);
  }
  c10::initLogging();
}

}  // namespace

void prepare_rank_process() {
  // Errors of NCCL are thrown here: torch's own watchdog and monitor would end
  // the process.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", 0);
  setenv("TORCH_NCCL_ENABLE_MONITORING", "0", 0);
  // Its watchdog would write to the store, and the store may be what hangs.
  setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", 0);
  // Launch queues of CUDA, read at its start. The default is shorter than a
  // training step, so the host would wait for the GPU in the middle of it.
  setenv("CUDA_SCALE_LAUNCH_QUEUES", "4x", 0);
  quiet_torch();
}

}  // namespace flatshard
