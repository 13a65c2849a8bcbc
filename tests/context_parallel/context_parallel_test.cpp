// Heads of attention that ranks exchange, against attention on one rank.
#include "flatshard/nn/parallel/context_parallel.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flatshard/context_parallel/collective_context_parallel.h"
#include "flatshard/context_parallel/peer_context_parallel.h"
#include "flatshard/core/error.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/documents.h"
#include "tests/support/ranks.h"
#include "tests/support/sum_order.h"

namespace flatshard {
namespace {

using testing::RankContext;
using testing::run_ranks;

constexpr std::int64_t kHeadDim = 8;

// Collectives and copies, both with late streams.
std::vector<nn::ContextParallelPtr> every_way(const RankContext& context) {
  const auto delays = [&](unsigned seed) {
    return StreamOptions{
        .delay_seed = 10U * seed + static_cast<unsigned>(context.rank),
        .max_delay_us = 300};
  };
  return {
      std::make_shared<CollectiveContextParallel>(
          context.gloo("collective"),
          delays(1)),
      std::make_shared<PeerContextParallel>(
          context.gloo("copies"),
          PeerContextParallelOptions{.stream = delays(2)})};
}

// Hosts of `size` ranks each. `copies` are inside a host.
nn::ContextParallelPtr ranks_of_hosts(
    const RankContext& context,
    int size,
    bool copies,
    unsigned seed = 1) {
  const StreamOptions delays{
      .delay_seed = 10U * seed + static_cast<unsigned>(context.rank),
      .max_delay_us = 300};
  const auto mesh = context.mesh(
      {{"cp_hosts", context.world / size}, {"cp", size}},
      (copies ? "copies" : "collective") + std::to_string(seed));
  const auto group = [&](int axis) {
    return mesh->communicator(axis, Purpose::exchange).shared_from_this();
  };
  const auto hosts =
      std::make_shared<CollectiveContextParallel>(group(0), delays);
  if (copies) {
    return std::make_shared<PeerContextParallel>(
        group(1),
        PeerContextParallelOptions{.stream = delays, .hosts = hosts});
  }
  return std::make_shared<CollectiveContextParallel>(group(1), delays, hosts);
}

// Runs `test` on each rank, for each way of its exchanges.
void on_ranks(
    int num_ranks,
    const std::function<void(const nn::ContextParallelPtr&)>& test) {
  run_ranks(num_ranks, [&](RankContext& context) {
    int way = 0;
    for (const nn::ContextParallelPtr& ranks : every_way(context)) {
      SCOPED_TRACE(way++ == 0 ? "collective" : "copies");
      test(ranks);
    }
  });
}

// The tokens of one rank of a tensor [batch, seq, ...] of all of them.
at::Tensor tokens_of(
    const nn::ContextParallelPtr& ranks,
    const at::Tensor& whole) {
  std::vector<std::int64_t> sizes = whole.sizes().vec();
  sizes[1] /= ranks->num_ranks();
  return nn::own_rows(ranks, whole.flatten(0, 1)).view(sizes);
}

// The heads of one rank, of a tensor [batch, seq, heads, head_dim] of all of
// them; a tensor with fewer heads than ranks has one head here.
at::Tensor heads_of(
    const nn::ContextParallelPtr& ranks,
    const at::Tensor& whole) {
  const std::int64_t heads = whole.size(2), n = ranks->size();
  return heads % n == 0 ? whole.narrow(2, ranks->rank() * heads / n, heads / n)
                        : whole.narrow(2, ranks->rank() * heads / n, 1);
}

at::Tensor random_of(
    at::IntArrayRef sizes,
    std::uint64_t seed,
    at::ScalarType dtype = at::kFloat) {
  return at::randn(
             sizes,
             at::make_generator<at::CPUGeneratorImpl>(seed),
             at::kDouble)
      .to(dtype);
}

class ExchangedHeads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExchangedHeads, ::testing::Values(2, 3, 4));

TEST_P(ExchangedHeads, ARankGetsAllTokensOfItsHeads) {
  on_ranks(GetParam(), [](const nn::ContextParallelPtr& ranks) {
    const std::int64_t n = ranks->size();
    for (const std::int64_t batch : {1, 2, 3}) {
      for (const std::int64_t kv_heads : {2 * n, n, std::int64_t{1}}) {
        const at::Tensor q = random_of({batch, 2 * n, 4 * n, kHeadDim}, 1);
        const at::Tensor k = random_of({batch, 2 * n, kv_heads, kHeadDim}, 2);
        const at::Tensor v = random_of({batch, 2 * n, kv_heads, kHeadDim}, 3);
        // The part of a fused projection.
        const at::Tensor strided =
            at::cat({tokens_of(ranks, q), tokens_of(ranks, q)}, 3)
                .narrow(3, 0, kHeadDim);
        std::vector<nn::HeadGroup> groups;
        nn::attend_shared_tokens(
            ranks,
            strided,
            tokens_of(ranks, k),
            tokens_of(ranks, v),
            [&](const nn::HeadGroup& heads) {
              groups.push_back(heads);
              EXPECT_TRUE(q.narrow(2, heads.part.begin, heads.part.size())
                              .equal(heads.q));
              return heads.q.flatten(2);
            });
        EXPECT_EQ(groups.size(), kv_heads == 2 * n ? 2U : 1U);
        at::Tensor all_k = groups[0].k, all_v = groups[0].v;
        if (groups.size() == 2) {
          all_k = at::cat({all_k, groups[1].k}, 2);
          all_v = at::cat({all_v, groups[1].v}, 2);
        }
        EXPECT_TRUE(all_k.equal(heads_of(ranks, k))) << batch;
        EXPECT_TRUE(all_v.equal(heads_of(ranks, v))) << batch;
      }
    }
  });
}

TEST_P(ExchangedHeads, TokensComeBackUnchanged) {
  on_ranks(GetParam(), [](const nn::ContextParallelPtr& ranks) {
    const std::int64_t n = ranks->size();
    for (const std::int64_t batch : {1, 3}) {
      for (const std::int64_t heads : {2 * n, n}) {
        at::Tensor x =
            tokens_of(ranks, random_of({batch, 3 * n, heads, kHeadDim}, 4));
        x = x.detach().requires_grad_();
        const at::Tensor back = nn::attend_shared_tokens(
            ranks,
            x,
            x.detach(),
            x.detach(),
            [](const nn::HeadGroup& own) { return own.q.flatten(2); });
        EXPECT_TRUE(back.equal(x.flatten(2))) << batch;
        const at::Tensor gradient = random_of(back.sizes(), 5U + ranks->rank());
        torch::autograd::backward({back}, {gradient});
        EXPECT_TRUE(x.grad().equal(gradient.view(x.sizes()))) << batch;
      }
    }
  });
}

// The gradient of a rank's copy of the only kv head is the gradient of its q.
TEST_P(ExchangedHeads, GradientsOfSharedHeadsAreAddedInRankOrder) {
  on_ranks(GetParam(), [](const nn::ContextParallelPtr& ranks) {
    const std::int64_t n = ranks->size();
    at::Tensor k = random_of({1, 2, 1, kHeadDim}, 7, at::kBFloat16);
    k.requires_grad_();
    const at::Tensor q = at::zeros({1, 2, n, kHeadDim}, k.options());
    const at::Tensor out = nn::attend_shared_tokens(
        ranks,
        q,
        k,
        k.detach(),
        [](const nn::HeadGroup& own) { return own.k.flatten(2); });
    const at::Tensor gradient =
        random_of({1, 2, n, kHeadDim}, 6U + ranks->rank(), at::kBFloat16);
    torch::autograd::backward({out}, {gradient.flatten(2)});
    at::Tensor sum = gradient.select(2, 0).to(at::kFloat);
    for (std::int64_t r = 1; r < n; ++r) {
      sum.add_(gradient.select(2, r));
    }
    EXPECT_TRUE(k.grad().squeeze(2).equal(sum.to(at::kBFloat16)));
  });
}

TEST(ExchangedHeadsTogether, RefuseHeadsThatRanksDoNotDivide) {
  on_ranks(4, [](const nn::ContextParallelPtr& ranks) {
    const auto attend = [](const nn::HeadGroup& own) { return own.q; };
    const auto heads = [](std::int64_t n) {
      return at::zeros({1, 4, n, kHeadDim});
    };
    for (const auto& [q, kv] : {std::pair{6, 2}, std::pair{8, 3}}) {
      try {
        nn::attend_shared_tokens(ranks, heads(q), heads(kv), heads(kv), attend);
        FAIL() << "accepted";
      } catch (const Error& error) {
        EXPECT_THAT(
            error.what(),
            ::testing::HasSubstr(
                "expected a multiple of 4 heads, and a multiple or a divisor "
                "of kv heads, got " +
                std::to_string(q) + " and " + std::to_string(kv)));
      }
    }
  });
}

TEST(ExchangedHeadsTogether, NoRanksMeansNoExchange) {
  const at::Tensor x = at::zeros({1, 4, 6, kHeadDim});
  const auto attend = [&](const nn::HeadGroup& own) {
    EXPECT_TRUE(own.q.is_same(x) && own.k.is_same(x) && own.v.is_same(x));
    EXPECT_EQ(own.part.size(), 6);
    return own.q;
  };
  EXPECT_TRUE(nn::attend_shared_tokens(nullptr, x, x, x, attend).is_same(x));
  EXPECT_TRUE(nn::own_rows(nullptr, x).is_same(x));
}

// Blocks of these sizes; the strided ones have the rows of all ranks in turn.
nn::RankBlocks blocks_of(
    std::int64_t size,
    std::int64_t n,
    at::ScalarType dtype,
    bool strided_send,
    bool strided_receive) {
  const auto make = [&](bool strided) {
    const auto options = at::TensorOptions().dtype(dtype);
    return strided ? at::empty({n, size, 3}, options).transpose(0, 1)
                   : at::empty({size, n, 3}, options);
  };
  return {make(strided_send), make(strided_receive)};
}

// The windows of copies grow in some rounds, and their halves alternate.
TEST_P(ExchangedHeads, G15_ExchangesOverlapInOneOrder) {
  on_ranks(GetParam(), [](const nn::ContextParallelPtr& ranks) {
    const std::int64_t size = ranks->size();
    const auto value =
        [&](int round, int i, std::int64_t from, std::int64_t to) {
          return static_cast<double>(64 * round + 32 * i + 5 * from + to);
        };
    for (int round = 0; round < 16; ++round) {
      std::vector<nn::RankBlocks> exchanges[2];
      std::unique_ptr<nn::PendingExchange> pending[2];
      for (int i = 0; i < 2; ++i) {
        for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
          exchanges[i].push_back(blocks_of(
              size,
              1 + 5 * (round % 4) + i,
              dtype,
              round % 2 == 0,
              round % 3 == 0));
          for (std::int64_t to = 0; to < size; ++to) {
            exchanges[i].back().send.select(0, to).fill_(
                value(round, i, ranks->rank(), to));
          }
        }
        pending[i] = ranks->start(exchanges[i]);
      }
      for (const int i : {1, 0}) {
        pending[i]->finish();
        for (const nn::RankBlocks& b : exchanges[i]) {
          for (std::int64_t from = 0; from < size; ++from) {
            const at::Tensor got = b.receive.select(0, from);
            EXPECT_TRUE(got.equal(
                at::full_like(got, value(round, i, from, ranks->rank()))))
                << round << " " << i << " from " << from;
          }
        }
      }
      ranks->start(exchanges[0]);  // the result is not used
    }
    if (dynamic_cast<PeerContextParallel*>(ranks.get()) != nullptr) {
      EXPECT_GT(ranks->nbytes(), 0);
    }
  });
}

