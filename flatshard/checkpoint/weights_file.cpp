#include "flatshard/checkpoint/weights_file.h"

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/comm/all_gather_values.h"
#include "flatshard/core/error.h"
#include "flatshard/format/safetensors.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <vector>

namespace flatshard {
namespace {

/// Returns the boxes of one tensor that each rank of a group stores, by rank.
/// Collective.
std::vector<std::vector<Rectangle>> all_gather_boxes(
    Communicator& group,
    const std::vector<Rectangle>& mine,
    std::size_t num_dims) {
  const auto counts =
      all_gather_values(group, static_cast<std::int64_t>(mine.size()));
  const std::int64_t most = std::ranges::max(counts);
  const auto ndim = static_cast<std::int64_t>(num_dims);
  const at::Tensor in = at::zeros({most, 2, ndim}, at::kLong);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    auto* row = in.data_ptr<std::int64_t>() + 2 * num_dims * i;
    row = std::ranges::copy(mine[i].start, row).out;
    std::ranges::copy(mine[i].length, row);
  }
  const at::Tensor out = at::empty(
      {group.size() * in.numel()},
      in.options().device(group.device()));
  group.all_gather(out, in.flatten().to(group.device()));
  const at::Tensor all = out.cpu();
  const auto* numbers = all.const_data_ptr<std::int64_t>();
  std::vector<std::vector<Rectangle>> boxes;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    std::vector<Rectangle>& of_rank = boxes.emplace_back();
    for (std::int64_t i = 0; i < counts[rank]; ++i) {
      const std::int64_t* start =
          numbers + (static_cast<std::int64_t>(rank) * most + i) * 2 * ndim;
      of_rank.push_back(
          {{start, start + ndim}, {start + ndim, start + 2 * ndim}});
    }
  }
  return boxes;
}

/// Assembles one tensor from the slices of the ranks of a model.
/// Collective over the model's mesh.
/// @param mine  this rank's slice.
/// @return  the full tensor on the host; undefined where `wanted` is false.
at::Tensor join_slices(
    Communicator& world,
    const GroupParameter& parameter,
    const at::Tensor& mine,
    bool wanted) {
  const std::vector<std::int64_t> shape = parameter.whole_shape();
  const auto boxes_of = all_gather_boxes(
      world,
      parameter.slice().boxes(parameter.shape, 0, mine.numel()),
      shape.size());
  at::Tensor whole;
  if (wanted) {
    whole = at::empty(shape, mine.options().device(at::kCPU));
  }
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto here = boxes_of.begin() + rank;
    if (std::find(boxes_of.begin(), here, *here) != here) {
      continue;  // replicated on another rank
    }
    std::int64_t numel = 0;
    for (const Rectangle& box : *here) {
      numel += box.numel();
    }
    const at::Tensor values = rank == world.rank()
                                  ? mine.contiguous().view(-1)
                                  : at::empty({numel}, mine.options());
    world.broadcast(values, rank);
    std::int64_t done = 0;
    for (std::size_t i = 0; wanted && i < here->size(); ++i) {
      const Rectangle& box = (*here)[i];
      at::Tensor part = whole;
      for (std::int64_t d = 0; d < whole.dim(); ++d) {
        part = part.narrow(d, box.start[d], box.length[d]);
      }
      part.copy_(values.narrow(0, done, box.numel()).view(box.length));
      done += box.numel();
    }
  }
  return whole;
}

void write_entries(
    SafetensorsWriter& writer,
    const std::vector<StoredEntry>& entries,
    const at::Tensor& values) {
  const at::Tensor host = values.cpu().contiguous();
  const auto* from = static_cast<const std::byte*>(host.data_ptr());
  for (const StoredEntry& entry : entries) {
    const auto item = static_cast<std::uint64_t>(host.element_size());
    const auto nbytes = static_cast<std::size_t>(entry.numel()) * item;
    writer.write(
        entry.name,
        {from, nbytes},
        static_cast<std::uint64_t>(entry.begin()) * item);
    from += nbytes;
  }
}

}  // namespace

void save_weights(
    const std::vector<const ParamGroup*>& groups,
    const std::filesystem::path& path,
    const std::map<std::string, std::string>& metadata,
    const StoredEntriesOf& entries_of,
    const std::vector<WholeTensor>& whole_tensors) {
  const at::NoGradGuard no_grad;
  const auto entries = [&](const GroupParameter& p) {
    const std::string& name = p.names.front();
    return entries_of ? entries_of(name, p.whole_shape())
                      : std::vector<StoredEntry>{{name, p.whole_shape()}};
  };
  FLATSHARD_CHECK(!groups.empty(), usage, "expected at least one group");
  const bool writes = groups.front()->model_mesh()->rank() == 0;
  std::optional<SafetensorsWriter> writer;
  if (writes) {
    std::vector<SafetensorsSpec> specs;
    std::set<std::string> known;  // several parameters may be one tensor
    for (const ParamGroup* group : groups) {
      for (const GroupParameter& p : group->parameters()) {
        const std::string dtype =
            safetensors_dtype(group->weights().main().dtype());
        for (const StoredEntry& entry : entries(p)) {
          if (known.insert(entry.name).second) {
            specs.push_back({entry.name, dtype, entry.tensor_shape()});
          }
        }
      }
    }
    for (const WholeTensor& whole : whole_tensors) {
      specs.push_back(
          {whole.name,
           safetensors_dtype(whole.tensor.scalar_type()),
           whole.tensor.sizes().vec()});
    }
    writer.emplace(path, specs, metadata);
  }
  for (const ParamGroup* group : groups) {
    const Placements whole(group->mesh()->num_axes(), Placement::replicate());
    const FlatBuffer gathered =
        group->weights().main_on_device().redistribute(whole, Purpose::gather);
    for (std::size_t i = 0; i < group->parameters().size(); ++i) {
      const GroupParameter& p = group->parameters()[i];
      at::Tensor values = gathered.view(i);
      if (p.placement.slice) {
        values = join_slices(group->model_mesh()->world(), p, values, writes);
      }
      if (writes) {
        write_entries(*writer, entries(p), values);
      }
    }
  }
  if (writes) {
    for (const WholeTensor& whole : whole_tensors) {
      write_entries(
          *writer,
          {{whole.name, whole.tensor.sizes().vec()}},
          whole.tensor);
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
