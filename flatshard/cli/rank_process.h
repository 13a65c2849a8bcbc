#pragma once

namespace flatshard {

/// Settings of torch, NCCL and CUDA in a process that is a rank, where the
/// environment has none. Before the first call into CUDA.
void prepare_rank_process();

}  // namespace flatshard