// Lists the starts and ends of another one's exchanges, by their numbers.
class ListedRanks : public nn::ContextParallel {
 public:
  using Steps = std::vector<std::string>;
  ListedRanks(nn::ContextParallelPtr ranks, Steps& steps)
      : ContextParallel(ranks->rank(), ranks->size()),
        ranks_(std::move(ranks)),
        steps_(steps) {}

  std::unique_ptr<nn::PendingExchange> start(
      std::vector<nn::RankBlocks> blocks) override {
    steps_.push_back("start " + std::to_string(next_));
    return std::make_unique<Listed>(
        ranks_->start(std::move(blocks)),
        "finish " + std::to_string(next_++),
        steps_);
  }

 private:
  struct Listed : nn::PendingExchange {
    Listed(
        std::unique_ptr<nn::PendingExchange> exchange,
        std::string name,
        Steps& steps)
        : exchange_(std::move(exchange)),
          name_(std::move(name)),
          steps_(steps) {}
    void finish() override {
      steps_.push_back(name_);
      exchange_->finish();
    }
    std::unique_ptr<nn::PendingExchange> exchange_;
    std::string name_;
    Steps& steps_;
  };

  nn::ContextParallelPtr ranks_;
  Steps& steps_;
  int next_ = 0;
};

// One group of heads is exchanged during the attention of the other. All ranks
// have this order, in forward and in backward.
TEST(ExchangedHeadsTogether, G15_EachGroupIsExchangedDuringTheOther) {
  on_ranks(2, [](const nn::ContextParallelPtr& ranks) {
    ListedRanks::Steps steps;
    const auto listed = std::make_shared<ListedRanks>(ranks, steps);
    const at::Tensor x = at::zeros({1, 2, 4, kHeadDim}).requires_grad_();
    const at::Tensor out = nn::attend_shared_tokens(
        listed,
        x,
        x.detach(),
        x.detach(),
        [&](const nn::HeadGroup& own) {
          steps.emplace_back("attend");
          own.q.register_hook(
              [&](const at::Tensor&) { steps.emplace_back("gradient"); });
          return own.q.flatten(2).exp();
        });
    const ListedRanks::Steps forward{
        "start 0",
        "start 1",
        "finish 0",
        "attend",
        "start 2",
        "finish 1",
        "attend",
        "start 3",
        "finish 2",
        "finish 3"};
    EXPECT_EQ(steps, forward);
    steps.clear();
    out.sum().backward();
    const ListedRanks::Steps backward{
        "start 4",
        "start 5",
        "finish 4",
        "gradient",
        "start 6",
        "finish 5",
        "gradient",
        "start 7",
        "finish 7",
        "finish 6"};
    EXPECT_EQ(steps, backward);
  });
}

