#pragma once

#include "flatshard/launch/loopback_listener.h"

#include <string>
#include <vector>

namespace flatshard {

/// Names of the variables with descriptors that ranks inherit: see
/// claim_failure_report and claim_output_notice.
inline constexpr const char* kReportVariable = "FLATSHARD_REPORT_FD";
inline constexpr const char* kNoticeVariable = "FLATSHARD_NOTICE_FD";

/// Returns the environment of a rank that this process starts: its own, with
/// torchrun's variables and the two above, "NAME=value" each.
std::vector<std::string> rank_variables(
    int rank,
    int nproc,
    const LoopbackListener& listener,
    int report_fd,
    int notice_fd);

}  // namespace flatshard
