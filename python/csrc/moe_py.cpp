#include "flatshard/fully_shard/make_token_exchange.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/moe/grouped_linear.h"
#include "flatshard/moe/permute.h"
#include "flatshard/moe/token_exchange.h"
#include "python/csrc/bind.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace flatshard::python {
namespace {

using Direction = nn::TokenExchange::Direction;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

class PyTokenExchange {
 public:
  PyTokenExchange(Mesh& mesh, const TokenExchangeOptions& options)
      : num_experts(options.num_experts), exchange(make(mesh, options)) {}

  std::int64_t num_experts;
  Released<nn::TokenExchange> exchange;

 private:
  static std::shared_ptr<nn::TokenExchange> make(
      Mesh& mesh,
      const TokenExchangeOptions& options) {
    if (mesh.size() == 1) {
      return std::make_shared<nn::LocalExchange>();
    }
    const py::gil_scoped_release no_gil;
    const int axis = 0;
    return make_token_exchange(mesh, {&axis, 1}, options);
  }
};

/// Rows under way, for one wait. Waits for them in its destructor otherwise.
struct PyRowTransfer {
  Released<nn::TokenExchange> exchange;  ///< outlives `transfer`
  Released<nn::RowTransfer> transfer;
};

/// The tokens of one layer and microbatch, and where their rows go.
class RoutedTokens {
 public:
  RoutedTokens(const PyTokenExchange& exchange, const at::Tensor& experts)
      : exchange_(exchange.exchange.shared()) {
    const at::NoGradGuard no_grad;
    nn::ExpertOrder order = nn::order_by_expert(experts, exchange.num_experts);
    permutation_ = std::move(order.permutation);
    plan_ = exchange_->begin_plan(order.counts, permutation_.rows());
  }

  /// Waits for the counts of all ranks.
  void finish() const { exchange_->finish_plan(plan_); }
  const at::Tensor& ends() const { return plan_->ends; }
  std::int64_t num_received() const { return plan_->num_received; }

  at::Tensor row_weights(const at::Tensor& weights) const {
    return nn::permute_weights(weights, permutation_);
  }

  nn::TensorList dispatch(const at::Tensor& x, const at::Tensor& row_weights)
      const {
    return nn::exchange_rows(route(Direction::dispatch), {x, row_weights});
  }

  at::Tensor combine(const at::Tensor& rows) const {
    return nn::exchange_rows(route(Direction::combine), {rows})[0];
  }

  /// Returns the point after the current stream's work so far.
  Event queued() const {
    Event event;
    event.record(*current_stream(permutation_.order.device()));
    return event;
  }

  PyRowTransfer start(
      Direction direction,
      const OptionalTensors& rows,
      const Event& made) const {
    const at::NoGradGuard no_grad;
    nn::TensorList list;
    for (const std::optional<at::Tensor>& tensor : rows) {
      list.push_back(tensor.value_or(at::Tensor()));
    }
    const auto input =
        route(direction).input(direction, std::move(list), {}, made);
    return {
        .exchange = Released<nn::TokenExchange>(exchange_.shared()),
        .transfer = Released<nn::RowTransfer>(
            exchange_->start(plan_, direction, input))};
  }

 private:
  nn::RowRoute route(Direction direction) const {
    return {
        .exchange = exchange_.shared(),
        .plan = plan_,
        .direction = direction,
        .tokens = permutation_};
  }

  Released<nn::TokenExchange> exchange_;
  nn::Permutation permutation_;
  nn::ExchangePlanPtr plan_;
};

}  // namespace

