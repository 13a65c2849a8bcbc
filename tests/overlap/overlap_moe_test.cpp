// Models with experts under the 1F1B schedule.
#include "tests/overlap/overlap_moe.h"
#include "flatshard/core/error.h"

#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <set>
#include <thread>

namespace flatshard::testing {
namespace {

MoeOverlapResult train_plainly(MoeOverlapCase options) {
  options.with_runner = false;
  return train_overlapped_moe(options);
}

TEST(OverlapMoe, EqualsPlainAccumulation) {
  const auto want = train_plainly({});
  for (const bool recompute : {false, true}) {
    SCOPED_TRACE(recompute);
    expect_same(
        train_overlapped_moe(
            {.options = {.delay_wgrad = true, .recompute = recompute}}),
        want);
  }
  const MoeOverlapCase zero2{
      .strategy = "zero2",
      .options = {.delay_wgrad = true}};
  expect_same(train_overlapped_moe(zero2), train_plainly(zero2));
}

TEST(OverlapMoe, SharedExpertsAreThoseOfTheModelsForward) {
  const MoeOverlapCase shared{
      .options = {
          .delay_wgrad = true,
          .recompute = true,
          .shared_experts = true}};
  expect_same(train_overlapped_moe(shared), train_plainly(shared));
}

// Notes the threads on which rows that stay here are put in order.
class NotedExchange : public nn::LocalExchange {
 public:
  std::unique_ptr<nn::RowTransfer> start(
      const nn::ExchangePlanPtr& plan,
      Direction direction,
      const nn::TransferInput& input) override {
    {
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    }
    return LocalExchange::start(plan, direction, input);
  }

  std::mutex mutex;
  std::set<std::thread::id> threads;
};

// On a GPU, memory of another stream waits for compute before it is used again,
// and memory of compute for the other stream. Otherwise, a step would keep the
// activations of many microbatches.
TEST(OverlapMoe, RowsThatStayAreAllocatedOnCompute) {
  const auto local = std::make_shared<NotedExchange>();
  std::thread::id compute;
  MoeOverlapCase alone{.edp = 1, .local = local, .steps = 1};
  alone.before_step = [&](MoeOverlapTrainer&, int) {
    compute = std::this_thread::get_id();
  };
  train_overlapped_moe(alone);
  EXPECT_EQ(local->threads, std::set{compute});
}

TEST(OverlapMoe, ABlockThatRecomputesItselfIsRefused) {
  models::Llama llama(
      models::ModelConfig{
          .dim = 32,
          .layers = 1,
          .heads = 4,
          .kv_heads = 2,
          .ffn_dim = 64,
          .vocab_size = 64,
          .max_seq_len = 16},
      models::LlamaOptions{
          .activation_checkpoint = models::ActivationCheckpoint::full});
  EXPECT_THROW(llama->blocks()[0]->nodes(), Error);
}

}  // namespace
}  // namespace flatshard::testing
