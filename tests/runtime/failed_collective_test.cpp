// A collective that fails on all ranks is an error of that step alone: after it
// every unit rests, no stream keeps the error, and the next steps are right.
#include "tests/runtime/twin.h"

#include "flatshard/core/error.h"

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

class FusedCommunicator : public Communicator {
 public:
  FusedCommunicator(
      std::shared_ptr<Communicator> inner,
      std::shared_ptr<Fuse> fuse)
      : Communicator(
            inner->rank(),
            inner->size(),
            inner->name(),
            inner->device()),
        inner_(std::move(inner)),
        fuse_(std::move(fuse)) {
    share_launch_order(*inner_);
  }

 protected:
  void do_all_gather(Tensors outs, Tensors ins) override {
    burn();
    all_gather_of(*inner_, std::move(outs), std::move(ins));
  }
  void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) override {
    burn();
    reduce_scatter_of(*inner_, std::move(outs), std::move(ins), op);
  }
  void do_all_reduce(at::Tensor inout, ReduceOp op) override {
    burn();
    all_reduce_of(*inner_, std::move(inout), op);
  }
  void do_broadcast(at::Tensor tensor, int root) override {
    broadcast_of(*inner_, std::move(tensor), root);
  }
  void do_all_to_all(at::Tensor out, at::Tensor in, Parts receives, Parts sends)
      override {
    all_to_all_of(
        *inner_,
        std::move(out),
        std::move(in),
        std::move(receives),
        std::move(sends));
  }
  void do_barrier() override { barrier_of(*inner_); }

 private:
  void burn() {
    ++fuse_->calls;
    if (fuse_->calls_left >= 0 && fuse_->calls_left-- == 0) {
      throw Error(ErrorCode::comm, "the fuse is blown");
    }
  }

  std::shared_ptr<Communicator> inner_;
  std::shared_ptr<Fuse> fuse_;
};

// Gathers and reductions run on threads of their own: each has its own fuse.
struct FusedMesh {
  explicit FusedMesh(const RankContext& context) {
    std::vector<MeshGroup> groups;
    for (const Purpose purpose : {Purpose::gather, Purpose::reduce}) {
      const std::string name = fmt::format("dp {}", to_string(purpose));
      groups.push_back(
          {.axes = {"dp"},
           .communicator = std::make_shared<FusedCommunicator>(
               context.gloo(name),
               fuse(purpose)),
           .purpose = purpose});
    }
    mesh = Mesh::from_groups(
        {{"dp", context.world}},
        context.rank,
        at::kCPU,
        groups);
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

// What fails then are the fences, of reductions between two pieces.
TEST(FailedCollective, LeavesNothingBehindAmongCopies) {
  expect_nothing_behind(/*copies=*/true);
}

}  // namespace
}  // namespace flatshard
