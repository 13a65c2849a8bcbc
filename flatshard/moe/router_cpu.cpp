#include "flatshard/moe/router_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace flatshard::nn::cpu {
namespace {

// NaNs lose against numbers.
float comparable(float v) {
  return std::isnan(v) ? -std::numeric_limits<float>::infinity() : v;
}

// Returns the first of the largest among those that `may` allows; one of them
// may.
template <class May>
std::int64_t best_of(const float* values, std::int64_t n, May&& may) {
  std::int64_t best = -1;
  for (std::int64_t i = 0; i < n; ++i) {
    if (may(i) &&
        (best < 0 || comparable(values[i]) > comparable(values[best]))) {
      best = i;
    }
  }
  return best;
}

float sum_of_top_two(const float* values, std::int64_t n) {
  const std::int64_t first =
      best_of(values, n, [](std::int64_t) { return true; });
  if (n == 1) {
    return values[first];
  }
  const std::int64_t second =
      best_of(values, n, [&](std::int64_t i) { return i != first; });
  return values[first] + values[second];
}

class Token {
 public:
  explicit Token(const RouterRule& rule)
      : rule_(rule),
        scores_(rule.num_experts),
        choice_(rule.num_experts),
        groups_(rule.groups),
        allowed_(rule.num_experts),
        group_taken_(rule.groups) {}

  // Scores of one row of logits; for softmax its logsumexp as well.
  const std::vector<float>& score(const float* logits) {
    const std::int64_t n = rule_.num_experts;
    if (rule_.score == RouterScore::sigmoid) {
      for (std::int64_t e = 0; e < n; ++e) {
        scores_[e] = 1.0F / (1.0F + std::exp(-logits[e]));
      }
      return scores_;
    }
    lse_ = softmax(logits, scores_.data());
    return scores_;
  }
  float lse() const { return lse_; }

  // softmax into `out`. @return the logsumexp.
  float softmax(const float* logits, float* out) const {
    const std::int64_t n = rule_.num_experts;
    const float top = *std::max_element(logits, logits + n);
    float sum = 0.0F;
    for (std::int64_t e = 0; e < n; ++e) {
      out[e] = std::exp(logits[e] - top);
      sum += out[e];
    }
    for (std::int64_t e = 0; e < n; ++e) {
      out[e] /= sum;
    }
    return top + std::log(sum);
  }

  void choose(const float* bias, std::int32_t* experts) {
    const std::int64_t n = rule_.num_experts;
    for (std::int64_t e = 0; e < n; ++e) {
      choice_[e] = scores_[e] + (bias != nullptr ? bias[e] : 0.0F);
      allowed_[e] = 1;
    }
    if (rule_.kept_groups < rule_.groups) {
      keep_groups();
    }
    for (std::int64_t j = 0; j < rule_.experts_per_token; ++j) {
      const std::int64_t best = best_of(choice_.data(), n, [&](std::int64_t e) {
        return allowed_[e] != 0;
      });
      allowed_[best] = 0;
      experts[j] = static_cast<std::int32_t>(best);
    }
  }

  void weigh(const std::int32_t* experts, float* weights) const {
    const std::int64_t k = rule_.experts_per_token;
    float sum = 0.0F;
    for (std::int64_t j = 0; j < k; ++j) {
      weights[j] = scores_[experts[j]];
      sum += weights[j];
    }
    for (std::int64_t j = 0; j < k; ++j) {
      if (rule_.normalize) {
        weights[j] /= sum + rule_.epsilon;
      }
      weights[j] *= rule_.scale;
    }
  }

  // Adds the gradient of the weights with respect to the scores to dscores.
  void weigh_backward(
      const std::int32_t* experts,
      const float* dweights,
      float* dscores) const {
    const std::int64_t k = rule_.experts_per_token;
    float sum = 0.0F;
    float dot = 0.0F;
    for (std::int64_t j = 0; j < k; ++j) {
      sum += scores_[experts[j]];
      dot += dweights[j] * scores_[experts[j]];
    }
    sum += rule_.epsilon;
    for (std::int64_t j = 0; j < k; ++j) {
      dscores[experts[j]] +=
          rule_.scale *
          (rule_.normalize ? (dweights[j] - dot / sum) / sum : dweights[j]);
    }
  }

