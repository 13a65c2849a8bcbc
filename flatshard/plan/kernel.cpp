#include "flatshard/plan/kernel.h"

namespace flatshard::plan {

Kernel Kernel::in_runs(double num) const {
  Kernel run = *this;
  (product == Product::wgrad ? run.k : run.m) /= num;
  run.nbytes /= num;
  run.runs *= num;
  return run;
}

Kernels in_runs(Kernels kernels, double num) {
  for (Kernel& kernel : kernels) {
    kernel = kernel.in_runs(num);
  }
  return kernels;
}

double Kernel::run_seconds(const Gpu& gpu) const {
  switch (kind) {
    case Kind::product:
      return gpu.product_seconds(product, m, n, k, recipe);
    case Kind::grouped:
      return gpu.grouped_seconds(product, groups, m, n, k);
    case Kind::attention:
      return slowdown * gpu.attention_seconds(
                            backward,
                            sequences,
                            heads,
                            seq_len,
                            head_dim);
    case Kind::transfer:
    case Kind::finish:
      return 0;
    case Kind::low_rank:
      return gpu.pass_seconds("sum", nbytes);
    case Kind::pass:
      break;
  }
  return gpu.pass_seconds(pass, nbytes);
}

double Kernel::flops() const {
  switch (kind) {
    case Kind::product:
    case Kind::grouped:
    case Kind::low_rank:
      return runs * 2 * groups * m * n * k;
    case Kind::attention:
      return attention_flops(
          backward,
          sequences,
          heads,
          seq_len,
          static_cast<double>(head_dim));
    case Kind::pass:
    case Kind::transfer:
    case Kind::finish:
      break;
  }
  return 0;
}

std::string_view Kernel::label() const {
  switch (kind) {
    case Kind::product:
    case Kind::grouped:
      return "GEMM";
    case Kind::low_rank:
      return "adapters";
    case Kind::attention:
      return "attention";
    case Kind::transfer:
    case Kind::finish:
      return "transfer";
    case Kind::pass:
      break;
  }
  return pass;
}

double seconds(const Gpu& gpu, const Kernels& kernels) {
  double sum = 0;
  for (const Kernel& kernel : kernels) {
    sum += kernel.seconds(gpu);
  }
  return sum;
}

double flops(const Kernels& kernels) {
  double sum = 0;
  for (const Kernel& kernel : kernels) {
    sum += kernel.flops();
  }
  return sum;
}

}  // namespace flatshard::plan
