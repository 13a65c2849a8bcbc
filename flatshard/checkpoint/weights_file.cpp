#include "flatshard/checkpoint/weights_file.h"

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/checkpoint/weight_stream.h"
#include "flatshard/core/error.h"
#include "flatshard/format/safetensors.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <optional>
#include <vector>

namespace flatshard {
namespace {

void write_tensor(
    SafetensorsWriter& writer,
    const std::string& name,
    const at::Tensor& values) {
  const at::Tensor host = values.cpu().contiguous();
  writer.write(
      name,
      {static_cast<const std::byte*>(host.data_ptr()), host.nbytes()});
}

}  // namespace

void save_weights(
    const std::vector<const ParamGroup*>& groups,
    const std::filesystem::path& path,
    const std::map<std::string, std::string>& metadata,
    const StoredEntriesOf& entries_of,
    const std::vector<WholeTensor>& whole_tensors) {
  WeightStream stream(groups, {.entries_of = entries_of, .on_rank_0 = true});
  std::optional<SafetensorsWriter> writer;
  if (groups.front()->model_mesh()->rank() == 0) {
    std::vector<SafetensorsSpec> specs;
    for (const StreamedSpec& spec : stream.metadata()) {
      specs.push_back({spec.name, safetensors_dtype(spec.dtype), spec.shape});
    }
    for (const WholeTensor& whole : whole_tensors) {
      specs.push_back(
          {whole.name,
           safetensors_dtype(whole.tensor.scalar_type()),
           whole.tensor.sizes().vec()});
    }
    writer.emplace(path, specs, metadata);
  }
  for (bool more = true; more;) {
    const auto tensors = stream.next();
    more = tensors.has_value();
    for (std::size_t i = 0; writer && more && i < tensors->size(); ++i) {
      write_tensor(*writer, (*tensors)[i].name, (*tensors)[i].tensor);
    }
  }
  if (writer) {
    for (const WholeTensor& whole : whole_tensors) {
      write_tensor(*writer, whole.name, whole.tensor);
    }
    writer->finish();
  }
}

struct WeightsFile::Impl {
  SafetensorsReader reader;
};

WeightsFile::WeightsFile(const std::filesystem::path& path)
    : impl_(std::make_unique<Impl>(Impl{SafetensorsReader(path)})) {
}

WeightsFile::~WeightsFile() = default;

void WeightsFile::read(const std::string& name, const at::Tensor& out) const {
  read(StoredEntry{name, out.sizes().vec()}, out);
}

void WeightsFile::read(const StoredEntry& wanted, const at::Tensor& out) const {
  const at::NoGradGuard no_grad;
  const SafetensorsEntry& entry = impl_->reader.entry(wanted.name);
  const std::vector<std::int64_t> shape = wanted.tensor_shape();
  FLATSHARD_CHECK(
      shape == entry.shape && out.sizes() == at::IntArrayRef(wanted.shape),
      format,
      "tensor {} of {}: expected shape [{}], got [{}]",
      wanted.name,
      impl_->reader.path().string(),
      fmt::join(shape, ", "),
      fmt::join(entry.shape, ", "));
  const at::Tensor host =
      at::empty(wanted.shape, scalar_type(entry.dtype, "tensor " + entry.name));
  impl_->reader.read(
      entry,
      static_cast<std::uint64_t>(wanted.begin()) *
          static_cast<std::uint64_t>(host.element_size()),
      {static_cast<std::byte*>(host.data_ptr()), host.nbytes()});
  out.copy_(host);
}

const std::map<std::string, std::string>& WeightsFile::metadata() const {
  return impl_->reader.metadata();
}

}  // namespace flatshard
