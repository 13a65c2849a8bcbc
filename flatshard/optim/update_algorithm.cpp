#include "flatshard/optim/update_algorithm.h"

#include "flatshard/core/error.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/element_algorithm.h"
#include "flatshard/optim/muon/muon.h"

#include <type_traits>

namespace flatshard {

std::unique_ptr<UpdateAlgorithm> make_algorithm(
    Algorithm algorithm,
    const MuonOptions& muon) {
  std::unique_ptr<UpdateAlgorithm> made;
  if (algorithm == Algorithm::muon) {
    return std::make_unique<MuonAlgorithm>(muon);
  }
  with_update_rule(algorithm, [&]<class Rule>(Rule) {
    if constexpr (std::is_same_v<Rule, AdamWRule>) {
      made = std::make_unique<AdamWAlgorithm>();
    } else {
      made = std::make_unique<ElementAlgorithm<Rule>>(algorithm);
    }
  });
  FLATSHARD_CHECK(
      made != nullptr,
      internal,
      "expected an algorithm of the enum");
  return made;
}

}  // namespace flatshard
