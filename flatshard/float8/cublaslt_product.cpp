#include "flatshard/float8/cublaslt_product.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/timer.h"
#include "flatshard/float8/cublaslt.h"

namespace flatshard::float8::cuda {
namespace {

constexpr int kCandidates = 8;
// Above this many result bytes, no extra memory is allocated for trials.
constexpr std::int64_t kMostTrialBytes = std::int64_t{1} << 30;

cudaDataType_t type_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat8_e4m3fn:
      return CUDA_R_8F_E4M3;
    case at::kFloat8_e5m2:
      return CUDA_R_8F_E5M2;
    case at::kBFloat16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

// Returns the largest power of two up to 256 that divides an address.
std::uint32_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  std::uint32_t found = 256;
  while (address % found != 0) {
    found /= 2;
  }
  return found;
}

// All that a choice of algorithm depends on.
struct Problem {
  std::int64_t m, n, k, stride_c, stride_d;
  std::int32_t type_a, type_b, type_d, mode_a, mode_b;
  std::uint32_t align_a, align_b, align_c, align_d;
  std::int32_t device;
  bool fast, beta, by_columns, takes_first;

  auto operator<=>(const Problem&) const = default;
};

Problem problem_of(const Product& p) {
  // Addresses are different on each rank.
  const auto alignment = [&](const at::Tensor& t) {
    constexpr std::uint32_t kOfAllRanks = 16;
    const std::uint32_t own = alignment_of(t.const_data_ptr());
    return p.takes_first ? std::min(own, kOfAllRanks) : own;
  };
  return {
      .m = p.b.data.size(p.by_columns ? 1 : 0),
      .n = p.a.data.size(0),
      .k = p.a.data.size(1),
      .stride_c = p.c.stride(0),
      .stride_d = p.out.stride(0),
      .type_a = type_of(p.b.data),
      .type_b = type_of(p.a.data),
      .type_d = type_of(p.out),
      .mode_a = p.b.mode,
      .mode_b = p.a.mode,
      .align_a = alignment(p.b.data),
      .align_b = alignment(p.a.data),
      .align_c = alignment(p.c),
      .align_d = alignment(p.out),
      .device = p.out.device().index(),
      .fast = p.fast,
      .beta = p.beta != 0.0F,
      .by_columns = p.by_columns,
      .takes_first = p.takes_first};
}

// The arguments of cublasLtMatmul, made once for each call.
struct Call {
  explicit Call(const Problem& q)
      : desc(make_desc()),
        a(q.by_columns ? make_layout(
                             static_cast<cudaDataType_t>(q.type_a),
                             q.m,
                             q.k,
                             q.m)
                       : make_layout(
                             static_cast<cudaDataType_t>(q.type_a),
                             q.k,
                             q.m,
                             q.k)),
        b(make_layout(static_cast<cudaDataType_t>(q.type_b), q.k, q.n, q.k)),
        c(make_layout(
            static_cast<cudaDataType_t>(q.type_d),
            q.m,
            q.n,
            q.stride_c)),
        d(make_layout(
            static_cast<cudaDataType_t>(q.type_d),
            q.m,
            q.n,
            q.stride_d)) {
    set(desc,
        CUBLASLT_MATMUL_DESC_TRANSA,
        q.by_columns ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(desc, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    if (q.fast) {
      set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, std::int8_t{1});
    }
    if (q.mode_a >= 0) {
      set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, q.mode_a);
      set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, q.mode_b);
    }
  }

  void set_scales(const Product& p) const {
    if (p.a.mode >= 0) {
      set(desc,
          CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
          p.b.scales.const_data_ptr());
      set(desc,
          CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
          p.a.scales.const_data_ptr());
    }
  }

  cublasStatus_t run(
      const Product& p,
      const at::Tensor& out,
      const cublasLtMatmulAlgo_t& algorithm) const {
    const float alpha = 1.0F;
    return cublasLtMatmul(
        at::cuda::getCurrentCUDABlasLtHandle(),
        desc.get(),
        &alpha,
        p.b.data.const_data_ptr(),
        a.get(),
        p.a.data.const_data_ptr(),
        b.get(),
        &p.beta,
        p.c.const_data_ptr(),
        c.get(),
        out.mutable_data_ptr(),
        d.get(),
        &algorithm,
        at::cuda::getCUDABlasLtWorkspace(),
        at::cuda::getCUDABlasLtWorkspaceSize(),
        at::cuda::getCurrentCUDAStream());
  }

  MatmulDesc desc;
  MatrixLayout a, b, c, d;
};