// Streams of CPUs are late, so compute waits.
TEST_P(ExchangedHeads, WaitsAreMeasuredOnDemand) {
  on_ranks(GetParam(), [](const nn::ContextParallelPtr& ranks) {
    const auto exchange = [&] {
      ranks->start({blocks_of(ranks->size(), 4, at::kFloat, false, false)})
          ->finish();
    };
    exchange();
    EXPECT_EQ(ranks->wait_and_take_exposed_ms(), 0);
    ranks->measure(true);
    exchange();
    ranks->measure(false);
    EXPECT_GT(ranks->wait_and_take_exposed_ms(), 0);
    exchange();
    EXPECT_EQ(ranks->wait_and_take_exposed_ms(), 0);
  });
}

struct AttentionCase {
  std::string name;
  std::int64_t kv_heads = 4;
  nn::AttentionArgs args;
  bool has_sinks = false;
  bool has_documents = false;
};

void PrintTo(const AttentionCase& c, std::ostream* out) {
  *out << c.name;
}

struct Attended {
  at::Tensor out;
  nn::TensorList grads;  ///< of q, k, v, and sinks
};

// out has as many columns as the heads of q; its gradient is given.
Attended attend(
    const AttentionCase& c,
    nn::TensorList qkv,
    at::Tensor sinks,
    const nn::ContextParallelPtr& ranks,
    const at::Tensor& gradient) {
  for (at::Tensor& x : qkv) {
    x = x.detach().clone().requires_grad_();
  }
  if (c.has_sinks) {
    sinks = sinks.detach().clone().requires_grad_();
  }
  Attended result{
      .out = nn::attend_shared_tokens(
          ranks,
          qkv[0],
          qkv[1],
          qkv[2],
          [&](const nn::HeadGroup& own) {
            nn::AttentionArgs args = c.args;
            if (c.has_sinks) {
              args.sinks = sinks.narrow(0, own.part.begin, own.part.size());
            }
            const auto hosts = ranks ? ranks->hosts() : nullptr;
            const std::int64_t seq =
                own.q.size(1) * (hosts ? hosts->size() : 1);
            nn::Documents documents;
            if (c.has_documents) {
              documents = nn::Documents::of(
                  std::vector<std::int64_t>{5, seq - 5, seq - 1, 1},
                  seq,
                  at::kCPU);
            }
            if (hosts) {
              return nn::attend_over_hosts(
                  hosts,
                  own.q,
                  own.k,
                  own.v,
                  documents,
                  args);
            }
            return c.has_documents
                       ? nn::document_attention(
                             own.q,
                             own.k,
                             own.v,
                             documents,
                             args)
                       : nn::causal_attention(own.q, own.k, own.v, args);
          })};
  torch::autograd::backward({result.out}, {gradient});
  for (const at::Tensor& x : qkv) {
    result.grads.push_back(x.grad());
  }
  result.grads.push_back(c.has_sinks ? sinks.grad() : at::Tensor());
  return result;
}

