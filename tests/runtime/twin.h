#pragma once

#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/module.h"
#include "flatshard/optim/sgd.h"
#include "tests/support/ranks.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace flatshard::testing {

/// A unit whose forward a test may replace.
class CellImpl : public nn::Module {
 public:
  using Body = std::function<at::Tensor(CellImpl&, at::Tensor)>;

  explicit CellImpl(std::int64_t dim);
  at::Tensor forward(at::Tensor x) { return body(*this, std::move(x)); }
  /// x + tanh(up(x)) * gain
  at::Tensor standard(const at::Tensor& x);

  nn::Linear up{nullptr};  ///< its gradient goes into the slot
  at::Tensor gain;         ///< its gradient arrives as a tensor
  at::Tensor spare;        ///< the standard body does not use it
  Body body;
};
FLATSHARD_MODULE(Cell);

/// Cells one after the other, and a parameter of the root.
class LabImpl : public nn::Module {
 public:
  using Body = std::function<at::Tensor(LabImpl&, at::Tensor)>;

  LabImpl();
  at::Tensor forward(at::Tensor x) { return body(*this, std::move(x)); }
  /// All cells in order.
  at::Tensor chain(at::Tensor x);
  at::Tensor standard(const at::Tensor& x) { return chain(x) * scale; }
  /// Returns the modules that are sharded as units: `choose_units`, or all
  /// cells.
  std::vector<nn::Module*> units();

  std::vector<Cell> cells;
  at::Tensor scale;
  Body body;
  std::function<std::vector<nn::Module*>(LabImpl&)> choose_units;
  bool fail = false;  ///< for bodies that throw on demand
};
FLATSHARD_MODULE(Lab);

/// One model twice: sharded over the ranks of a test, and plain. The plain one
/// runs the programs of all ranks, so its gradients are gradients of the mean.
class Twin {
 public:
  /// The work of one rank with a model in one microbatch. `scale` has to be
  /// multiplied into every loss.
  using Program = std::function<void(Lab& model, const Twin&, int rank)>;

  Twin(
      const RankContext& context,
      const std::function<void(LabImpl&)>& configure = {},
      FullyShardOptions options = {},
      std::shared_ptr<Mesh> mesh = nullptr);

  /// [4, dim] values that depend only on step, rank and `index`.
  at::Tensor input(int rank, int index = 0) const;
  /// Backward of the mean square, in the scale of the model that runs.
  void backward(const at::Tensor& out) const;
  at::Tensor loss(const at::Tensor& out) const;

  /// Forward and backward on both; compares gradients.
  void run(const Program& program);
  /// Only the sharded model.
  void run_sharded(const Program& program);
  /// SGD on both; compares weights.
  void update();
  void step(const Program& program) {
    run(program);
    update();
  }
  void expect_same_gradients() const;
  void expect_rest() const;
  /// Weights may stay unsharded after a backward, until they change.
  bool may_keep_weights = false;
  /// Returns the group of a parameter.
  ParamGroup& group_of(const std::string& parameter) const;

  int rank;
  int world;
  Lab sharded;
  Lab plain;
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<Sgd> sgd;
  std::map<std::string, at::Tensor> plain_parameters;
  int num_steps = 0;

 private:
  double scale_ = 1;
};

/// Returns the tolerance between values of a Twin's two models, when the
/// largest has this size. The matrices of each rank have the plain model's
/// shapes, but other addresses, and the kernels' order of sums depends on them.
double twin_tolerance(double size);

/// Runs `test` on several strategies and numbers of ranks.
void for_strategies(
    const std::function<void(const RankContext&, FullyShardOptions)>& test);

/// The usual program: one forward, one backward.
void forward_backward(Lab& model, const Twin& twin, int rank);

/// Some plain steps with `program` in the middle, on all strategies.
void check(
    const std::function<void(LabImpl&)>& configure,
    const Twin::Program& program);

}  // namespace flatshard::testing
