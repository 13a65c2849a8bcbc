// Reading a resharded parameter with DebugOptions::poison ends the process and
// names the parameter. Ranks are processes here, since they die.
#include "tests/runtime/twin.h"
#include "tests/support/temp_folder.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <string>

namespace flatshard {
namespace {

using ::testing::AllOf;
using testing::forward_backward;
using ::testing::HasSubstr;
using testing::rank_process_outcomes;
using testing::RankContext;
using testing::Twin;

// Runs two ranks; rank 1 does `crime` after one step. Returns how rank 1
// ended, and what it wrote to standard error.
std::pair<testing::RankOutcome, std::string> ends_with(
    const std::function<void(Twin&)>& crime,
    const std::function<void()>& before = {}) {
  const TempFolder folder;
  const auto file = folder / "stderr";
  const auto outcomes = rank_process_outcomes(2, [&](RankContext& context) {
    if (before) {
      before();
    }
    FullyShardOptions options{.strategy = "zero3"};
    options.runtime.debug.poison = true;
    Twin twin(context, {}, options);
    twin.runtime->set_step(41);
    twin.step(forward_backward);
    twin.runtime->set_step(42);
    if (context.rank == 1) {
      const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT, 0600);
      ::dup2(fd, STDERR_FILENO);
      crime(twin);
    }
  });
  EXPECT_EQ(outcomes[0], testing::RankOutcome{});
  std::ifstream in(file);
  return {outcomes[1], {std::istreambuf_iterator<char>(in), {}}};
}

// Reads the first element as a bug would.
float peek(const at::Tensor& parameter) {
  return *static_cast<volatile float*>(parameter.data_ptr());
}

TEST(PoisonedParameter, ReadingItNamesIt) {
  const auto [outcome, text] = ends_with([](Twin& twin) {
    ::_exit(static_cast<int>(peek(twin.sharded->cells[2]->up->weight())));
  });
  EXPECT_EQ(outcome.signal, SIGSEGV);
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("[rank 1/2]"),
          HasSubstr("parameter cell2.up.weight was read or written while unit "
                    "cell2 is resharded"),
          HasSubstr("(step 42)")));
}

TEST(PoisonedParameter, AKernelThatReadsItNamesIt) {
  const auto [outcome, text] = ends_with([](Twin& twin) {
    const at::NoGradGuard no_grad;
    ::_exit(twin.sharded->cells[0]->up->bias().sum().item<float>() > 0);
  });
  EXPECT_EQ(outcome.signal, SIGSEGV);
  EXPECT_THAT(text, HasSubstr("parameter cell0.up.bias"));
}

TEST(PoisonedParameter, WritingItNamesIt) {
  const auto [outcome, text] = ends_with([](Twin& twin) {
    const at::NoGradGuard no_grad;
    twin.sharded->scale.zero_();
  });
  EXPECT_EQ(outcome.signal, SIGSEGV);
  EXPECT_THAT(text, HasSubstr("parameter scale"));
}

TEST(PoisonedParameter, AlsoAfterTheRuntimeIsGone) {
  const auto [outcome, text] = ends_with([](Twin& twin) {
    twin.sgd.reset();
    twin.runtime.reset();
    ::_exit(static_cast<int>(peek(twin.sharded->cells[1]->gain)));
  });
  EXPECT_EQ(outcome.signal, SIGSEGV);
  EXPECT_THAT(text, HasSubstr("parameter cell1.gain"));
}

void earlier_handler(int) {
  constexpr char kText[] = "the earlier handler ran\n";
  [[maybe_unused]] const auto n = ::write(STDERR_FILENO, kText, sizeof(kText));
  ::_exit(77);
}

TEST(PoisonedParameter, TheHandlerThatWasThereRunsNext) {
  const auto [outcome, text] = ends_with(
      [](Twin& twin) {
        ::_exit(static_cast<int>(peek(twin.sharded->cells[3]->gain)));
      },
      [] { ::signal(SIGSEGV, earlier_handler); });
  EXPECT_EQ(outcome.exit_code, 77);
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("parameter cell3.gain"),
          HasSubstr("the earlier handler ran")));
}

TEST(PoisonedParameter, OtherFaultsAreNotOurs) {
  const auto [outcome, text] = ends_with([](Twin&) {
    volatile int* nothing = nullptr;
    ::_exit(*nothing);
  });
  EXPECT_EQ(outcome.signal, SIGSEGV);
  EXPECT_EQ(text, "");
}

TEST(PoisonedParameter, ASentSignalStillEndsTheProcess) {
  const auto [outcome, text] = ends_with([](Twin&) {
    ::raise(SIGSEGV);
    ::_exit(3);
  });
  EXPECT_EQ(outcome.signal, SIGSEGV);
}

}  // namespace
}  // namespace flatshard
