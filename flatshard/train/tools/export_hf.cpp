#include "flatshard/train/tools/export_hf.h"

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/checkpoint/float8_blocks.h"
#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/core/words.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/format/manifest.h"
#include "flatshard/format/read_plan.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/lora.h"
#include "flatshard/models/peft.h"
#include "flatshard/train/config/option_errors.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/run_lora.h"
#include "flatshard/train/tools/export_float8.h"
#include "flatshard/train/tools/export_tokenizer.h"
#include "flatshard/train/tools/run_sources.h"
#include "flatshard/train/tools/stored_model.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string_view>

namespace flatshard {
namespace {

namespace fs = std::filesystem;

// The values of --dtype.
constexpr Word<at::ScalarType> kDtypes[] = {
    {"float32", at::kFloat},
    {"bfloat16", at::kBFloat16},
    {"float16", at::kHalf}};

// The part of a folder's tensor that belongs to a parameter.
struct TensorPart {
  std::string parameter;
  std::int64_t first = 0;  // element of the parameter
  std::int64_t begin = 0;  // element of the tensor
  std::int64_t numel = 0;
};
using TensorParts = std::map<std::string, std::vector<TensorPart>>;

// The parameters that an export writes, by Flatshard's names.
struct Parameters {
  struct Info {
    std::string dtype;
    std::vector<std::int64_t> shape;
  };
  std::map<std::string, Info> all;
  std::function<at::Tensor(const std::string& name)> read;
  StoredEntriesOf entries_of;  ///< of the folder
};

// The contents of a folder, tensor by tensor.
class StoredTensors {
 public:
  StoredTensors(const Parameters& parameters, const TensorParts& parts)
      : parameters_(parameters), parts_(parts) {}

  /// The scales of an FP8 weight are asked for after the weight.
  at::Tensor read(const SafetensorsSpec& spec) {
    if (const auto scales = scales_.extract(spec.name)) {
      return scales.mapped();
    }
    const at::Tensor values = whole(spec);
    if (spec.dtype != kFloat8) {
      return values.to(scalar_type(spec.dtype, spec.name));
    }
    float8::Plane plane = Float8Export::quantize(spec.name, values);
    scales_[block_scales_name(spec.name)] = std::move(plane.scales);
    return plane.data;
  }

 private:
  static constexpr std::string_view kFloat8 = "F8_E4M3";

  at::Tensor whole(const SafetensorsSpec& spec) {
    const std::vector<TensorPart>& parts = parts_.at(spec.name);
    if (parts.size() == 1) {
      return values_of(parts.front()).view(spec.shape);
    }
    at::Tensor joined;
    for (const TensorPart& part : parts) {
      const at::Tensor values = values_of(part);
      if (!joined.defined()) {
        joined =
            at::empty({c10::multiply_integers(spec.shape)}, values.options());
      }
      joined.narrow(0, part.begin, part.numel).copy_(values);
    }
    return joined.view(spec.shape);
  }

  at::Tensor values_of(const TensorPart& part) {
    // Tensors of one parameter follow each other.
    if (last_name_ != part.parameter) {
      last_ = at::Tensor();
      last_ = parameters_.read(part.parameter);
      last_name_ = part.parameter;
    }
    return last_.view({-1}).narrow(0, part.first, part.numel);
  }

