#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flatshard/optim/muon/matrix_window.h"
#include "flatshard/optim/muon/muon_options.h"
#include "flatshard/optim/update_algorithm.h"

namespace flatshard {

/// Muon for matrices, with the numbers of torch.optim.Muon:
///   m = lerp(m, g, 1 - momentum);  u = nesterov ? lerp(g, m, momentum) : m
///   w = w (1 - lr decay) - lr factor newton_schulz(u)
/// One rank orthogonalizes each matrix (MatrixPlan). The others send it their
/// parts of u in bfloat16, in which Newton-Schulz computes, and receive the
/// result in it. So neither loses digits.
///
/// Replicas of a shard, as in HSDP, repeat the work of the others.
/// The parameters of a group may differ in their values and in their ranks.
/// State per group: momentum_buffer, float32.
/// Source: https://kellerjordan.github.io/posts/muon/ and arXiv:2502.16982.
class MuonAlgorithm : public UpdateAlgorithm {
 public:
  explicit MuonAlgorithm(MuonOptions options);

  void add_group(
      std::size_t group,
      const at::Tensor& like,
      std::span<const ParameterValues> values) override;
  void add_parameters(
      std::size_t group,
      const ParamGroup& of,
      const std::vector<OwnParameter>& parameters,
      std::span<const ParameterValues> values) override;
  void finish_groups() override;
  std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const override;
  std::vector<Communicator*> communicators(std::size_t group) const override;
  void begin_step() override;
  void begin_update(
      std::size_t group,
      const FlatUpdate& update,
      std::span<const std::int32_t> row_of,
      std::span<const ParameterValues> values,
      double lr) override;
  UpdateRow row(
      const ParameterValues& /*values*/,
      double /*lr*/,
      std::int64_t /*updates*/) const override {
    return {};
  }
  void update(std::size_t group, FlatUpdate& update) override;

 private:
  /// Groups whose matrices are orthogonalized together.
  struct Window {
    Communicator* ranks = nullptr;
    std::vector<WindowMatrix> matrices;
    std::vector<ShardBox> boxes;
    std::unique_ptr<MatrixWindow> work;
    std::int64_t num_waiting = 0;  ///< groups of this step to update
    bool is_orthogonal = false;    ///< the buffer has the results
  };
  /// A group in a step.
  struct Group {
    at::Tensor momentum;
    std::vector<std::size_t> windows;  ///< that its matrices are in
    const FlatUpdate* update = nullptr;
    std::vector<std::int32_t> row_of;  ///< empty: no update in this step
    std::vector<ParameterValues> rows;
    double lr = 0;
  };

  /// Returns the window for matrices of `numel` elements.
  std::size_t window_for(Communicator* ranks, std::int64_t numel);
  bool is_active(const WindowMatrix& matrix) const;
  /// Returns the values of an active matrix.
  const ParameterValues& values_of(std::size_t group, std::size_t index) const;
  void orthogonalize(Window& window);
  void apply(std::size_t group, const FlatUpdate& update, Window& window);

  MuonOptions options_;
  std::map<std::size_t, Group> groups_;
  std::vector<Window> windows_;
  WindowRule<Communicator*> rule_;
};

/// Returns the factor of the learning rate of one matrix.
double lr_factor(AdjustLr adjust, const MatrixShape& matrix);

}  // namespace flatshard
