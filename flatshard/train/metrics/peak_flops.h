#pragma once

#include <optional>
#include <string>

namespace flatshard {

/// Returns the peak of a GPU in FLOP/s for dense bfloat16 matmuls that sum in
/// float32, without sparsity. Unset for a GPU that is not in the table, and for
/// a part of one (MIG).
///
/// @param device_name  as the driver reports it: "NVIDIA H100 80GB HBM3".
/// Source: NVIDIA's data sheets of A100, H100, H200, H20, L40S and B200 (HGX),
/// and the architecture papers of Ada and Blackwell for GeForce.
std::optional<double> dense_bf16_flops(const std::string& device_name);

}  // namespace flatshard
