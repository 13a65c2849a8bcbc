#pragma once

namespace flatshard {

/// Sets defaults of torch, NCCL and CUDA for a process that is a rank, unless
/// the environment sets them. Call it before the first call into CUDA.
void prepare_rank_process();

}  // namespace flatshard
