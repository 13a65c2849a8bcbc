#include <nvtx3/nvToolsExt.h>

#include "flatshard/device/nvtx.h"

namespace flatshard {

NvtxRange::NvtxRange(const char* name) {
  nvtxRangePushA(name);
}

NvtxRange::~NvtxRange() {
  nvtxRangePop();
}

}  // namespace flatshard