 private:
  void keep_groups() {
    const std::int64_t size = rule_.num_experts / rule_.groups;
    for (std::int64_t g = 0; g < rule_.groups; ++g) {
      groups_[g] = sum_of_top_two(choice_.data() + g * size, size);
      group_taken_[g] = 0;
    }
    std::fill(allowed_.begin(), allowed_.end(), 0);
    for (std::int64_t i = 0; i < rule_.kept_groups; ++i) {
      const std::int64_t g =
          best_of(groups_.data(), rule_.groups, [&](std::int64_t at) {
            return group_taken_[at] == 0;
          });
      group_taken_[g] = 1;
      std::fill_n(allowed_.begin() + g * size, size, 1);
    }
  }

  const RouterRule& rule_;
  std::vector<float> scores_;
  std::vector<float> choice_;
  std::vector<float> groups_;
  std::vector<char> allowed_;
  std::vector<char> group_taken_;
  float lse_ = 0.0F;
};

// d of softmax p, in place: d <- p (d - sum p d).
void softmax_backward(const float* p, float* d, std::int64_t n) {
  float dot = 0.0F;
  for (std::int64_t e = 0; e < n; ++e) {
    dot += p[e] * d[e];
  }
  for (std::int64_t e = 0; e < n; ++e) {
    d[e] = p[e] * (d[e] - dot);
  }
}

}  // namespace

void router_forward(
    const RouterForward& args,
    std::int64_t begin,
    std::int64_t end) {
  Token token(args.rule);
  const std::int64_t k = args.rule.experts_per_token;
  for (std::int64_t t = begin; t < end; ++t) {
    token.score(args.logits + t * args.rule.num_experts);
    if (!args.chosen) {
      token.choose(args.bias, args.experts + t * k);
    }
    token.weigh(args.experts + t * k, args.weights + t * k);
  }
}

void router_backward(
    const RouterBackward& args,
    std::int64_t begin,
    std::int64_t end) {
  const RouterRule& rule = args.rule;
  const std::int64_t n = rule.num_experts;
  const std::int64_t k = rule.experts_per_token;
  const auto tokens = static_cast<float>(args.tokens);
  const float loss = args.loss_gradient != nullptr ? *args.loss_gradient : 1.0F;
  const float aux = loss * args.aux * static_cast<float>(n) /
                    (tokens * tokens * static_cast<float>(k));
  const float z = loss * args.z * 2.0F / tokens;
  Token token(rule);
  std::vector<float> p(n);
  for (std::int64_t t = begin; t < end; ++t) {
    const float* logits = args.logits + t * n;
    float* d = args.dlogits + t * n;
    const std::vector<float>& scores = token.score(logits);
    std::fill_n(d, n, 0.0F);
    token.weigh_backward(args.experts + t * k, args.dweights + t * k, d);
    if (rule.score == RouterScore::softmax) {
      if (args.aux != 0.0F) {
        for (std::int64_t e = 0; e < n; ++e) {
          d[e] += aux * static_cast<float>(args.counts[e]);
        }
      }
      softmax_backward(scores.data(), d, n);
      if (args.z != 0.0F) {
        for (std::int64_t e = 0; e < n; ++e) {
          d[e] += z * token.lse() * scores[e];
        }
      }
      continue;
    }
    if (args.aux != 0.0F) {
      // The gradient of s / sum(s).
      float sum = 0.0F;
      float dot = 0.0F;
      for (std::int64_t e = 0; e < n; ++e) {
        sum += scores[e];
        dot += scores[e] * static_cast<float>(args.counts[e]);
      }
      for (std::int64_t e = 0; e < n; ++e) {
        d[e] += aux * (static_cast<float>(args.counts[e]) - dot / sum) / sum;
      }
    }
    for (std::int64_t e = 0; e < n; ++e) {
      d[e] *= scores[e] * (1.0F - scores[e]);
    }
    if (args.z != 0.0F) {
      const float lse = token.softmax(logits, p.data());
      for (std::int64_t e = 0; e < n; ++e) {
        d[e] += z * lse * p[e];
      }
    }
  }
}

}  // namespace flatshard::nn::cpu
