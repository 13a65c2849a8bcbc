#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <mutex>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/comm/torch_group.h"

namespace flatshard::detail {

using BackendHandle = c10::intrusive_ptr<c10d::Backend>;

/// Connects, without a collective.
BackendHandle connect_gloo_backend(
    StoreHandle store,
    int rank,
    int size,
    const CommunicatorOptions& options);
/// Connects, and waits until all ranks have done so.
BackendHandle make_gloo_backend(
    StoreHandle store,
    int rank,
    int size,
    const CommunicatorOptions& options);
/// Locked while a Gloo collective is launched, not while it is waited for.
/// There is one for the process, since different threads launch all-gathers and
/// reductions. c10d's own flight recorder keeps a map of all groups and inserts
/// into it without a lock (FlightRecorder::record, torch 2.11).
std::mutex& gloo_launch_mutex();
/// Collectives that wait in `backend` fail now, and later ones at once.
void abort_gloo_backend(c10d::Backend& backend);
std::shared_ptr<Communicator> make_gloo_communicator(
    BackendHandle backend,
    const std::string& name,
    const CommunicatorOptions& options);

// cuda_*.cpp or no_cuda_comm.cpp, chosen at link time.
std::shared_ptr<Communicator> make_nccl_communicator(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    const CommunicatorOptions& options);
std::shared_ptr<TorchGroup> make_nccl_torch_group(
    const StoreHandle& store,
    const TorchGroupOptions& options);
/// See sum_rows.h. @param scale  of the sum.
void cuda_sum_rows(
    const at::Tensor& out,
    const at::Tensor& rows,
    int rank,
    const at::Tensor& own,
    double scale);

/// Returns whether cuda_add_scaled supports these; see sum_rows.h.
bool cuda_adds(const at::Tensor& into, const at::Tensor& from);
void cuda_add_scaled(
    const at::Tensor& into,
    const at::Tensor& from,
    double scale,
    bool add);

/// Runs `function`; what torch or Gloo throws becomes Error{timeout} or
/// Error{comm} with `where` as its context.
void with_comm_errors(
    const std::string& where,
    const std::function<void()>& function);

/// Gloo and the store write to their peers' sockets: a dead peer has to be an
/// error there, not the SIGPIPE that ends this process too. A handler of the
/// program's own stays.
void ignore_broken_pipes();

/// Returns the elements of a contiguous tensor as bytes: moving data needs no
/// dtype.
at::Tensor as_bytes(const at::Tensor& tensor);

}  // namespace flatshard::detail