  const Parameters& parameters_;
  const TensorParts& parts_;
  std::string last_name_;
  at::Tensor last_;
  std::map<std::string, at::Tensor> scales_;
};

void write_tensors(
    StoredTensors& tensors,
    const HfFile& file,
    const fs::path& path) {
  SafetensorsWriter writer(path, file.tensors, {{"format", "pt"}});
  for (const SafetensorsSpec& spec : file.tensors) {
    const at::Tensor out = tensors.read(spec);
    writer.write(
        spec.name,
        {static_cast<const std::byte*>(out.data_ptr()),
         static_cast<std::size_t>(out.nbytes())});
  }
  writer.finish();
}

// Returns the weights of a checkpoint as they are.
Parameters stored_parameters(
    const fs::path& from,
    const Manifest& manifest,
    int num_threads,
    StoredEntriesOf entries_of) {
  Parameters parameters{
      .read =
          [&from, &manifest, num_threads](const std::string& name) {
            return read_weight(from, manifest, name, num_threads);
          },
      .entries_of = std::move(entries_of)};
  for (const auto& [name, tensor] :
       manifest.tensors.at(std::string(kWeightRole))) {
    parameters.all[name] = {tensor.dtype, tensor.shape};
  }
  return parameters;
}

// Returns the weights of the base model with the adapters of a checkpoint
// added, in the dtypes of the base model.
Parameters merged_parameters(const fs::path& from, const Config& config) {
  const auto stored = std::make_shared<StoredModel>(open_model(from, -1));
  const HfFolder base(config.model.init_from, models::kHfBasePrefix);
  models::Llama model(stored->shape);
  models::add_lora(*model, stored->lora);
  const auto adapters =
      std::make_shared<std::map<std::string, models::AdaptedLayer>>();
  for (models::AdaptedLayer& layer : models::adapted_layers(*model)) {
    (*adapters)[layer.weight] = std::move(layer);
  }
  const auto shapes =
      std::make_shared<std::map<std::string, std::vector<std::int64_t>>>();
  Parameters parameters{.entries_of = models::hf_entries_of(stored->shape)};
  std::set<const void*> seen;
  for (const nn::NamedParameter& p : nn::named_parameters(*model)) {
    (*shapes)[p.name] = p.tensor.sizes().vec();
    if (models::is_adapter_parameter(p.name) ||
        !seen.insert(p.tensor.unsafeGetTensorImpl()).second) {
      continue;
    }
    const auto entries = parameters.entries_of(p.name, (*shapes)[p.name]);
    parameters.all[p.name] = {
        base.find(entries.front().name).entry->dtype,
        (*shapes)[p.name]};
  }
  parameters.read = [stored, adapters, shapes](const std::string& name) {
    const auto read = [&](const std::string& which) {
      at::Tensor values = at::empty(shapes->at(which), at::kFloat);
      stored->read(which, values);
      return values;
    };
    at::Tensor values = read(name);
    if (const auto found = adapters->find(name); found != adapters->end()) {
      const models::AdaptedLayer& layer = found->second;
      values.addmm_(
          read(layer.b),
          read(layer.a),
          /*beta=*/1.0,
          /*alpha=*/stored->lora.scale());
    }
    return values;
  };
  return parameters;
}

void check_float8(const Float8Export& fp8, const ExportOptions& options) {
  FLATSHARD_CHECK(
      options.dtype.empty() || options.dtype == "bfloat16",
      config,
      "--dtype: expected bfloat16 with --fp8 (the data type of all weights "
      "that are not FP8), got {}",
      options.dtype);
  FLATSHARD_CHECK(
      fp8.num_weights() > 0,
      config,
      "--fp8: expected linear layers (model.layers.*_proj.weight) that "
      "[float8] of the run does not exclude, found none; export without --fp8");
}

}  // namespace

std::string export_hf(const ExportOptions& options) {
  const fs::path from = for_option("--run", [&] {
    return find_checkpoint(options.run, options.step);
  });
  const Manifest manifest = read_manifest(from);
  check_files(from, manifest);
  const Config trained = checkpoint_config(from, manifest);
  const Config config = with_own_sources(trained, from);
  const bool has_adapters = config.lora.enabled();
  const bool is_adapter = has_adapters && !options.merge;
  FLATSHARD_CHECK(
      has_adapters || !options.merge,
      config,
      "--merge: {} is a run without adapters; export it without --merge",
      from.string());
  FLATSHARD_CHECK(
      !is_adapter || !options.fp8,
      config,
      "--fp8: adapters are exported in the stored data type; add --merge to "
      "export full weights");
  std::error_code error;
  FLATSHARD_CHECK(
      !fs::exists(options.to, error) || fs::is_empty(options.to, error),
      config,
      "--to: expected a folder that is not there yet, got {}",
      options.to.string());

  const models::ModelConfig model = model_config(config);
  FLATSHARD_CHECK(
      !options.fp8 || model.moe.num_experts == 0,
      config,
      "--fp8: experts are exported as they are stored; export without --fp8");
  // Throws if the family has no Hugging Face format, before any write.
  models::to_hf_json(model, "bfloat16");
  Float8Export fp8(Float8Choice(config.float8, model));
  const Parameters parameters =
      has_adapters && options.merge
          ? merged_parameters(from, trained)
          : stored_parameters(
                from,
                manifest,
                options.num_threads,
                is_adapter ? models::peft_entries_of(model)
                           : models::hf_entries_of(model));
  TensorParts parts;
  std::vector<SafetensorsSpec> wanted;  // weights in their stored layout
  for (const auto& [name, tensor] : parameters.all) {
    std::int64_t first = 0;
    for (const StoredEntry& entry : parameters.entries_of(name, tensor.shape)) {
      std::vector<TensorPart>& of_tensor = parts[entry.name];
      if (of_tensor.empty()) {
        wanted.push_back({entry.name, tensor.dtype, entry.tensor_shape()});
      }
      of_tensor.push_back({name, first, entry.begin(), entry.numel()});
      first += entry.numel();
    }
  }
  std::vector<SafetensorsSpec> specs;
  std::string dtype = "bfloat16";
  for (SafetensorsSpec& spec : wanted) {
    if (options.fp8) {
      std::vector<std::string> held;
      for (const TensorPart& part : parts.at(spec.name)) {
        held.push_back(part.parameter);
      }
      fp8.add(spec, held, specs);
      continue;
    }
    if (!options.dtype.empty()) {
      spec.dtype =
          safetensors_dtype(value_of("--dtype", kDtypes, options.dtype));
    }
    dtype = c10::getDtypeNames(scalar_type(spec.dtype, spec.name)).first;
    specs.push_back(spec);
  }
  if (options.fp8) {
    check_float8(fp8, options);
  }
  const auto files = is_adapter
                         ? std::vector<HfFile>{{models::kPeftWeights, specs}}
                         : plan_hf_files(specs, options.max_file_nbytes);

  fs::path partial = options.to;
  if (!partial.has_filename()) {
    partial = partial.parent_path();
  }
  partial += fmt::format(".partial-{}", ::getpid());
  fs::remove_all(partial, error);
  fs::create_directories(partial, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "--to: cannot make {}: {}",
      partial.string(),
      error.message());
  try {
    StoredTensors tensors(parameters, parts);
    for (const HfFile& file : files) {
      write_tensors(tensors, file, partial / file.name);
    }
    if (files.size() > 1) {
      write_file_atomic(partial / kHfIndexName, hf_index_json(files));
    }
    if (is_adapter) {
      write_file_atomic(
          partial / models::kPeftConfig,
          peft_config_text(
              lora_config(trained.lora),
              trained.model.init_from,
              model));
    } else {
      const models::SpecialTokens tokens = export_tokenizer(
          tokenizer_corpus(config.data.train),
          config.model.init_from,
          model,
          partial);
      const std::string json = models::to_hf_json(model, dtype, tokens);
      write_file_atomic(
          partial / "config.json",
          options.fp8 ? fp8.with_quantization(json) : json);
    }
    fs::remove(options.to, error);  // an empty one
    fs::rename(partial, options.to);
  } catch (...) {
    fs::remove_all(partial, error);
    throw;
  }
  return fmt::format(
      "wrote {}: the {} of step {} in {} file{}, {}{}",
      options.to.string(),
      is_adapter     ? "adapter"
      : has_adapters ? "merged weights"
                     : "weights",
      manifest.step,
      files.size(),
      files.size() == 1 ? "" : "s",
      options.fp8 ? fmt::format("{} in FP8, the rest ", fp8.num_weights()) : "",
      dtype);
}

}  // namespace flatshard
