#include "flatshard/group/plane.h"

#include <ATen/ATen.h>

#include "flatshard/core/error.h"
#include "flatshard/group/float8_codec.h"

namespace flatshard {

std::vector<Plane> planes_of(const GroupContext& context) {
  std::vector<Plane> planes;
  for (const PlaneShape& shape : context.plan.planes) {
    Plane& plane = planes.emplace_back();
    static_cast<PlaneShape&>(plane) = shape;
    plane.dtype =
        context.options.float8 ? at::kByte : context.options.precision.compute;
  }
  return planes;
}

void Codec::derive(
    const Plane& plane,
    PartId /*part*/,
    const Plane& /*source*/,
    const at::Tensor& /*from*/,
    const at::Tensor& /*to*/) const {
  FLATSHARD_THROW(internal, "plane {} is not derived from others", plane.name);
}

float8::WeightOperand Codec::operand(const Plane& plane, PlaneView /*view*/)
    const {
  FLATSHARD_THROW(internal, "plane {} has plain values", plane.name);
}

void CastCodec::encode(
    const Plane& /*plane*/,
    PartId /*part*/,
    const FlatBuffer& main,
    const at::Tensor& to) {
  const at::NoGradGuard no_grad;
  to.copy_(main.local());
}

PlaneView CastCodec::view(
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
