#include "flatshard/plan/streams.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <array>
#include <limits>

namespace flatshard::plan {
namespace {

constexpr int kNone = -1;

/// The operations of a stream, and the remaining time of the current one.
struct Queue {
  std::vector<int> operations;
  std::size_t next = 0;
  int running = kNone;
  double left = 0;  ///< seconds without contention
};

/// Returns whether one of two operations of a link is inside a host, for tensor
/// parallelism, and the other over the network.
bool are_apart(const Operation& a, const Operation& b) {
  return a.link == b.link && a.leaves_host != b.leaves_host &&
         (a.stream == Stream::tensor || b.stream == Stream::tensor);
}

}  // namespace

std::string_view to_string(Stream stream) {
  switch (stream) {
    case Stream::compute:
      return "compute";
    case Stream::gather:
      return "gather";
    case Stream::reduce:
      return "reduce";
    case Stream::outer:
      return "outer reduce";
    case Stream::exchange:
      return "exchange";
    case Stream::tensor:
      return "tensor par.";
    case Stream::upload:
      return "upload";
    case Stream::download:
      return "download";
    case Stream::optimizer:
      return "optimizer";
  }
  return "unknown";
}

std::vector<Span> run_streams(
    const std::vector<Operation>& operations,
    const Contention& contention) {
  std::array<Queue, kNumStreams> queues;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    queues[static_cast<std::size_t>(operations[i].stream)].operations.push_back(
        static_cast<int>(i));
  }
  std::vector<Span> spans(operations.size());
  std::vector<bool> over(operations.size());
  double now = 0;
  std::size_t num_over = 0;
  const auto may_begin = [&](int i) {
    return std::ranges::all_of(operations[i].waits, [&](int earlier) {
      return over[earlier];
    });
  };
  while (num_over < operations.size()) {
    // An operation without duration ends at once, and may unblock others.
    for (bool again = true; again;) {
      again = false;
      for (Queue& queue : queues) {
        if (queue.running != kNone || queue.next == queue.operations.size() ||
            !may_begin(queue.operations[queue.next])) {
          continue;
        }
        const int i = queue.operations[queue.next++];
        spans[i].begin = now;
        if (operations[i].seconds > 0) {
          queue.running = i;
          queue.left = operations[i].seconds;
        } else {
          spans[i].end = now;
          over[i] = true;
          ++num_over;
          again = true;
        }
      }
    }
    std::array<int, kNumLinks> users{};
    for (const Queue& queue : queues) {
      if (queue.running != kNone) {
        ++users[static_cast<std::size_t>(operations[queue.running].link)];
      }
    }
    const double compute_rate =
        1 /
        ((users[static_cast<std::size_t>(Link::collectives)] > 0
              ? contention.collectives
              : 1) *
         (users[static_cast<std::size_t>(Link::copies)] > 0 ? contention.copies
                                                            : 1));
    const bool computes =
        queues[static_cast<std::size_t>(Stream::compute)].running != kNone;
    const auto num_sharing = [&](const Operation& operation) {
      int count = users[static_cast<std::size_t>(operation.link)];
      for (const Queue& queue : queues) {
        count -= queue.running != kNone &&
                         are_apart(operation, operations[queue.running])
                     ? 1
                     : 0;
      }
      return count;
    };
    const auto rate = [&](const Queue& queue) {
      const Operation& operation = operations[queue.running];
      const double share = 1.0 / num_sharing(operation);
      if (operation.stream == Stream::compute) {
        return share * compute_rate;
      }
      return computes && operation.beside_compute > 0
                 ? share * operation.seconds / operation.beside_compute
                 : share;
    };
    double step = std::numeric_limits<double>::infinity();
    for (const Queue& queue : queues) {
      if (queue.running != kNone) {
        step = std::min(step, queue.left / rate(queue));
      }
    }
    if (num_over == operations.size()) {
      break;
    }
    FLATSHARD_CHECK(
        step < std::numeric_limits<double>::infinity(),
        internal,
        "{} of {} operations of a step wait for each other",
        operations.size() - num_over,
        operations.size());
    std::array<double, kNumStreams> rates{};
    for (std::size_t s = 0; s < queues.size(); ++s) {
      rates[s] = queues[s].running == kNone ? 0 : rate(queues[s]);
    }
    now += step;
    for (std::size_t s = 0; s < queues.size(); ++s) {
      Queue& queue = queues[s];
      if (queue.running == kNone) {
        continue;
      }
      const double total = operations[queue.running].seconds;
      queue.left -= step * rates[s];
      // Rounding must not leave a remainder that rounds to no time.
      if (queue.left <= 1e-12 * total) {
        spans[queue.running].end = now;
        over[queue.running] = true;
        ++num_over;
        queue.running = kNone;
      }
    }
  }
  return spans;
}

}  // namespace flatshard::plan
