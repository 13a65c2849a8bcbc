#include <algorithm>

#include "flatshard/group/group_options.h"
#include "flatshard/group/post_forward_axis.h"

namespace flatshard {
namespace {

std::int64_t element_size(at::ScalarType dtype) {
  return static_cast<std::int64_t>(c10::elementSize(dtype));
}

// Returns a mesh as numbers.
// @param mesh  a part of `whole`.
MeshShape shape_of(const Mesh& mesh, const Mesh& whole) {
  MeshShape shape{
      .model_ranks = whole.size(),
      .has_outer_axis = mesh.axis(0) == whole.axis(0)};
  std::int64_t stride = 1;
  for (int i = whole.num_axes() - 1; i >= 0; --i) {
    const MeshAxis& axis = whole.axis(i);
    if (std::ranges::find(mesh.axes(), axis) != mesh.axes().end()) {
      shape.sizes.insert(shape.sizes.begin(), axis.size);
      shape.strides.insert(shape.strides.begin(), stride);
    }
    stride *= axis.size;
  }
  return shape;
}

// The granularity of an FP8 weight. Chunks of rows stay if the scales allow a
// split between any two rows.
Granularity granularity_of(
    const Granularity& asked,
    const Float8Format& format) {
  const Granularity own = format.granularity();
  const bool stays = asked.kind() == Granularity::Kind::tensor ||
                     (asked.kind() == Granularity::Kind::chunk &&
                      own.kind() == Granularity::Kind::row);
  return stays ? asked : own;
}

}  // namespace

GroupShape shape_of(const GroupContext& context) {
  const ParamGroupOptions& options = context.options;
  const Precision& precision = options.precision;
  const at::ScalarType main =
      context.trainable ? precision.main_params : precision.compute;
  GroupShape shape{
      .alignment = options.alignment,
      .strategy = context.strategy,
      .mesh = shape_of(*context.mesh, *context.model_mesh),
      .sizes =
          {.main = element_size(main),
           .compute = element_size(precision.compute),
           .reduce = element_size(precision.reduce),
           .gradient = element_size(
               options.keeps_reduce_dtype() ? precision.reduce
                                            : precision.main_grads),
           .accumulated = element_size(precision.main_grads)},
      .main_has_compute_dtype = main == precision.compute,
      .trainable = context.trainable,
      .keep_compute_weights = options.keep_compute_weights,
      .offload = options.offload,
      .has_weights = options.has_weights,
      .post_forward_ranks = options.post_forward_ranks};
  for (const GroupParameter& p : *context.parameters) {
    shape.tensors.push_back(
        {p.names.front(),
         p.shape,
         p.placement.granularity.value_or(Granularity())});
  }
  if (options.float8) {
    const Float8Format& format = *options.float8;
    shape.alignment = format.alignment(options.alignment);
    const auto parts =
        format.parts_of(static_cast<std::int64_t>(shape.tensors.size()));
    for (std::size_t i = 0; i < shape.tensors.size(); ++i) {
      TensorSpec& tensor = shape.tensors[i];
      tensor.part = parts[i];
      tensor.granularity = granularity_of(tensor.granularity, format);
    }
    shape.float8 = format.shape_of(shape.tensors);
  }
  if (shape.post_forward_ranks != 0 && shape.has_weights &&
      !storage_plan(shape).resident()) {
    post_forward_axis(context);
  }
  return shape;
}

}  // namespace flatshard
