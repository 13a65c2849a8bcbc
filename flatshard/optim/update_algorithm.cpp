#include "flatshard/optim/update_algorithm.h"

#include "flatshard/core/error.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/muon.h"
#include "flatshard/optim/sgd.h"

namespace flatshard {

std::unique_ptr<UpdateAlgorithm> make_algorithm(
    Algorithm algorithm,
    const MuonOptions& muon) {
  switch (algorithm) {
    case Algorithm::adamw:
      return std::make_unique<AdamWAlgorithm>();
    case Algorithm::sgd:
      return std::make_unique<SgdAlgorithm>();
    case Algorithm::muon:
      return std::make_unique<MuonAlgorithm>(muon);
  }
  FLATSHARD_THROW(internal, "expected an algorithm of the enum");
}

}  // namespace flatshard
