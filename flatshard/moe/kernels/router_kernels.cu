#include "flatshard/moe/kernels/moe_kernels.h"
#include "flatshard/ops/kernels/common.cuh"

// One warp handles each token; a warp's rows of scores are in shared memory.
namespace flatshard::nn::kernels {
namespace {

constexpr int kWarps = 4;
constexpr unsigned kAll = 0xffffffffU;

__device__ inline float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v = fmaxf(v, __shfl_xor_sync(kAll, v, offset));
  }
  return v;
}

struct Candidate {
  float value;
  int index;  // -1: none
};

// Returns the larger candidate, or the first of equal ones. A NaN never
// compares larger, so the first candidate stays if nothing is larger.
__device__ inline Candidate better(Candidate a, Candidate b) {
  if (a.index < 0) {
    return b;
  }
  if (b.index < 0) {
    return a;
  }
  const Candidate first = a.index < b.index ? a : b;
  const Candidate later = a.index < b.index ? b : a;
  return later.value > first.value ? later : first;
}

// NaNs must lose against numbers in whatever order candidates meet.
__device__ inline float comparable(float v) {
  return isnan(v) ? -INFINITY : v;
}

// Returns the best of values[0, n) among those with `taken[i] == 0`, for all
// lanes.
__device__ inline int
warp_best(const float* values, const char* taken, int n, int lane) {
  Candidate best{0.0F, -1};
  for (int i = lane; i < n; i += 32) {
    if (taken[i] == 0) {
      best = better(best, {comparable(values[i]), i});
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Candidate other{
        __shfl_xor_sync(kAll, best.value, offset),
        __shfl_xor_sync(kAll, best.index, offset)};
    best = better(best, other);
  }
  return best.index;
}

// The data of one warp in shared memory.
struct Scratch {
  float* scores;
  float* choice;
  float* groups;
  char* taken;        // [num_experts]
  char* group_taken;  // [groups]
};

__host__ __device__ inline std::size_t floats_per_warp(const RouterRule& rule) {
  return 2 * rule.num_experts + rule.groups;
}
__host__ __device__ inline std::size_t bytes_per_warp(const RouterRule& rule) {
  const std::size_t flags = rule.num_experts + rule.groups;
  return floats_per_warp(rule) * sizeof(float) + (flags + 15) / 16 * 16;
}

__device__ inline Scratch scratch_of(const RouterRule& rule, int warp) {
  extern __shared__ __align__(16) char shared[];
  char* mine = shared + warp * bytes_per_warp(rule);
  Scratch s;
  s.scores = reinterpret_cast<float*>(mine);
  s.choice = s.scores + rule.num_experts;
  s.groups = s.choice + rule.num_experts;
  s.taken = mine + floats_per_warp(rule) * sizeof(float);
  s.group_taken = s.taken + rule.num_experts;
  return s;
}

// softmax of one row into out. @return its logsumexp.
__device__ inline float
warp_softmax(const float* logits, float* out, int n, int lane) {
  float top = -INFINITY;
  for (int e = lane; e < n; e += 32) {
    top = fmaxf(top, logits[e]);
  }
  top = warp_max(top);
  float sum = 0.0F;
  for (int e = lane; e < n; e += 32) {
    out[e] = expf(logits[e] - top);
    sum += out[e];
  }
  sum = warp_sum(sum);
  for (int e = lane; e < n; e += 32) {
    out[e] /= sum;
  }
  __syncwarp();
  return top + logf(sum);
}

__device__ inline float
warp_scores(const RouterRule& rule, const float* logits, float* out, int lane) {
  const int n = static_cast<int>(rule.num_experts);
  if (rule.score == RouterScore::softmax) {
    return warp_softmax(logits, out, n, lane);
  }
  for (int e = lane; e < n; e += 32) {
    out[e] = 1.0F / (1.0F + expf(-logits[e]));
  }
  __syncwarp();
  return 0.0F;
}

// Leaves `taken[e] = 0` only for experts of the kept groups.
__device__ inline void
keep_groups(const RouterRule& rule, Scratch s, int lane) {
  const int size = static_cast<int>(rule.num_experts / rule.groups);
  const int groups = static_cast<int>(rule.groups);
  for (int g = lane; g < groups; g += 32) {
    const float* values = s.choice + g * size;
    int first = 0;
    for (int i = 1; i < size; ++i) {
      first = comparable(values[i]) > comparable(values[first]) ? i : first;
    }
    int second = -1;
    for (int i = 0; i < size; ++i) {
      if (i != first &&
          (second < 0 || comparable(values[i]) > comparable(values[second]))) {
        second = i;
      }
    }
    s.groups[g] = second < 0 ? values[first] : values[first] + values[second];
    s.group_taken[g] = 0;
  }
  for (int e = lane; e < rule.num_experts; e += 32) {
    s.taken[e] = 1;
  }
  __syncwarp();
  for (int kept = 0; kept < rule.kept_groups; ++kept) {
    const int g = warp_best(s.groups, s.group_taken, groups, lane);
    if (lane == 0) {
      s.group_taken[g] = 1;
    }
    for (int i = lane; i < size; i += 32) {
      s.taken[g * size + i] = 0;
    }
    __syncwarp();
  }
}

__global__ void router_forward_kernel(RouterForward args) {
  const RouterRule& rule = args.rule;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (t >= args.tokens) {
    return;
  }
  const int n = static_cast<int>(rule.num_experts);
  const int k = static_cast<int>(rule.experts_per_token);
  const Scratch s = scratch_of(rule, warp);
  std::int32_t* experts = args.experts + t * k;
  warp_scores(rule, args.logits + t * n, s.scores, lane);
  if (!args.chosen) {
    for (int e = lane; e < n; e += 32) {
      s.choice[e] = s.scores[e] + (args.bias != nullptr ? args.bias[e] : 0.0F);
      s.taken[e] = 0;
    }
    __syncwarp();
    if (rule.kept_groups < rule.groups) {
      keep_groups(rule, s, lane);
    }
    for (int j = 0; j < k; ++j) {
      const int best = warp_best(s.choice, s.taken, n, lane);
      if (lane == 0) {
        s.taken[best] = 1;
        experts[j] = best;
      }
      __syncwarp();
    }
  }
  float sum = 0.0F;
  for (int j = 0; j < k; ++j) {
    sum += s.scores[experts[j]];
  }
  for (int j = lane; j < k; j += 32) {
    float w = s.scores[experts[j]];
    if (rule.normalize) {
      w /= sum + rule.epsilon;
    }
    args.weights[t * k + j] = w * rule.scale;
  }
}

__global__ void router_backward_kernel(RouterBackward args) {
  const RouterRule& rule = args.rule;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (t >= args.tokens) {
    return;
  }
  const int n = static_cast<int>(rule.num_experts);
  const int k = static_cast<int>(rule.experts_per_token);
  const Scratch s = scratch_of(rule, warp);
  float* d = s.choice;  // gradients of the scores
  const float* logits = args.logits + t * n;
  const std::int32_t* experts = args.experts + t * k;
  const float* dweights = args.dweights + t * k;
  auto tokens = static_cast<float>(args.tokens);
  float loss = args.loss_gradient != nullptr ? *args.loss_gradient : 1.0F;
  if (args.padding != nullptr) {
    float choices = 0.0F;
    for (int e = lane; e < n; e += 32) {
      choices += static_cast<float>(args.counts[e]);
    }
    tokens = fmaxf(warp_sum(choices), 1.0F) / static_cast<float>(k);
    loss = args.padding[t] ? 0.0F : loss;
  }
  const float aux = loss * args.aux * static_cast<float>(n) /
                    (tokens * tokens * static_cast<float>(k));
  const float z = loss * args.z * 2.0F / tokens;
  const bool softmax = rule.score == RouterScore::softmax;
  float lse = warp_scores(rule, logits, s.scores, lane);

  float aux_sum = 1.0F;  // divisor of the probabilities
  float aux_dot = 0.0F;
  if (args.aux != 0.0F && !softmax) {
    float sum = 0.0F;
    float dot = 0.0F;
    for (int e = lane; e < n; e += 32) {
      sum += s.scores[e];
      dot += s.scores[e] * static_cast<float>(args.counts[e]);
    }
    aux_sum = warp_sum(sum);
    aux_dot = warp_sum(dot) / aux_sum;
  }
  for (int e = lane; e < n; e += 32) {
    d[e] = args.aux != 0.0F
               ? aux * (static_cast<float>(args.counts[e]) - aux_dot) / aux_sum
               : 0.0F;
  }
  __syncwarp();
  float sum = 0.0F;
  float dot = 0.0F;
  for (int j = 0; j < k; ++j) {
    sum += s.scores[experts[j]];
    dot += dweights[j] * s.scores[experts[j]];
  }
  sum += rule.epsilon;
  // Experts of one token differ.
  for (int j = lane; j < k; j += 32) {
    d[experts[j]] +=
        rule.scale *
        (rule.normalize ? (dweights[j] - dot / sum) / sum : dweights[j]);
  }
  __syncwarp();
  float pull = 0.0F;
  if (softmax) {
    for (int e = lane; e < n; e += 32) {
      pull += s.scores[e] * d[e];
    }
    pull = warp_sum(pull);
  }
  for (int e = lane; e < n; e += 32) {
    const float p = s.scores[e];
    args.dlogits[t * n + e] =
        softmax ? p * (d[e] - pull) : d[e] * p * (1.0F - p);
  }
  if (args.z == 0.0F) {
    return;
  }
  if (!softmax) {
    __syncwarp();
    lse = warp_softmax(logits, s.scores, n, lane);
  }
  for (int e = lane; e < n; e += 32) {
    args.dlogits[t * n + e] += z * lse * s.scores[e];
  }
}

template <class Kernel, class Args>
void launch_router(Kernel kernel, const Args& args, cudaStream_t stream) {
  if (args.tokens == 0) {
    return;
  }
  const std::size_t shared = kWarps * bytes_per_warp(args.rule);
  kernel<<<divide_up(args.tokens, kWarps), kWarps * 32, shared, stream>>>(args);
}

}  // namespace

void launch(const RouterForward& args, cudaStream_t stream) {
  launch_router(router_forward_kernel, args, stream);
}

void launch(const RouterBackward& args, cudaStream_t stream) {
  launch_router(router_backward_kernel, args, stream);
}

}  // namespace flatshard::nn::kernels
