#pragma once

#include "flatshard/nn/module.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard::testing {

/// The data between the modules of a random program: a unit's inputs and
/// outputs are nested.
struct Bundle {
  at::Tensor x;                   ///< [batch, dim]
  std::vector<at::Tensor> extra;  ///< the same shape
};

template <class F>
void for_each_tensor(const Bundle& bundle, F&& fn) {
  nn::for_each_tensor(bundle.x, fn);
  nn::for_each_tensor(bundle.extra, fn);
}

/// Where a model is in its program. All its modules read it.
struct Situation {
  int step = 0;
  int microbatch = 0;
  int rank = 0;
  /// Whether a unit's outputs require gradients may not differ between ranks.
  /// The inputs ensure that when only some ranks use parameters.
  bool inputs_want_grad = false;
  /// Nor may it depend on the rank whether a call is dead, as it would with a
  /// unit that returns its own input on some.
  bool has_dead_calls = false;
  /// Throw in the forward / backward of the op with this number.
  int fail_forward = -1;
  int fail_backward = -1;
};

/// A module whose forward is a list of operations, from JSON:
///
///     {"unit": true, "ops": [{"op": "linear"}, {"op": "child", "a": 0}],
///      "children": [{...}]}
///
/// `a` and `b` name children by index. Each operation maps a Bundle to a
/// Bundle; docs are next to their names in model.cpp.
class NodeImpl : public nn::Module {
 public:
  NodeImpl(
      const nlohmann::json& spec,
      std::shared_ptr<Situation> situation,
      int& num_ops);
  Bundle forward(Bundle in);

  bool is_unit() const { return spec_.value("unit", false); }
  /// This node and all below that are units, without the root's own.
  void collect_units(std::vector<nn::Module*>& units, bool root = true);
  /// All nodes in order of registration.
  void collect_nodes(std::vector<NodeImpl*>& nodes);
  /// Ties "tied" operations to a weight of another node, round-robin.
  void tie(const std::vector<NodeImpl*>& nodes);

 private:
  friend struct ProgramModel;
  struct Op;
  void run(Op& op, Bundle& in);
  Bundle call(const Op& op, const char* key, Bundle in);
  void add_op(const nlohmann::json& spec, int number);

  nlohmann::json spec_;
  bool is_root_ = false;
  std::shared_ptr<Situation> situation_;
  std::vector<std::shared_ptr<NodeImpl>> children_;
  std::vector<std::shared_ptr<Op>> ops_;
};
FLATSHARD_MODULE(Node);

/// Width of every tensor of a program.
inline constexpr std::int64_t kProgramDim = 6;

/// The models of a program, mostly one: their root nodes, each tied within
/// itself, and how one step runs through them.
struct ProgramModel {
  explicit ProgramModel(const nlohmann::json& program);

  /// The first model, and by "link" the others:
  ///   chain     each gets the output of the one before
  ///   back      the same, then the first one again
  ///   detached  each gets the same without its gradient, and adds to it
  ///   sum       all get `in`
  Bundle operator()(Bundle in);
  /// Returns the prefix of a model's parameters.
  static std::string prefix_of(std::size_t model);

  std::shared_ptr<Situation> situation = std::make_shared<Situation>();
  int num_ops = 0;
  std::vector<Node> roots;
  std::string link;
};

}  // namespace flatshard::testing