void bind_moe(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<TokenExchangeOptions>(m, "TokenExchangeOptions")
      .def(
          py::init([](std::int64_t num_experts, bool copies, double timeout_s) {
            return TokenExchangeOptions{
                .num_experts = num_experts,
                .copies = copies,
                .timeout = std::chrono::milliseconds(
                    static_cast<std::int64_t>(timeout_s * 1e3))};
          }),
          py::kw_only(),
          py::arg("num_experts"),
          py::arg("copies"),
          py::arg("timeout_s"));

  py::class_<PyTokenExchange>(
      m,
      "TokenExchange",
      "Token exchange of the ranks of a mesh of one axis. Collective.")
      .def(
          py::init<Mesh&, const TokenExchangeOptions&>(),
          py::arg("mesh"),
          py::arg("options"))
      .def(
          "__deepcopy__",
          [](const py::object& self, const py::dict& /*memo*/) { return self; },
          "A copy of a module exchanges tokens as the module does.");

  py::class_<Event>(
      m,
      "StreamEvent",
      "A point of a stream, after the work that was queued before it.");
  py::class_<PyRowTransfer>(m, "RowTransfer", "Rows under way.")
      .def(
          "wait",
          [](const PyRowTransfer& self) { return self.transfer->finish(); },
          no_gil,
          "The rows that arrive, for kernels on the current stream. Once.");

  py::class_<RoutedTokens>(
      m,
      "RoutedTokens",
      "The tokens of one layer and microbatch, and where their rows go. "
      "Collective. dispatch, or finish, waits for the counts of all ranks.")
      .def(
          py::init<const PyTokenExchange&, const at::Tensor&>(),
          py::arg("exchange"),
          py::arg("experts"),
          no_gil,
          "experts: integers [tokens, slots], numbers among the experts of all "
          "ranks.")
      .def("finish", &RoutedTokens::finish, no_gil)
      .def_property_readonly(
          "ends",
          &RoutedTokens::ends,
          "int32 [experts here]: where the rows of each end.")
      .def_property_readonly("num_received", &RoutedTokens::num_received)
      .def(
          "row_weights",
          &RoutedTokens::row_weights,
          py::arg("weights"),
          "float32 [tokens, slots] -> [rows], an argument of dispatch.")
      .def(
          "dispatch",
          &RoutedTokens::dispatch,
          py::arg("x"),
          py::arg("row_weights"),
          no_gil,
          "[tokens, dim] and [rows] -> [num_received, dim] and "
          "[num_received], by expert.")
      .def(
          "combine",
          &RoutedTokens::combine,
          py::arg("rows"),
          no_gil,
          "[num_received, dim] -> [tokens, dim], the sums of each token.")
      .def(
          "start_dispatch",
          [](const RoutedTokens& self,
             const OptionalTensors& rows,
             const Event& made) {
            return self.start(Direction::dispatch, rows, made);
          },
          py::arg("rows"),
          py::arg("made"),
          no_gil,
          "dispatch without a graph, as far as the host queues it. It waits "
          "for `made`. None for a tensor that no rank has.")
      .def(
          "start_combine",
          [](const RoutedTokens& self,
             const OptionalTensors& rows,
             const Event& made) {
            return self.start(Direction::combine, rows, made);
          },
          py::arg("rows"),
          py::arg("made"),
          no_gil)
      .def("queued", &RoutedTokens::queued, "See start_dispatch.");

  m.def(
      "grouped_linear",
      [](const at::Tensor& x,
         const at::Tensor& weight,
         const at::Tensor& ends) {
        return nn::grouped_linear(x, weight, {.ends = ends});
      },
      py::arg("x"),
      py::arg("weight"),
      py::arg("ends"),
      no_gil,
      "x[r] W[e]^T for the rows r of each expert e.");
  m.def(
      "grouped_swiglu_linear",
      [](const at::Tensor& gate_up,
         const at::Tensor& row_weights,
         const at::Tensor& weight,
         const at::Tensor& ends) {
        return nn::grouped_gated_linear(
            nn::GateActivation::silu,
            gate_up,
            row_weights,
            weight,
            {.ends = ends});
      },
      py::arg("gate_up"),
      py::arg("row_weights"),
      py::arg("weight"),
      py::arg("ends"),
      no_gil,
      "(silu(gate[r]) * up[r] * row_weights[r]) W[e]^T. Saves only gate_up for "
      "the backward.");
}

}  // namespace flatshard::python
