#include "flatshard/float8/kernels/tiles.cuh"

namespace flatshard::float8::kernels {
namespace {

template <class Run>
void with_source(const Values& x, Run&& run) {
  const auto of = [&]<class T>(T) {
    const T* data = static_cast<const T*>(x.data);
    run(MemorySource<T>{data, x.rows, x.columns, wide_rows(data, x.columns)});
  };
  x.dtype == Dtype::f32 ? of(float{}) : of(__nv_bfloat16{});
}

}  // namespace

void quantize_tiles(const Values& x, const Quantize& a, cudaStream_t stream) {
  with_source(x, [&](const auto& source) {
    a.format == Format::e4m3 ? quantize_source<Format::e4m3>(source, a, stream)
                             : quantize_source<Format::e5m2>(source, a, stream);
  });
}

void row_and_column_amax(
    const Values& x,
    float* rows,
    float* columns,
    cudaStream_t stream) {
  with_source(x, [&](const auto& source) {
    source_row_and_column_amax(source, rows, columns, stream);
  });
}

}  // namespace flatshard::float8::kernels
