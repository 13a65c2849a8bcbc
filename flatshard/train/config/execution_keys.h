#pragma once

#include "flatshard/models/activation_checkpoint.h"
#include "flatshard/train/config/key.h"

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard::config {

template <>
inline constexpr Word<models::ActivationCheckpoint>
    kWords<models::ActivationCheckpoint>[] = {
        {"none", models::ActivationCheckpoint::none},
        {"selective", models::ActivationCheckpoint::selective},
        {"full", models::ActivationCheckpoint::full}};

struct ActivationCheckpoint {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/activation_checkpoint.def"

  bool saves_attention() const {
    return !save.empty();
  }
};

enum class CudaGraphImpl { none, unit, full_iteration };
template <>
inline constexpr Word<CudaGraphImpl> kWords<CudaGraphImpl>[] = {
    {"none", CudaGraphImpl::none},
    {"unit", CudaGraphImpl::unit},
    {"full_iteration", CudaGraphImpl::full_iteration}};

enum class OnGraphMiss { eager, error };
template <>
inline constexpr Word<OnGraphMiss> kWords<OnGraphMiss>[] = {
    {"eager", OnGraphMiss::eager},
    {"error", OnGraphMiss::error}};

struct CudaGraph {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/cuda_graph.def"

  bool enabled() const {
    return impl != CudaGraphImpl::none;
  }
  bool whole_step() const {
    return impl == CudaGraphImpl::full_iteration;
  }
};

/// Also used by keys of other sections.
extern const UsedIf kHasGraphs;

/// [activation_checkpoint] and [cuda_graph].
KeyTable execution_keys();

}  // namespace flatshard::config
