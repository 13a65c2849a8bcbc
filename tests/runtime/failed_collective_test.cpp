// A collective that fails on all ranks is an error of only that step. After it
// every unit is resharded, no stream keeps the error, and the next steps are
// right.
#include "tests/runtime/twin.h"

#include "flatshard/comm/forwarding_communicator.h"
#include "flatshard/core/error.h"
#include "tests/support/thread_groups.h"

#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::for_strategies;
using testing::forward_backward;
using testing::RankContext;
using testing::Twin;

/// Counts the collectives of a rank and fails one of them.
struct Fuse {
  int calls_left = -1;  ///< negative: none fails
  std::int64_t calls = 0;
};

class FusedCommunicator : public ForwardingCommunicator {
 public:
  FusedCommunicator(
      const std::shared_ptr<Communicator>& group,
      std::shared_ptr<Fuse> fuse)
      : ForwardingCommunicator(group, group->name()), fuse_(std::move(fuse)) {}

 protected:
  void do_all_gather(Tensors outs, Tensors ins) override {
    burn();
    ForwardingCommunicator::do_all_gather(std::move(outs), std::move(ins));
  }
  void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) override {
    burn();
    ForwardingCommunicator::do_reduce_scatter(
        std::move(outs),
        std::move(ins),
        op);
  }
  void do_all_reduce(at::Tensor inout, ReduceOp op) override {
    burn();
    ForwardingCommunicator::do_all_reduce(std::move(inout), op);
  }

 private:
  void burn() {
    ++fuse_->calls;
    if (fuse_->calls_left >= 0 && fuse_->calls_left-- == 0) {
      throw Error(ErrorCode::comm, "the fuse is blown");
    }
  }

  std::shared_ptr<Fuse> fuse_;
};

// All-gathers and reductions run on separate threads, each with its own fuse.
struct FusedMesh {
  explicit FusedMesh(RankContext context) {
    context.make_communicator = [this](auto&&... group) {
      const auto inner = testing::make_thread_communicator(group...);
      const bool gathers = inner->name().ends_with("gather");
      return std::make_shared<FusedCommunicator>(
          inner,
          fuse(gathers ? Purpose::gather : Purpose::reduce));
    };
    mesh = context.mesh();
  }

  std::shared_ptr<Fuse>& fuse(Purpose purpose) {
    return purpose == Purpose::gather ? gather : reduce;
  }

  std::shared_ptr<Fuse> gather = std::make_shared<Fuse>();
  std::shared_ptr<Fuse> reduce = std::make_shared<Fuse>();
  std::shared_ptr<Mesh> mesh;
};

void expect_nothing_behind(bool copies) {
  for_strategies([&](const RankContext& context, FullyShardOptions options) {
    if (context.world == 1 || !context.axes.empty()) {
      return;  // one rank communicates with nobody; one axis has the fuses
    }
    if (copies) {
      options.runtime.copy_engines = {
          .gathers = CopyEngines::Gathers::all,
          .reductions_nbytes = 1 << 14};
    }
    FusedMesh fused(context);
    Twin twin(context, {}, options, fused.mesh);
    twin.step(forward_backward);
    for (const Purpose purpose : {Purpose::gather, Purpose::reduce}) {
      Fuse& fuse = *fused.fuse(purpose);
      fuse.calls = 0;
      twin.step(forward_backward);
      const std::int64_t calls = fuse.calls;
      for (std::int64_t n = 0; n < calls; ++n) {
        SCOPED_TRACE(fmt::format("{} {} of {}", to_string(purpose), n, calls));
        fuse.calls_left = static_cast<int>(n);
        try {
          twin.run_sharded(forward_backward);
          twin.runtime->synchronize();
          ADD_FAILURE() << "nothing was thrown";
        } catch (const std::exception& error) {
          EXPECT_NE(
              std::string(error.what()).find("the fuse is blown"),
              std::string::npos)
              << error.what();
        }
        EXPECT_LT(fuse.calls_left, 0);
        if (n % 2 == 0) {
          twin.runtime->reset();
          twin.expect_rest();
        }
        twin.step(forward_backward);
      }
    }
    twin.step(forward_backward);
  });
}

TEST(FailedCollective, LeavesNothingBehind) {
  expect_nothing_behind(/*copies=*/false);
}

// The fences of reductions between two pieces fail then.
TEST(FailedCollective, LeavesNothingBehindAmongCopies) {
  expect_nothing_behind(/*copies=*/true);
}

}  // namespace
}  // namespace flatshard