const auto kAttentionCases = ::testing::Values(
    AttentionCase{"causal"},
    AttentionCase{"window", 4, {.window = 5}},
    AttentionCase{"soft_cap", 4, {.soft_cap = 2.0}},
    AttentionCase{.name = "sinks", .has_sinks = true},
    AttentionCase{.name = "documents", .has_documents = true},
    AttentionCase{
        .name = "window_in_documents",
        .args = {.window = 3},
        .has_sinks = true,
        .has_documents = true},
    AttentionCase{.name = "two_kv_heads", .kv_heads = 2},
    AttentionCase{
        .name = "one_kv_head_in_documents",
        .kv_heads = 1,
        .has_documents = true});

constexpr std::int64_t kBatch = 2, kSeq = 24, kHeads = 8;

// q, k, v; then sinks and the result's gradient.
nn::TensorList inputs_of(const AttentionCase& c) {
  const auto heads = [&](std::int64_t n, std::uint64_t seed) {
    return random_of({kBatch, kSeq, n, kHeadDim}, seed);
  };
  return {
      heads(kHeads, 1),
      heads(c.kv_heads, 2),
      heads(c.kv_heads, 3),
      random_of({kHeads}, 4),
      random_of({kBatch, kSeq, kHeads * kHeadDim}, 5)};
}

