#include "flatshard/comm/communicator.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
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
    : rank_(rank), size_(size), name_(std::move(name)), device_(device) {
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
  const std::int64_t seq = num_launched_++;
  IssuedCollective mine{
      .rank = rank_,
      .signature = {.kind = kind, .detail = detail}};
  CollectiveSignature& signature = mine.signature;
  for (const at::Tensor& tensor : tensors) {
    signature.numel += tensor.numel();
  }
  if (!tensors.empty()) {
    signature.dtype = tensors.front().scalar_type();
  }
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

void Communicator::check_tensor(
    CollectiveKind kind,
    const char* role,
    const at::Tensor& t) const {
  const auto where = [&] {
    return fmt::format("{} on '{}', {}", to_string(kind), name_, role);
  };
  FLATSHARD_CHECK(
      t.defined(),
      usage,
      "{}: expected a tensor, got an undefined one",
      where());
  FLATSHARD_CHECK(
      t.device() == device_,
      usage,
      "{}: expected device {}, got {}",
      where(),
      device_.str(),
      t.device().str());
  FLATSHARD_CHECK(
      t.is_contiguous(),
      usage,
      "{}: expected a contiguous tensor, got one with other strides",
      where());
}

void Communicator::check_pairs(
    CollectiveKind kind,
    std::span<const at::Tensor> large,
    std::span<const at::Tensor> small) const {
  const bool gather = kind == CollectiveKind::all_gather;
  const char* const large_role = gather ? "out" : "in";
  const char* const small_role = gather ? "in" : "out";
  FLATSHARD_CHECK(
      large.size() == small.size(),
      usage,
      "{} on '{}': expected as many inputs as outputs, got {} {} and {} {}",
      to_string(kind),
      name_,
      large.size(),
      large_role,
      small.size(),
      small_role);
  for (std::size_t i = 0; i < large.size(); ++i) {
    const at::Tensor& l = large[i];
    const at::Tensor& s = small[i];
    check_tensor(kind, large_role, l);
    check_tensor(kind, small_role, s);
    FLATSHARD_CHECK(
        l.scalar_type() == s.scalar_type(),
        usage,
        "{} on '{}': expected one dtype, got {} ({}) and {} ({})",
        to_string(kind),
        name_,
        c10::toString(l.scalar_type()),
        large_role,
        c10::toString(s.scalar_type()),
        small_role);
    FLATSHARD_CHECK(
        l.numel() == s.numel() * size_,
        usage,
        "{} on '{}' with {} ranks: expected {} = {} * {} elements in {}, got "
        "{}",
        to_string(kind),
        name_,
        size_,
        s.numel() * size_,
        size_,
        s.numel(),
        large_role,
        l.numel());
    if (!overlap(l, s)) {
      continue;
    }
    const auto own = begin_of(l) + rank_ * s.nbytes();
    FLATSHARD_CHECK(
        gather ? begin_of(s) == own : size_ == 1 && begin_of(s) == own,
        usage,
        "{} on '{}': {}",
        to_string(kind),
        name_,
        gather ? "in may alias out only at this rank's own slice"
               : "out must not overlap in");
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
