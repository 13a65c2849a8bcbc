#pragma once

#include "flatshard/schedule/overlap_plan.h"

#include <fmt/format.h>

#include <string>
#include <vector>

namespace flatshard::testing {

struct PlanCase {
  int layers = 1;
  int microbatches = 1;
  OverlapPlanOptions options;

  std::vector<PlanStep> plan() const {
    return overlap_plan(layers, microbatches, options);
  }
  std::string name() const {
    return fmt::format(
        "{} layers, {} microbatches{}{}{}{}{}",
        layers,
        microbatches,
        options.in_flight == 2
            ? ""
            : fmt::format(", {} in flight", options.in_flight),
        options.delay_wgrad ? ", delayed" : "",
        options.recompute ? ", recomputed" : "",
        options.shared_experts ? ", shared" : "",
        options.dense.empty() ? "" : ", some dense");
  }
};

/// Returns every kind of plan, small and large.
inline std::vector<PlanCase> plan_cases() {
  std::vector<PlanCase> cases;
  for (const int layers : {1, 2, 3, 4, 5, 16, 64}) {
    for (const int microbatches : {1, 2, 3, 5, 16}) {
      for (int bits = 0; bits < (layers == 3 ? 80 : 32); ++bits) {
        std::vector<bool> dense;
        for (int l = 0; bits % 2 != 0 && l < layers; ++l) {
          dense.push_back(l % 3 == 0);
        }
        cases.push_back(
            {layers,
             microbatches,
             {.in_flight = 1 + bits / 16,
              .delay_wgrad = (bits & 2) != 0,
              .recompute = (bits & 4) != 0,
              .shared_experts = (bits & 8) != 0,
              .dense = dense}});
      }
    }
  }
  return cases;
}

}  // namespace flatshard::testing