// Returns the algorithms of cuBLASLt's heuristic, best first; may be empty.
std::vector<cublasLtMatmulAlgo_t> candidates(
    const Problem& q,
    const Call& call) {
  const Preference preference = make_preference();
  set(preference,
      CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
      at::cuda::getCUDABlasLtWorkspaceSize());
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, q.align_a);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, q.align_b);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, q.align_c);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, q.align_d);
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> results;
  int num = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      at::cuda::getCurrentCUDABlasLtHandle(),
      call.desc.get(),
      call.a.get(),
      call.b.get(),
      call.c.get(),
      call.d.get(),
      preference.get(),
      kCandidates,
      results.data(),
      &num);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) {
    return {};
  }
  check_cublas(status, "asking for algorithms");
  std::vector<cublasLtMatmulAlgo_t> found;
  for (int i = 0; i < num; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS) {
      found.push_back(results[i].algo);
    }
  }
  return found;
}

// Returns the milliseconds of a few calls on the current stream; no time when
// they fail.
float time_of(StreamTimer& timer, const std::function<cublasStatus_t()>& run) {
  constexpr int kCalls = 3;
  if (run() != CUBLAS_STATUS_SUCCESS) {
    return std::numeric_limits<float>::infinity();
  }
  timer.start();
  for (int i = 0; i < kCalls; ++i) {
    run();
  }
  timer.stop();
  return static_cast<float>(timer.wait_and_take_ms());
}

bool may_wait() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(
      cudaStreamIsCapturing(at::cuda::getCurrentCUDAStream(), &status));
  return status == cudaStreamCaptureStatusNone;
}

// Returns the fastest algorithm. A trial writes to `out`, or to other memory if
// the matmul adds to `out`.
std::optional<cublasLtMatmulAlgo_t>
choose(const Problem& q, const Call& call, const Product& p, bool& sure) {
  const auto found = candidates(q, call);
  sure = true;
  if (found.empty()) {
    return {};
  }
  const bool adds = p.beta != 0.0F && p.c.is_same(p.out);
  const std::int64_t nbytes = q.n * q.stride_d * p.out.element_size();
  if (found.size() == 1 || q.takes_first ||
      at::globalContext().deterministicAlgorithms() ||
      (adds && nbytes > kMostTrialBytes)) {
    return found.front();
  }
  if (!may_wait()) {
    sure = false;
    return found.front();
  }
  const at::Tensor trial =
      adds ? at::empty_strided(p.out.sizes(), p.out.strides(), p.out.options())
           : p.out;
  const auto timer = make_stream_timer(p.out.device());
  std::size_t best = 0;
  float best_ms = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < found.size(); ++i) {
    const float ms =
        time_of(*timer, [&] { return call.run(p, trial, found[i]); });
    if (ms < best_ms) {
      best = i;
      best_ms = ms;
    }
  }
  return found[best];
}

std::optional<cublasLtMatmulAlgo_t>
algorithm_of(const Problem& q, const Call& call, const Product& p) {
  // Choices with and without deterministic algorithms are kept apart.
  static std::mutex mutex;
  static std::map<std::pair<bool, Problem>, std::optional<cublasLtMatmulAlgo_t>>
      chosen;
  const std::pair key{at::globalContext().deterministicAlgorithms(), q};
  {
    const std::lock_guard lock(mutex);
    const auto found = chosen.find(key);
    if (found != chosen.end()) {
      return found->second;
    }
  }
  bool sure = false;
  const auto algorithm = choose(q, call, p, sure);
  if (sure) {
    const std::lock_guard lock(mutex);
    chosen.emplace(key, algorithm);
  }
  return algorithm;
}

}  // namespace

bool run_product(const Product& p) {
  const Problem problem = problem_of(p);
  const Call call(problem);
  call.set_scales(p);
  const auto algorithm = algorithm_of(problem, call, p);
  if (algorithm) {
    check_cublas(call.run(p, p.out, *algorithm), "a matmul");
  }
  return algorithm.has_value();
}

bool has_product(std::int32_t mode_a, std::int32_t mode_b, at::Device device) {
  constexpr std::int64_t kSize = 256;
  const detail::CudaDeviceScope scope(device);
  const Problem problem{
      .m = kSize,
      .n = kSize,
      .k = kSize,
      .stride_c = kSize,
      .stride_d = kSize,
      .type_a = CUDA_R_8F_E4M3,
      .type_b = CUDA_R_8F_E4M3,
      .type_d = CUDA_R_16BF,
      .mode_a = mode_b,
      .mode_b = mode_a,
      .align_a = 256,
      .align_b = 256,
      .align_c = 256,
      .align_d = 256,
      .device = device.index(),
      .fast = false,
      .beta = false,
      .by_columns = false,
      .takes_first = false};
  const Call call(problem);
  // The heuristic only checks whether scales exist, not their values.
  const at::Tensor scales = at::ones({1}, at::TensorOptions(device));
  set(call.desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales.const_data_ptr());
  set(call.desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales.const_data_ptr());
  return !candidates(problem, call).empty();
}

}  // namespace flatshard::float8::cuda
