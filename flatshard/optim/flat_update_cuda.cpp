#include "flatshard/core/error.h"
#include "flatshard/device/float_dtype_of.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/optim/flat_update.h"
#include "flatshard/optim/optim_kernels.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace flatshard {
namespace {

kernels::FloatDtype dtype_of(const at::Tensor& t) {
  const auto found = find_float_dtype(t.scalar_type());
  FLATSHARD_CHECK(
      found,
      config,
      "expected float32, bfloat16 or float16 in an optimizer on CUDA, got {}",
      c10::toString(t.scalar_type()));
  return *found;
}

float* floats(const at::Tensor& t) {
  return t.defined() ? t.data_ptr<float>() : nullptr;
}

std::uint8_t* bytes(const at::Tensor& t) {
  return t.defined() ? static_cast<std::uint8_t*>(t.data_ptr()) : nullptr;
}

// Requirements of adamw_states.
void check_states(Algorithm algorithm, const FlatUpdate& u) {
  FLATSHARD_CHECK(
      algorithm == Algorithm::adamw,
      config,
      "expected precision.main_params = float32 on CUDA, got {}",
      c10::toString(u.main.scalar_type()));
  FLATSHARD_CHECK(
      u.main.scalar_type() == at::kFloat ||
          (u.main.scalar_type() == at::kBFloat16 && !u.compute.defined()),
      config,
      "expected precision.main_params = float32, or bfloat16 with "
      "precision.compute = bfloat16, on CUDA, got {}",
      c10::toString(u.main.scalar_type()));
  FLATSHARD_CHECK(
      !u.planes.wanted(),
      internal,
      "an update of states in other formats than float32 writes no FP8");
}

kernels::StatePointers pointers_of(const StateTensors& state) {
  return {
      .float32 = floats(state.float32),
      .bfloat16 = bytes(state.bfloat16),
      .codes = bytes(state.codes),
      .scales = floats(state.scales)};
}

kernels::FlatUpdatePointers pointers_of(const FlatUpdate& u) {
  FLATSHARD_CHECK(
      u.main.numel() % 4 == 0,
      internal,
      "expected a shard of a multiple of 4 elements, got {}",
      u.main.numel());
  kernels::FlatUpdatePointers p;
  p.main = u.main.data_ptr();
  p.main_dtype = dtype_of(u.main);
  if (u.compute.defined()) {
    p.compute = u.compute.data_ptr();
    p.compute_dtype = dtype_of(u.compute);
  }
  p.grad = u.grad.data_ptr();
  p.grad_dtype = dtype_of(u.grad);
  p.state0 = floats(u.state0);
  p.state1 = floats(u.state1);
  p.grad_scale = floats(u.grad_scale);
  p.numel = u.main.numel();
  if (u.ranges.empty()) {
    p.row = u.rows.front();
  } else {
    FLATSHARD_CHECK(
        u.device_ranges.defined() && u.device_rows.defined(),
        internal,
        "expected the {} ranges and {} rows of an update on its device",
        u.ranges.size(),
        u.rows.size());
    p.ranges = reinterpret_cast<const UpdateRange*>(bytes(u.device_ranges));
    p.rows = reinterpret_cast<const UpdateRow*>(bytes(u.device_rows));
    p.num_ranges = static_cast<int>(u.ranges.size());
  }
  const PlaneWriter& f = u.planes;
  if (f.wanted() && !f.runs.empty()) {
    p.float8 = {
        .runs = reinterpret_cast<const float8::FlatRun*>(bytes(f.device_runs)),
        .num_runs = static_cast<int>(f.runs.size()),
        .amax = floats(f.amax),
        .data = bytes(f.data),
        .scales = bytes(f.scales),
        .rounding = f.rounding};
  }
  FLATSHARD_CHECK(
      u.state_ranges.empty() == !u.device_state_ranges.defined() &&
          u.rounding_ranges.empty() == !u.device_rounding_ranges.defined(),
      internal,
      "expected the {} ranges of states and {} of rounding on their device",
      u.state_ranges.size(),
      u.rounding_ranges.size());
  if (u.state_ranges.empty()) {
    p.exp_avg.float32 = p.state0;
    p.exp_avg_sq.float32 = p.state1;
  } else {
    p.state_ranges =
        reinterpret_cast<const StateRange*>(bytes(u.device_state_ranges));
    p.num_state_ranges = static_cast<int>(u.state_ranges.size());
    p.exp_avg = pointers_of(u.exp_avg);
    p.exp_avg_sq = pointers_of(u.exp_avg_sq);
  }
  if (!u.rounding_ranges.empty()) {
    p.rounding_ranges =
        reinterpret_cast<const RoundingRange*>(bytes(u.device_rounding_ranges));
    p.num_rounding_ranges = static_cast<int>(u.rounding_ranges.size());
    p.rounding_step = u.rounding_step;
  }
  return p;
}

// The caller may give them back before this stream has read them.
void keep_until_read(const FlatUpdate& u, c10::cuda::CUDAStream stream) {
  for (const at::Tensor& t : {u.grad, u.grad_scale}) {
    if (t.defined()) {
      c10::cuda::CUDACachingAllocator::recordStream(
          t.storage().data_ptr(),
          stream);
    }
  }
}

}  // namespace

void flat_update_cuda(Algorithm algorithm, const FlatUpdate& u) {
  const c10::cuda::CUDAGuard guard(u.main.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const bool is_float32 =
      u.state_ranges.empty() && u.main.scalar_type() == at::kFloat;
  if (is_float32) {
    kernels::flat_update(algorithm, pointers_of(u), stream);
  } else {
    check_states(algorithm, u);
    kernels::adamw_states(pointers_of(u), stream);
  }
  check_kernel_launch();
  keep_until_read(u, stream);
}

}  // namespace flatshard
