#include "flatshard/train/export_hf.h"

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/format/manifest.h"
#include "flatshard/format/read_plan.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/train/config.h"
#include "flatshard/train/export_tokenizer.h"
#include "flatshard/train/run_checkpoints.h"
#include "flatshard/train/setup.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <unistd.h>

namespace flatshard {
namespace {

namespace fs = std::filesystem;

fs::path find_checkpoint(const ExportOptions& options) {
  if (fs::exists(options.run / kManifestName)) {
    FLATSHARD_CHECK(
        options.step < 0,
        config,
        "--step: {} is one checkpoint already; leave the step out",
        options.run.string());
    return options.run;
  }
  const fs::path config = options.run / "config.toml";
  FLATSHARD_CHECK(
      fs::exists(config),
      io,
      "--run: expected the output_dir of a run (with config.toml) or a "
      "checkpoint (with {}), got {}",
      kManifestName,
      options.run.string());
  // The run may have been moved since.
  const fs::path folder = options.run / load_config(config).checkpoint.folder;
  const auto step = options.step >= 0 ? std::optional(options.step)
                                      : latest_checkpoint(folder);
  FLATSHARD_CHECK(
      step && fs::exists(step_folder(folder, *step)),
      io,
      "--step: expected a checkpoint{} in {}; it has those of the steps [{}]",
      step ? fmt::format(" of step {}", *step) : "",
      folder.string(),
      fmt::to_string(fmt::join(list_checkpoints(folder), ", ")));
  return step_folder(folder, *step);
}

void write_tensors(
    const fs::path& from,
    const Manifest& manifest,
    const HfFile& file,
    const fs::path& path,
    const ExportOptions& options) {
  SafetensorsWriter writer(path, file.tensors, {{"format", "pt"}});
  for (const SafetensorsSpec& spec : file.tensors) {
    const StoredTensor& stored = manifest.tensors.at(std::string(kWeightRole))
                                     .at(models::from_hf_name(spec.name));
    const at::Tensor values =
        at::empty(stored.shape, scalar_type(stored.dtype, spec.name));
    const WantedRange whole{&stored, 0, stored.numel(), 0};
    read_chunks(
        from,
        manifest,
        plan_reads(manifest, std::span(&whole, 1)),
        {static_cast<std::byte*>(values.data_ptr()),
         static_cast<std::size_t>(values.nbytes())},
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
  const fs::path from = find_checkpoint(options);
  const Manifest manifest = read_manifest(from);
  check_files(from, manifest);
  const auto config_text = manifest.state.find("config");
  const auto weights = manifest.tensors.find(std::string(kWeightRole));
  FLATSHARD_CHECK(
      config_text != manifest.state.end() && weights != manifest.tensors.end(),
      format,
      "{}: expected the weights and the config of a training run",
      from.string());
  const Config config =
      parse_config(config_text->second, (from / kManifestName).string());
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
