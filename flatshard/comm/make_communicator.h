#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>

#include "flatshard/comm/communicator.h"
#include "flatshard/comm/store.h"

namespace flatshard {

/// A group of `size` ranks that meet in `store`: NCCL on a GPU, Gloo on the
/// CPU, no backend for one rank. Collective. NCCL's connections are made now,
/// not in the first step.
///
/// @param name names the group in messages and logs, and its keys in the
///   store; equal on all ranks, unique in the store.
/// @throws Error{timeout} when peers are missing, Error{comm} on other
///   failures, Error{config} for CUDA in a build without it.
std::shared_ptr<Communicator> make_communicator(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    CommunicatorOptions options = {});

/// Takes a group that exists already: a c10d backend called "gloo" or "nccl",
/// for instance from a Python process group. Makes no connection.
/// @throws Error{config} for other backends, naming them.
std::shared_ptr<Communicator> wrap_backend(
    c10::intrusive_ptr<c10d::Backend> backend,
    const std::string& name,
    at::Device device);

/// One rank: gathering, reducing and broadcasting copy; nothing is scaled.
std::shared_ptr<Communicator> make_self_communicator(
    const std::string& name,
    at::Device device);

}  // namespace flatshard
