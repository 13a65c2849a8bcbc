#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/models/llama.h"
#include "flatshard/nn/documents.h"

namespace flatshard::models {

/// Computes the loss of each token, without a backward. Logits of at most 1024
/// tokens exist at a time.
///
/// @param tokens     int64 [batch, seq]
/// @param targets    int64 [batch, seq]; those below 0 are ignored
/// @param documents  of the tokens; undefined: each row is one
/// @return           float32 [batch, seq] in nats, 0 where it is ignored
at::Tensor token_losses(
    Llama& model,
    const at::Tensor& tokens,
    const at::Tensor& targets,
    const nn::Documents& documents = {});

}  // namespace flatshard::models
