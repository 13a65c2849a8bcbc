#pragma once

#include <functional>

#include "flatshard/comm/make_communicator.h"

namespace flatshard::detail {

using BackendHandle = c10::intrusive_ptr<c10d::Backend>;

BackendHandle make_gloo_backend(
    StoreHandle store,
    int rank,
    int size,
    const CommunicatorOptions& options);
std::shared_ptr<Communicator> make_gloo_communicator(
    BackendHandle backend,
    const std::string& name);

// cuda_nccl.cpp or no_cuda.cpp, chosen at link time.
std::shared_ptr<Communicator> make_nccl_communicator(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    const CommunicatorOptions& options);
std::shared_ptr<Communicator> wrap_nccl_backend(
    BackendHandle backend,
    const std::string& name,
    at::Device device);

/// Runs `function`; what torch or Gloo throws becomes Error{timeout} or
/// Error{comm} with `where` as its context.
void with_comm_errors(
    const std::string& where,
    const std::function<void()>& function);

/// The elements of a contiguous tensor as bytes: moving data needs no dtype.
at::Tensor as_bytes(const at::Tensor& tensor);

}  // namespace flatshard::detail
