#include "flatshard/comm/communicator.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "flatshard/comm/collective_scope.h"
#include "flatshard/comm/tensor_memory.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

namespace flatshard {
namespace {

bool is_reducible(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

void check_reducible(
    CollectiveKind kind,
    const std::string& name,
    at::ScalarType dtype,
    ReduceOp op) {
  FLATSHARD_CHECK(
      is_reducible(dtype),
      usage,
      "{} on '{}': cannot reduce dtype {}; expected float32, float64, float16, "
      "bfloat16, uint8, int8, int32 or int64",
      to_string(kind),
      name,
      c10::toString(dtype));
  FLATSHARD_CHECK(
      op != ReduceOp::avg || c10::isFloatingType(dtype),
      usage,
      "{} on '{}': avg expects a floating dtype, got {}; use sum",
      to_string(kind),
      name,
      c10::toString(dtype));
  // A maximum of floats keeps or drops a NaN by its rank in some backends. The
  // bits of magnitudes (without a sign) order as these do, NaN last.
  FLATSHARD_CHECK(
      op != ReduceOp::max ||
          (dtype == at::kInt && kind == CollectiveKind::all_reduce),
      usage,
      "{} on '{}': max expects an all-reduce of int32, got {}",
      to_string(kind),
      name,
      c10::toString(dtype));
}

}  // namespace

Communicator::Communicator(
    int rank,
    int size,
    std::string name,
    at::Device device)
    : rank_(rank),
      size_(size),
      name_(std::move(name)),
      device_(device),
      order_(
          device.is_cpu() && size > 1 ? std::make_shared<LaunchOrder>()
                                      : nullptr) {
}

Communicator::~Communicator() = default;

void Communicator::set_observer(
    std::shared_ptr<CollectiveObserver> observer,
    const std::string& group) {
  observer_ = std::move(observer);
  track_ = observer_ ? observer_->watch(shared_from_this(), group) : -1;
}

std::string Communicator::where(CollectiveKind kind) const {
  return fmt::format(
      "rank {}/{} | {} | {}",
      rank_,
      size_,
      name_,
      to_string(kind));
}

void Communicator::compare(std::int64_t seq, const IssuedCollective& mine) {
  const auto issued = find_mismatch(mine);
  if (const auto text =
          find_difference(fmt::format("{} #{}", name_, seq), issued)) {
    throw(
        observer_ ? observer_->explain_difference(*text, *this, seq, issued)
                  : Error(ErrorCode::comm, *text))
        .with_context(where(mine.signature.kind));
  }
}

template <class F>
void Communicator::run(
    CollectiveKind kind,
    std::span<const at::Tensor> tensors,
    int detail,
    F&& launch) {
  CollectiveSignature signature{.kind = kind, .detail = detail};
  for (const at::Tensor& tensor : tensors) {
    signature.numel += tensor.numel();
  }
  if (!tensors.empty()) {
    signature.dtype = tensors.front().scalar_type();
  }
  run(std::move(signature), std::forward<F>(launch));
}

template <class F>
void Communicator::run(CollectiveSignature what, F&& launch) {
  const CollectiveKind kind = what.kind;
  std::optional<LaunchOrder::Turn> turn;
  if (order_ && !order_->is_mine()) {
    FLATSHARD_CHECK(
        !on_stream_thread(),
        internal,
        "{}: expected work that was queued with queue_collectives, got a "
        "stream's own",
        where(kind));
    turn.emplace(LaunchOrder::Orders{order_});
    turn->begin();
  }
  const std::int64_t seq = num_launched_++;
  IssuedCollective mine{.rank = rank_, .signature = std::move(what)};
  CollectiveSignature& signature = mine.signature;
  if (const CollectiveScope* scope = CollectiveScope::current()) {
    signature.unit = scope->unit();
    mine.step = scope->step();
  }
  if (log_) {
    log_->append(name_, kind, signature.numel, signature.dtype);
  }
  if (!observer_) {
    compare(seq, mine);
    launch();
    return;
  }
  try {
    const auto ticket = observer_->begin(track_, signature);
    mine.rank = observer_->rank();
    mine.step = ticket.step;
    compare(seq, mine);
    launch();
    if (device_.is_cuda()) {
      observer_->launched(ticket);
    } else {
      observer_->completed(ticket);
    }
    if (kind == CollectiveKind::barrier) {
      observer_->check();  // an aborted device does not wait for anybody
    }
  } catch (const Error& error) {
    const Error located =
        error.context().empty() ? error.with_context(where(kind)) : error;
    throw observer_->explain(located);
  }
}

void Communicator::all_gather(const at::Tensor& out, const at::Tensor& in) {
  all_gather(std::span(&out, 1), std::span(&in, 1));
}

void Communicator::all_gather(
    std::span<const at::Tensor> outs,
    std::span<const at::Tensor> ins) {
  check_pairs(CollectiveKind::all_gather, outs, ins);
  const at::NoGradGuard no_grad;
  Tensors some_outs;
  Tensors some_ins;
  for (std::size_t i = 0; i < ins.size(); ++i) {
    if (ins[i].numel() > 0) {
      some_outs.push_back(outs[i]);
      some_ins.push_back(ins[i]);
    }
  }
  if (!some_ins.empty()) {
    run(CollectiveKind::all_gather, some_outs, 0, [&] {
      do_all_gather(some_outs, std::move(some_ins));
    });
  }
}

void Communicator::reduce_scatter(
    const at::Tensor& out,
    const at::Tensor& in,
    ReduceOp op) {
  reduce_scatter(std::span(&out, 1), std::span(&in, 1), op);
}

void Communicator::reduce_scatter(
    std::span<const at::Tensor> outs,
    std::span<const at::Tensor> ins,
    ReduceOp op) {
  check_pairs(CollectiveKind::reduce_scatter, ins, outs);
  const at::NoGradGuard no_grad;
  Tensors some_outs;
  Tensors some_ins;
  for (std::size_t i = 0; i < ins.size(); ++i) {
    check_reducible(
        CollectiveKind::reduce_scatter,
        name_,
        ins[i].scalar_type(),
        op);
    if (ins[i].numel() > 0) {
      some_outs.push_back(outs[i]);
      some_ins.push_back(ins[i]);
    }
  }
  if (!some_ins.empty()) {
    run(CollectiveKind::reduce_scatter, some_ins, static_cast<int>(op), [&] {
      do_reduce_scatter(std::move(some_outs), some_ins, op);
    });
  }
}

void Communicator::all_reduce(const at::Tensor& inout, ReduceOp op) {
  check_tensor(CollectiveKind::all_reduce, "inout", inout);
  check_reducible(CollectiveKind::all_reduce, name_, inout.scalar_type(), op);
  if (inout.numel() == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  run(CollectiveKind::all_reduce,
      std::span(&inout, 1),
      static_cast<int>(op),
      [&] { do_all_reduce(inout, op); });
}

void Communicator::broadcast(const at::Tensor& tensor, int root) {
  check_tensor(CollectiveKind::broadcast, "tensor", tensor);
  FLATSHARD_CHECK(
      root >= 0 && root < size_,
      usage,
      "broadcast on '{}': expected a root below {}, got {}",
      name_,
      size_,
      root);
  if (tensor.numel() == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  run(CollectiveKind::broadcast, std::span(&tensor, 1), root, [&] {
    do_broadcast(tensor, root);
  });
}

void Communicator::all_to_all(
    const at::Tensor& out,
    const at::Tensor& in,
    std::span<const RowsOfPeer> receives,
    std::span<const RowsOfPeer> sends) {
  constexpr auto kKind = CollectiveKind::all_to_all;
  check_tensor(kKind, "out", out);
  check_tensor(kKind, "in", in);
  FLATSHARD_CHECK(
      out.scalar_type() == in.scalar_type() && out.dim() > 0 && in.dim() > 0 &&
          out.sizes().slice(1) == in.sizes().slice(1),
      usage,
      "all_to_all on '{}': expected rows alike, got {} {} (out) and {} {} (in)",
      name_,
      c10::toString(out.scalar_type()),
      fmt::format("[{}]", fmt::join(out.sizes(), ", ")),
      c10::toString(in.scalar_type()),
      fmt::format("[{}]", fmt::join(in.sizes(), ", ")));
  FLATSHARD_CHECK(
      !overlap(out, in),
      usage,
      "all_to_all on '{}': out must not overlap in",
      name_);
  Parts to = check_parts("sends", in, sends);
  Parts from = check_parts("receives", out, receives);
  const at::NoGradGuard no_grad;
  run({.kind = kKind,
       .numel = c10::multiply_integers(in.sizes().slice(1)),
       .dtype = in.scalar_type()},
      [&] { do_all_to_all(out, in, std::move(from), std::move(to)); });
}

void Communicator::barrier() {
  run(CollectiveKind::barrier, {}, 0, [&] { do_barrier(); });
}

void Communicator::fence() {
  run(CollectiveKind::fence, {}, 0, [&] { do_fence(); });
}

void Communicator::do_fence() {
  if (!fence_flag_.defined()) {
    fence_flag_ = at::zeros({1}, at::TensorOptions().device(device_));
  }
  do_all_reduce(fence_flag_, ReduceOp::sum);
}

void abort_together(
    const std::vector<std::shared_ptr<Communicator>>& communicators) {
  std::vector<std::thread> threads;
  for (const auto& communicator : communicators) {
    threads.emplace_back([&communicator] {
      try {
        communicator->abort();
      } catch (const std::exception& error) {
        log_error(
            "communicator '{}' could not be aborted: {}",
            communicator->name(),
            error.what());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace flatshard
