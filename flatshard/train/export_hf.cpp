#include "flatshard/train/export_hf.h"

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/format/manifest.h"
#include "flatshard/format/read_plan.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/train/config.h"
#include "flatshard/train/export_tokenizer.h"
#include "flatshard/train/model_config.h"
#include "flatshard/train/option_errors.h"
#include "flatshard/train/precision.h"
#include "flatshard/train/stored_model.h"

#include <ATen/ATen.h>
#include <unistd.h>

namespace flatshard {
namespace {

namespace fs = std::filesystem;

void write_tensors(
    const fs::path& from,
    const Manifest& manifest,
    const HfFile& file,
    const fs::path& path,
    const ExportOptions& options) {
  SafetensorsWriter writer(path, file.tensors, {{"format", "pt"}});
  for (const SafetensorsSpec& spec : file.tensors) {
    const at::Tensor values = read_weight(
        from,
        manifest,
        models::from_hf_name(spec.name),
        options.num_threads);
    const at::Tensor out = values.to(scalar_type(spec.dtype, spec.name));
    writer.write(
        spec.name,
        {static_cast<const std::byte*>(out.data_ptr()),
         static_cast<std::size_t>(out.nbytes())});
  }
  writer.finish();
}

}  // namespace

std::string export_hf(const ExportOptions& options) {
  const fs::path from = for_option("--run", [&] {
    return find_checkpoint(options.run, options.step);
  });
  const Manifest manifest = read_manifest(from);
  check_files(from, manifest);
  const Config config = checkpoint_config(from, manifest);
  const auto weights = manifest.tensors.find(std::string(kWeightRole));
  std::error_code error;
  FLATSHARD_CHECK(
      !fs::exists(options.to, error) || fs::is_empty(options.to, error),
      io,
      "--to: expected a folder that is not there yet, got {}",
      options.to.string());

  std::vector<SafetensorsSpec> specs;
  std::string dtype;
  for (const auto& [name, tensor] : weights->second) {
    const std::string stored =
        options.dtype.empty()
            ? tensor.dtype
            : safetensors_dtype(parse_dtype(options.dtype, "--dtype"));
    dtype = c10::getDtypeNames(scalar_type(stored, name)).first;
    specs.push_back({models::to_hf_name(name), stored, tensor.shape});
  }
  const auto files = plan_hf_files(specs, options.max_file_nbytes);

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
    for (const HfFile& file : files) {
      write_tensors(from, manifest, file, partial / file.name, options);
    }
    if (files.size() > 1) {
      write_file_atomic(partial / kHfIndexName, hf_index_json(files));
    }
    const models::ModelConfig model = model_config(config);
    const models::SpecialTokens tokens =
        export_tokenizer(config, model, partial);
    write_file_atomic(
        partial / "config.json",
        models::to_hf_json(model, dtype, tokens));
    fs::remove(options.to, error);  // an empty one
    fs::rename(partial, options.to);
  } catch (...) {
    fs::remove_all(partial, error);
    throw;
  }
  return fmt::format(
      "wrote {}: the weights of step {} in {} file{}, {}",
      options.to.string(),
      manifest.step,
      files.size(),
      files.size() == 1 ? "" : "s",
      dtype);
}

}  // namespace flatshard