Attended attend_on_ranks(
    const AttentionCase& c,
    const nn::TensorList& in,
    const nn::ContextParallelPtr& ranks) {
  const auto own = [&](const at::Tensor& x) { return tokens_of(ranks, x); };
  return attend(
      c,
      {own(in[0]), own(in[1]), own(in[2])},
      in[3],
      ranks,
      own(in[4]));
}

class AttentionOfRanks
    : public ::testing::TestWithParam<std::tuple<int, AttentionCase>> {};
INSTANTIATE_TEST_SUITE_P(
    Cases,
    AttentionOfRanks,
    ::testing::Combine(::testing::Values(2, 4), kAttentionCases),
    [](const auto& info) {
      return std::get<1>(info.param).name + "_of_" +
             std::to_string(std::get<0>(info.param));
    });

// The heads of a rank see what they see on one rank. Only gradients of keys and
// values that several ranks read are sums in another order.
TEST_P(AttentionOfRanks, HasTheBitsOfOneRank) {
  const AttentionCase c = std::get<1>(GetParam());
  on_ranks(std::get<0>(GetParam()), [&c](const nn::ContextParallelPtr& ranks) {
    const nn::TensorList in = inputs_of(c);
    const Attended want =
        attend(c, {in[0], in[1], in[2]}, in[3], nullptr, in[4]);
    const Attended got = attend_on_ranks(c, in, ranks);
    EXPECT_TRUE(got.out.equal(tokens_of(ranks, want.out)));
    EXPECT_TRUE(got.grads[0].equal(tokens_of(ranks, want.grads[0])));
    const double close = testing::sum_tolerance(
        {.addends = kSeq * kHeads, .in_a_row = 2, .size = 16});
    for (int i = 1; i <= 2; ++i) {
      const at::Tensor own_grad = tokens_of(ranks, want.grads[i]);
      if (c.kv_heads % ranks->size() == 0) {
        EXPECT_TRUE(got.grads[i].equal(own_grad)) << i;
      } else {
        EXPECT_TRUE(got.grads[i].allclose(own_grad, close, close)) << i;
      }
    }
    if (c.has_sinks) {
      EXPECT_TRUE(nn::own_rows(ranks, got.grads[3])
                      .equal(nn::own_rows(ranks, want.grads[3])));
    }
  });
}

struct Hosts {
  int num = 2;
  int size = 1;  ///< ranks of each
  bool copies = false;
};

class AttentionOverHosts
    : public ::testing::TestWithParam<std::tuple<Hosts, AttentionCase>> {};
INSTANTIATE_TEST_SUITE_P(
    Cases,
    AttentionOverHosts,
    ::testing::Combine(
        ::testing::Values(
            Hosts{.num = 2, .size = 1},
            Hosts{.num = 2, .size = 2},
            Hosts{.num = 3, .size = 2, .copies = true}),
        kAttentionCases),
    [](const auto& info) {
      const Hosts& hosts = std::get<0>(info.param);
      return std::get<1>(info.param).name + "_of_" + std::to_string(hosts.num) +
             "_hosts_of_" + std::to_string(hosts.size);
    });

