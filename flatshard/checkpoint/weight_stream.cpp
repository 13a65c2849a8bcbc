#include "flatshard/checkpoint/weight_stream.h"

#include "flatshard/comm/all_gather_values.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/group/frozen_float8.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

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
/// @param whole  the full tensor; undefined: the other ranks need this rank's
///   slice.
void join_slices(
    Communicator& world,
    const GroupParameter& parameter,
    const at::Tensor& mine,
    const at::Tensor& whole) {
  const auto boxes_of = all_gather_boxes(
      world,
      parameter.slice().boxes(parameter.shape, 0, mine.numel()),
      parameter.whole_shape().size());
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
    for (std::size_t i = 0; whole.defined() && i < here->size(); ++i) {
      const Rectangle& box = (*here)[i];
      at::Tensor part = whole;
      for (std::int64_t d = 0; d < whole.dim(); ++d) {
        part = part.narrow(d, box.start[d], box.length[d]);
      }
      part.copy_(values.narrow(0, done, box.numel()).view(box.length));
      done += box.numel();
    }
  }
}

}  // namespace

at::ScalarType compute_dtype_of(const ParamGroup& group) {
  return dtype_of_weights(group.options().precision.compute)(group);
}

DtypeOf dtype_of_weights(at::ScalarType dtype) {
  return [dtype](const ParamGroup& group) {
    const at::ScalarType own = group.weights().main().dtype();
    const bool is_float = at::isFloatingType(own) && c10::elementSize(own) > 1;
    return is_float ? dtype : own;
  };
}

WeightStream::WeightStream(
    std::vector<const ParamGroup*> groups,
    WeightStreamOptions options)
    : options_(std::move(options)) {
  FLATSHARD_CHECK(!groups.empty(), usage, "expected at least one group");
  mesh_ = options_.mesh ? options_.mesh : groups.front()->model_mesh();
  const at::Device device = groups.front()->mesh()->device();
  stream_ = device.is_cuda() ? make_stream(device, "weight_stream")
                             : current_stream(device);
  std::map<std::string, std::int64_t> num_rows;  // of incomplete tensors
  for (const ParamGroup* group : groups) {
    FLATSHARD_CHECK(
        !group->weights().main().local().is_meta() && has_main_weights(*group),
        usage,
        "{}: expected main weights; the group has none or dropped them after "
        "it encoded them in FP8",
        group->name());
    GroupPlan plan{
        .group = group,
        .dtype = options_.dtype_of ? options_.dtype_of(*group)
                                   : group->weights().main().dtype(),
        .parts = {}};
    for (const GroupParameter& p : group->parameters()) {
      std::vector<Part>& parts = plan.parts.emplace_back();
      if (p.dropped) {
        continue;
      }
      const std::string& name = p.names.front();
      const auto shape = p.whole_shape();
      for (StoredEntry& entry : options_.entries_of
                                    ? options_.entries_of(name, shape)
                                    : std::vector<StoredEntry>{{name, shape}}) {
        Part part{.entry = std::move(entry)};
        if (!part.entry.is_whole()) {
          std::int64_t& rows = num_rows[part.entry.name];
          rows += part.entry.shape.front();
          part.completes = rows == part.entry.num_rows;
        }
        if (part.completes) {
          num_rows.erase(part.entry.name);
          metadata_.push_back(
              {part.entry.name, plan.dtype, part.entry.tensor_shape()});
        }
        parts.push_back(std::move(part));
      }
    }
    groups_.push_back(std::move(plan));
  }
  FLATSHARD_CHECK(
      num_rows.empty(),
      usage,
      "tensor {}: expected parameters for all of its rows, got {} rows",
      num_rows.begin()->first,
      num_rows.begin()->second);
}

WeightStream::~WeightStream() {
  if (ahead_) {
    // Its memory is freed in the order of the current stream.
    try {
      ahead_->filled.wait(*current_stream(ahead_->values.device()));
    } catch (const std::exception& error) {
      log_warning("weight stream: {}", error.what());
    }
  }
}

