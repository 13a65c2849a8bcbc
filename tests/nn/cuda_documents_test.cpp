#include <gtest/gtest.h>

#include "check.h"
#include "flatshard/nn/attention_kernels.h"
#include "flatshard/nn/documents.h"
#include "flatshard/nn/rope.h"

#include <ATen/ATen.h>

// Attention within documents, and positions by document, on a GPU against
// float32 on the CPU. Skips itself without a GPU.
namespace flatshard::nn {
namespace {

class CudaDocuments : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
    at::globalContext().setAllowTF32CuBLAS(false);
  }
};

TEST_P(CudaDocuments, AttentionIsTheCpusOneByOne) {
  constexpr std::int64_t kSeq = 300;
  const std::vector<std::int64_t> lengths{1, 170, 129, 300, 7, 256, 37};
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto leaf = [&](std::int64_t heads, std::int64_t head_dim) {
    return at::randn({3, kSeq, heads, head_dim}, generator).to(GetParam());
  };
  // bfloat16: probabilities, matmuls and gradients are rounded.
  const double tolerance = GetParam() == at::kFloat ? 1e-5 : 0x1p-6;
  for (const std::int64_t head_dim : {64, 128}) {
    const at::Tensor q = leaf(6, head_dim);
    const at::Tensor k = leaf(2, head_dim);
    const at::Tensor v = leaf(2, head_dim);
    const at::Tensor g = leaf(6, head_dim).flatten(2);
    const auto run =
        [&](at::Device device, at::ScalarType dtype, std::int64_t unused) {
          auto documents = Documents::of(lengths, kSeq, device);
          if (unused > 0) {
            documents.offsets = at::cat(
                {documents.offsets,
                 at::full({unused}, 3 * kSeq, documents.offsets.options())});
            documents.max_length = kSeq + 40;
          }
          TensorList leaves;
          for (const at::Tensor& t : {q, k, v}) {
            leaves.push_back(
                t.to(device, dtype, false, /*copy=*/true).requires_grad_());
          }
          const at::Tensor out =
              document_attention(leaves[0], leaves[1], leaves[2], documents);
          out.backward(g.to(device).to(dtype));
          return TensorList{
              out.detach(),
              leaves[0].grad(),
              leaves[1].grad(),
              leaves[2].grad()};
        };
    const TensorList expected = run(at::kCPU, at::kFloat, 0);
    for (const std::int64_t unused : {0, 9}) {
      const TensorList got = run(at::kCUDA, GetParam(), unused);
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_LE(relative_error(got[i].cpu(), expected[i]), tolerance)
            << "head_dim " << head_dim << ", unused places " << unused
            << ", result " << i;
      }
    }
  }
}

// Documents are before the chunk, cross its ends, and are after it.
TEST_P(CudaDocuments, AttentionOfAChunkIsTheCpus) {
  constexpr std::int64_t kSeq = 300;
  const std::vector<std::int64_t> lengths{1, 170, 129, 300, 7, 256, 37};
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const TokenRange tokens{200, 650};
  const auto random = [&](std::int64_t rows, std::int64_t heads) {
    return at::randn({rows, heads, 64}, generator).to(GetParam());
  };
  const TensorList inputs{
      random(tokens.size(), 6),
      random(tokens.end, 2),
      random(tokens.end, 2),
      at::randn({6}, generator).to(GetParam())};
  const at::Tensor g = random(tokens.size(), 6);
  const auto run = [&](at::Device device,
                       at::ScalarType dtype,
                       std::int64_t window,
                       bool has_sinks) {
    const auto documents = Documents::of(lengths, kSeq, device);
    TensorList in;
    for (const at::Tensor& x : inputs) {
      in.push_back(x.to(device, dtype));
    }
    in[3].requires_grad_();
    if (!has_sinks) {
      in.pop_back();
    }
    const at::NoGradGuard no_grad;
    const AttentionKernelPtr kernel = chunk_kernel(
        in[0],
        {.window = window, .plain = true},
        {.tokens = tokens,
         .offsets = documents.offsets,
         .max_length = documents.max_length});
    const TensorList results = kernel->forward(in);
    TensorList got = kernel->backward(g.to(device, dtype), in, results);
    got.push_back(results[0]);
    return got;
  };
  // Float32: four sums after one another, each of at most kSeq terms.
  const double tolerance =
      GetParam() == at::kFloat ? 4 * kSeq * 0x1p-24 : 0x1p-6;
  for (const std::int64_t window : {0, 40}) {
    for (const bool has_sinks : {false, true}) {
      const TensorList expected = run(at::kCPU, at::kFloat, window, has_sinks);
      const TensorList got = run(at::kCUDA, GetParam(), window, has_sinks);
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_LE(relative_error(got[i].cpu(), expected[i]), tolerance)
            << "window " << window << ", sinks " << has_sinks << ", result "
            << i;
      }
    }
  }
}