TEST_P(AttentionOverHosts, L4_EqualsOneRank) {
  const Hosts hosts = std::get<0>(GetParam());
  const AttentionCase c = std::get<1>(GetParam());
  run_ranks(hosts.num * hosts.size, [&](RankContext& context) {
    const auto ranks = ranks_of_hosts(context, hosts.size, hosts.copies);
    const nn::TensorList in = inputs_of(c);
    const Attended want =
        attend(c, {in[0], in[1], in[2]}, in[3], nullptr, in[4]);
    const Attended got = attend_on_ranks(c, in, ranks);
    const double close = testing::sum_tolerance(
        {.addends = kSeq * kHeads, .in_a_row = 2, .size = 16});
    const auto expect_close = [&](const at::Tensor& own, const at::Tensor& of) {
      EXPECT_TRUE(own.allclose(of, close, close))
          << (own - of).abs().max().item<double>() << " above " << close;
    };
    expect_close(got.out, tokens_of(ranks, want.out));
    for (int i = 0; i < 3; ++i) {
      SCOPED_TRACE(i);
      expect_close(got.grads[i], tokens_of(ranks, want.grads[i]));
    }
    if (c.has_sinks) {
      // A rank has the gradient of its heads, from the tokens of its host.
      expect_close(nn::sum_over_ranks(ranks, got.grads[3]), want.grads[3]);
    }
  });
}

TEST(TokensOverHosts, L4_AreTheHeadAndTheTail) {
  const auto own = [](const TokenPart& part, std::int64_t num_tokens) {
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    for (const TokenRange& range : part.of(num_tokens)) {
      ranges.emplace_back(range.begin, range.end);
    }
    return ranges;
  };
  using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;
  EXPECT_EQ(own({}, 8), Ranges({{0, 8}}));
  EXPECT_EQ(own({.rank = 1, .ranks = 2}, 8), Ranges({{4, 8}}));
  EXPECT_EQ(own({.host = 0, .hosts = 4}, 16), Ranges({{0, 2}, {14, 16}}));
  EXPECT_EQ(own({.host = 3, .hosts = 4}, 16), Ranges({{6, 8}, {8, 10}}));
  EXPECT_EQ(
      own({.rank = 1, .ranks = 2, .host = 1, .hosts = 2}, 16),
      Ranges({{8, 12}}));
  EXPECT_EQ(
      own({.rank = 1, .ranks = 3, .host = 0, .hosts = 2}, 24),
      Ranges({{4, 6}, {18, 20}}));
}

TEST(TokensOverHosts, HaveOneOwnerEach) {
  for (const auto& [num_hosts, size] :
       {std::pair{2, 1}, std::pair{2, 3}, std::pair{3, 2}, std::pair{4, 4}}) {
    run_ranks(num_hosts * size, [size = size](RankContext& context) {
      const auto ranks = ranks_of_hosts(context, size, /*copies=*/false);
      const std::int64_t n = 48L * context.world;
      const at::Tensor tokens = at::arange(n, at::kFloat);
      EXPECT_EQ(ranks->num_ranks(), context.world);
      at::Tensor mine = at::zeros({n});
      mine.index_put_({nn::own_rows(ranks, tokens).to(at::kLong)}, 1.0F);
      EXPECT_EQ(mine.sum().item<double>(), 48);
      EXPECT_TRUE(nn::sum_over_ranks(ranks, mine).equal(at::ones({n})));
    });
  }
}

TEST(TokensOverHosts, TheirWaitsAreMeasured) {
  run_ranks(2, [](RankContext& context) {
    const auto ranks = ranks_of_hosts(context, 1, /*copies=*/false);
    const at::Tensor x = at::zeros({4});
    nn::sum_over_ranks(ranks, x);
    EXPECT_EQ(ranks->wait_and_take_exposed_ms(), 0);
    ranks->measure(true);
    nn::sum_over_ranks(ranks, x);
    EXPECT_GT(ranks->wait_and_take_exposed_ms(), 0);
  });
}

// Over hosts, keys and values are all-gathered once per direction.
TEST(TokensOverHosts, L5_KeysAreGatheredAgainInTheBackward) {
  run_ranks(2, [](RankContext& context) {
    const auto ranks = ranks_of_hosts(context, 1, /*copies=*/false);
    ListedRanks::Steps steps;
    const auto hosts = std::make_shared<ListedRanks>(ranks->hosts(), steps);
    const at::Tensor x = random_of({1, 8, 2, kHeadDim}, 1);
    const at::Tensor q = x.clone().requires_grad_();
    const at::Tensor k = x.clone().requires_grad_();
    const at::Tensor out = nn::attend_over_hosts(hosts, q, k, k, {}, {});
    EXPECT_THAT(steps, ::testing::ElementsAre("start 0", "finish 0"));
    steps.clear();
    out.sum().backward();
    EXPECT_THAT(
        steps,
        ::testing::ElementsAre("start 1", "finish 1", "start 2", "finish 2"));
  });
}

}  // namespace
}  // namespace flatshard