std::optional<std::vector<StreamedTensor>> WeightStream::next() {
  if (next_ == groups_.size()) {
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  const GroupPlan& plan = groups_[next_];
  const Gathered gathered = ahead_ ? *std::exchange(ahead_, {}) : gather(plan);
  ++next_;
  gathered.filled.wait(*current_stream(gathered.values.device()));
  std::vector<StreamedTensor> tensors;
  const auto& parameters = plan.group->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!plan.parts[i].empty()) {
      add_tensors(
          plan.parts[i],
          full_values(
              parameters[i],
              gathered.values.view(static_cast<std::int64_t>(i))),
          tensors);
    }
  }
  return tensors;
}

void WeightStream::gather_ahead() {
  const bool runs_ahead = stream_->device().is_cuda();
  if (runs_ahead && !ahead_ && next_ < groups_.size()) {
    const at::NoGradGuard no_grad;
    ahead_ = gather(groups_[next_]);
  }
}

WeightStream::Gathered WeightStream::gather(const GroupPlan& plan) const {
  const WeightPlanes& weights = plan.group->weights();
  const FlatBuffer& main = weights.main();
  const auto& mesh = plan.group->mesh();
  const Placements full(mesh->num_axes(), Placement::replicate());
  const bool is_full = main.local().numel() == main.layout().numel();
  if (is_full && main.dtype() == plan.dtype &&
      main.device() == mesh->device()) {
    return {
        .values =
            FlatBuffer::wrap(main.local(), main.layout_ptr(), mesh, full)};
  }
  // Allocated for the current stream: it waits for `filled` before it reads or
  // frees this.
  const FlatBuffer out(main.layout_ptr(), mesh, full, plan.dtype);
  Event allocated;
  allocated.record(*current_stream(mesh->device()));
  allocated.wait(*stream_);
  stream_->submit([&weights, &full, &out] {
    const FlatBuffer mine = weights.main_on_device();
    // A view of `out`, or a temporary where this rank's part is several ranges.
    const FlatBuffer shard =
        out.redistribute(mine.placements(), Purpose::gather);
    shard.local().copy_(mine.local());
    if (shard.local().numel() < out.local().numel()) {
      shard.redistribute(full, Purpose::gather, &out);
    }
  });
  Gathered gathered{.values = out};
  gathered.filled.record(*stream_);
  return gathered;
}

at::Tensor WeightStream::full_values(
    const GroupParameter& parameter,
    const at::Tensor& mine) const {
  if (mesh_->size() == 1 || parameter.slice() == TensorSlice()) {
    return mine;  // it is not split
  }
  at::Tensor full;
  if (!options_.on_rank_0 || mesh_->rank() == 0) {
    const auto options =
        options_.on_rank_0 ? mine.options().device(at::kCPU) : mine.options();
    full = at::empty(parameter.whole_shape(), options);
  }
  join_slices(mesh_->world(), parameter, mine, full);
  return full;
}

void WeightStream::add_tensors(
    const std::vector<Part>& parts,
    const at::Tensor& values,
    std::vector<StreamedTensor>& to) {
  const Part& first = parts.front();
  if (parts.size() == 1 && first.entry.is_whole() &&
      (!values.defined() || values.sizes() == first.entry.shape)) {
    to.push_back({first.entry.name, values});  // as most parameters are
    return;
  }
  std::int64_t begin = 0;
  for (const auto& [entry, completes] : parts) {
    at::Tensor tensor;
    if (values.defined()) {
      tensor = values.view(-1).narrow(0, begin, entry.numel());
      tensor = tensor.view(entry.shape);
    }
    begin += entry.numel();
    if (!entry.is_whole()) {
      at::Tensor& rows = incomplete_[entry.name];
      if (values.defined()) {
        if (!rows.defined()) {
          rows = at::empty(entry.tensor_shape(), values.options());
        }
        rows.narrow(0, entry.first_row, entry.shape.front()).copy_(tensor);
      }
      if (!completes) {
        continue;
      }
      tensor = incomplete_.extract(entry.name).mapped();
    }
    to.push_back({entry.name, std::move(tensor)});
  }
}

}  // namespace flatshard
