#pragma once

#include "flatshard/overlap/backward_pass.h"
#include "python/csrc/bind.h"
#include "python/csrc/parameter_views.h"
#include "python/csrc/shared_rows.h"

#include <cstddef>
#include <functional>
#include <memory>

namespace flatshard::python {

/// A BackwardPass, and what Python sees of its units' parameters meanwhile.
class PyBackwardPass {
 public:
  PyBackwardPass(
      const std::shared_ptr<Runtime>& runtime,
      std::shared_ptr<ParameterViews> views,
      std::shared_ptr<SharedRows> rows);

  void forward_begin(UnitId unit);
  void forward_end(UnitId unit);
  void open_backward(bool is_last, bool interleaved);
  void backward_begin(UnitId unit);
  void backward_end(UnitId unit);
  void recompute_begin(UnitId unit);
  void recompute_end(UnitId unit);
  void set_delay_wgrad(bool delays, int node);
  void run_wgrads(UnitId unit, int node);
  void close_backward();
  std::size_t num_late();
  /// Nothing else may be called afterwards.
  void give_up() { pass_.reset(); }

 private:
  BackwardPass& pass() const;
  void without_gil(const std::function<void(BackwardPass&)>& call) const;

  std::shared_ptr<ParameterViews> views_;
  std::shared_ptr<SharedRows> rows_;
  Released<BackwardPass> pass_;
};

}  // namespace flatshard::python
