#include "flatshard/group/plane.h"

#include <ATen/ATen.h>

#include "flatshard/core/error.h"
#include "flatshard/group/float8_codec.h"

namespace flatshard {

void Codec::derive(
    const Plane& plane,
    PartId /*part*/,
    const Plane& /*source*/,
    const at::Tensor& /*from*/,
    const at::Tensor& /*to*/) const {
  FLATSHARD_THROW(internal, "plane {} is not derived from others", plane.name);
}

std::vector<Plane> CastCodec::planes() const {
  const auto& layout = context_.layout;
  const at::ScalarType dtype = context_.options.precision.compute;
  std::vector<Plane> planes(1);
  planes[kComputePlane] = {
      .name = "compute",
      .dtype = dtype,
      .layout = layout,
      .whole = {
          .num_parameters = layout->num_tensors(),
          .num_segments = static_cast<std::int64_t>(layout->segments().size()),
          .layout = layout,
          .nbytes = layout->numel() *
                    static_cast<std::int64_t>(c10::elementSize(dtype))}};
  return planes;
}

void CastCodec::encode(
    const Plane& /*plane*/,
    PartId /*part*/,
    const FlatBuffer& main,
    const at::Tensor& to) {
  const at::NoGradGuard no_grad;
  to.copy_(main.local());
}

float8::Plane CastCodec::view(
    const Plane& plane,
    PartId /*part*/,
    std::int64_t parameter,
    const at::Tensor& slot) const {
  return {
      .data = slot.narrow(
                      0,
                      plane.layout->tensor_offset(parameter),
                      plane.layout->tensor_numel(parameter))
                  .view(plane.layout->spec(parameter).shape)};
}

std::unique_ptr<Codec> make_codec(const GroupContext& context) {
  if (context.options.float8) {
    return std::make_unique<Float8Codec>(context);
  }
  return std::make_unique<CastCodec>(context);
}

}  // namespace flatshard