// Documents of any length, and places of documents that are not there.
// In float32, and with soft caps, no kernel fits.
TEST_P(CudaDocuments, AttentionWithSinksAndSoftCaps) {
  constexpr std::int64_t kSeq = 300;
  const std::vector<std::int64_t> lengths{1, 170, 129, 300, 7, 256, 37};
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto random = [&](std::int64_t heads) {
    return at::randn({3, kSeq, heads, 64}, generator).to(GetParam());
  };
  const TensorList inputs{
      random(6),
      random(2),
      random(2),
      at::randn({6}, generator).to(GetParam())};
  const at::Tensor g = random(6).flatten(2);
  const auto run = [&](at::Device device,
                       at::ScalarType dtype,
                       double soft_cap,
                       bool plain) {
    auto documents = Documents::of(lengths, kSeq, device);
    documents.offsets = at::cat(
        {documents.offsets,
         at::full({5}, 3 * kSeq, documents.offsets.options())});
    TensorList results;
    TensorList leaves;
    for (const at::Tensor& t : inputs) {
      leaves.push_back(
          t.to(device, dtype, false, /*copy=*/true).requires_grad_());
    }
    const at::Tensor out = document_attention(
        leaves[0],
        leaves[1],
        leaves[2],
        documents,
        {.window = 100,
         .soft_cap = soft_cap,
         .plain = plain,
         .sinks = leaves[3]});
    out.backward(g.to(device).to(dtype));
    results.push_back(out.detach());
    for (const at::Tensor& leaf : leaves) {
      results.push_back(leaf.grad());
    }
    return results;
  };
  for (const double soft_cap : {0.0, 2.0}) {
    const bool plain = soft_cap > 0.0 || GetParam() == at::kFloat;
    if (plain) {
      EXPECT_THROW(run(at::kCUDA, GetParam(), soft_cap, false), Error);
    }
    const TensorList expected = run(at::kCPU, at::kFloat, soft_cap, false);
    const TensorList got = run(at::kCUDA, GetParam(), soft_cap, plain);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_LE(
          relative_error(got[i].cpu(), expected[i]),
          GetParam() == at::kFloat ? 1e-5 : 0x1p-6)
          << soft_cap << ' ' << i;
    }
  }
}

TEST_P(CudaDocuments, RopeTakesPositions) {
  constexpr std::int64_t kSeq = 37;
  const std::vector<std::int64_t> lengths{30, 7, 1, 36};
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  for (const std::int64_t head_dim : {6, 128}) {
    RopeTable table({.head_dim = head_dim, .theta = 10000.0});
    const at::Tensor x =
        at::randn({2, kSeq, 5, head_dim}, generator).to(GetParam());
    const auto run = [&](at::Device device, at::ScalarType dtype) {
      const at::Tensor in =
          x.to(device, dtype, false, /*copy=*/true).requires_grad_();
      const auto [cos, sin] = table.get(kSeq, device);
      const at::Tensor out = rope(
          in,
          cos,
          sin,
          /*inverse=*/false,
          Documents::of(lengths, kSeq, device).positions);
      out.backward(out.detach().square());
      return TensorList{out.detach(), in.grad()};
    };
    const TensorList expected = run(at::kCPU, at::kFloat);
    const TensorList got = run(at::kCUDA, GetParam());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_LE(
          relative_error(got[i].cpu(), expected[i]),
          GetParam() == at::kFloat ? 0x1p-20 : 0x1p-6)
          << head_dim << " " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Both,
    CudaDocuments,
    ::testing::Values(at::kFloat, at::kBFloat16),
    [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace
}  // namespace flatshard::nn
