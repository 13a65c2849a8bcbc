#pragma once

#include "flatshard/moe/router_args.h"

namespace flatshard::nn::cpu {

// Routes tokens [begin, end); plain loops, no torch.
void router_forward(
    const RouterForward& args,
    std::int64_t begin,
    std::int64_t end);
void router_backward(
    const RouterBackward& args,
    std::int64_t begin,
    std::int64_t end);

}  // namespace flatshard::nn::cpu
