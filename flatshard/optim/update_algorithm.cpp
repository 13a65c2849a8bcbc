#include "flatshard/optim/update_algorithm.h"

#include "flatshard/core/error.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/sgd.h"

namespace flatshard {

std::unique_ptr<UpdateAlgorithm> make_algorithm(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::adamw:
      return std::make_unique<AdamWAlgorithm>();
    case Algorithm::sgd:
      return std::make_unique<SgdAlgorithm>();
  }
  FLATSHARD_THROW(internal, "expected an algorithm of the enum");
}

}  // namespace flatshard
