#include "flatshard/train/tools/stored_model.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/core/error.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/data/hf_tokenizer.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/format/read_plan.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/lora.h"
#include "flatshard/models/peft.h"
#include "flatshard/train/config/option_errors.h"
#include "flatshard/train/metrics/metrics_file.h"
#include "flatshard/train/setup/base_digest.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/run_lora.h"
#include "flatshard/train/tools/run_files.h"
#include "flatshard/train/tools/run_sources.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

/// Returns the file of weights that a run leaves when it ends.
const char* run_weights(const Config& config) {
  return config.lora.enabled() ? models::kPeftWeights : kRunWeights;
}

/// Fills `out` with entries one after another.
/// @param read_one  (entry, tensor of its shape) fills the tensor.
template <class ReadOne>
void read_entries(
    const std::vector<StoredEntry>& entries,
    const at::Tensor& out,
    ReadOne&& read_one) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = out.detach().view({-1});
  std::int64_t done = 0;
  for (const StoredEntry& entry : entries) {
    read_one(entry, flat.narrow(0, done, entry.numel()).view(entry.shape));
    done += entry.numel();
  }
}

void read_hf_tensor(
    const HfFolder& weights,
    const StoredEntry& wanted,
    const at::Tensor& out) {
  const auto found = weights.find(wanted.name);
  const std::vector<std::int64_t> shape = wanted.tensor_shape();
  FLATSHARD_CHECK(
      shape == found.entry->shape,
      format,
      "{}: tensor '{}': expected shape [{}], got [{}]",
      found.file->path().string(),
      found.entry->name,
      fmt::join(shape, ", "),
      fmt::join(found.entry->shape, ", "));
  const at::Tensor host = at::empty(
      wanted.shape,
      scalar_type(found.entry->dtype, found.entry->name));
  found.read(
      static_cast<std::uint64_t>(wanted.begin()) *
          static_cast<std::uint64_t>(host.element_size()),
      {static_cast<std::byte*>(host.data_ptr()), host.nbytes()});
  out.copy_(host);
}

/// Reads a parameter of a Hugging Face folder by its name here.
void read_hf_parameter(
    const HfFolder& weights,
    const models::ModelConfig& shape,
    const std::string& name,
    const at::Tensor& out) {
  read_entries(
      models::hf_entries(shape, name, out.sizes().vec()),
      out,
      [&](const StoredEntry& entry, const at::Tensor& part) {
        read_hf_tensor(weights, entry, part);
      });
}

/// Returns a run's adapters with the base model that they belong to; other runs
/// stay.
/// @param trained  the config as the run has it.
/// @param digests  of the base model; empty: not known.
StoredModel
with_base(StoredModel run, const Config& trained, WeightDigests digests = {}) {
  if (!trained.lora.enabled()) {
    return run;
  }
  const std::string& folder = trained.model.init_from;
  FLATSHARD_CHECK(
      !folder.empty(),
      config,
      "{}: the adapters were trained on random weights that are not stored "
      "anywhere; train adapters with model.init_from",
      run.what);
  const auto base = for_option("model.init_from", [&] {
    return std::make_shared<HfFolder>(folder, models::kHfBasePrefix);
  });
  run.lora = lora_config(trained.lora);
  run.read = [base,
              shape = run.shape,
              digests = std::move(digests),
              read_adapter =
                  run.read](const std::string& name, const at::Tensor& out) {
    if (models::is_adapter_parameter(name)) {
      read_adapter(name, out);
      return;
    }
    read_hf_parameter(*base, shape, name, out);
    const auto found = digests.find(name);
    FLATSHARD_CHECK(
        found == digests.end() || found->second == digest_of(out),
        config,
        "model.init_from: expected the base model of the adapters, but {} has "
        "another {}",
        base->folder().string(),
        name);
  };
  return run;
}

StoredModel of_run(const fs::path& run) {
  const Config trained = load_config(run / kRunConfig);
  const Config config = with_own_sources(trained, run);
  const bool has_adapters = trained.lora.enabled();
  const fs::path path = run / run_weights(config);
  const auto file = std::make_shared<WeightsFile>(path);
  const models::ModelConfig shape = model_config(config);
  const StoredEntriesOf entries_of = has_adapters
                                         ? models::peft_entries_of(shape)
                                         : models::hf_entries_of(shape);
  StoredModel model{
      .shape = shape,
      .what = path.string(),
      .compute = config.precision.compute,
      .read =
          [file, entries_of](const std::string& name, const at::Tensor& out) {
            read_entries(
                entries_of(name, out.sizes().vec()),
                out,
                [&](const StoredEntry& entry, const at::Tensor& part) {
                  file->read(entry, part);
                });
          },
      .corpus = tokenizer_corpus(config.data.train),
      .packing = config.data.packing,
      .seq_len = config.training.seq_len};
  return with_base(std::move(model), trained);
}

StoredModel of_checkpoint(const fs::path& folder) {
  const auto manifest = std::make_shared<Manifest>(read_manifest(folder));
  check_files(folder, *manifest);
  const Config trained = checkpoint_config(folder, *manifest);
  const Config config = with_own_sources(trained, folder);
  StoredModel model{
      .shape = model_config(config),
      .what = folder.string(),
      .compute = config.precision.compute,
      .read =
          [folder, manifest](const std::string& name, const at::Tensor& out) {
            const at::NoGradGuard no_grad;
            out.copy_(read_weight(folder, *manifest, name, /*num_threads=*/4));
          },
      .corpus = tokenizer_corpus(config.data.train),
      .packing = config.data.packing,
      .seq_len = config.training.seq_len};
  const auto base = manifest->state.find(std::string(kBaseState));
  return with_base(
      std::move(model),
      trained,
      base == manifest->state.end()
          ? WeightDigests()
          : parse_digests(base->second, folder.string()));
}

StoredModel of_hf_folder(const fs::path& folder) {
  const auto weights =
      std::make_shared<HfFolder>(folder, models::kHfBasePrefix);
  const models::ModelConfig shape = models::from_hf_json(folder / kHfConfig);
  return {
      .shape = shape,
      .what = folder.string(),
      .read =
          [weights, shape](const std::string& name, const at::Tensor& out) {
            read_hf_parameter(*weights, shape, name, out);
          },
      .hf_folder = folder};
}

}  // namespace

fs::path checkpoints_of(const fs::path& path) {
  std::error_code error;
  // The run may have been moved since: not its own output_dir.
  return fs::exists(path / kRunConfig, error)
             ? path / load_config(path / kRunConfig).checkpoint.folder
             : path;
}

fs::path find_checkpoint(const fs::path& path, std::int64_t step) {
  if (fs::exists(path / kManifestName)) {
    FLATSHARD_CHECK(
        step < 0,
        config,
        "--step: {} is one checkpoint already; leave the step out",
        path.string());
    return path;
  }
  const fs::path folder = checkpoints_of(path);
  const auto steps = list_checkpoints(folder);
  FLATSHARD_CHECK(
      folder != path || !steps.empty(),
      io,
      "expected the output_dir of a run (with {}), a checkpoint (with {}) or a "
      "folder of them, got {}",
      kRunConfig,
      kManifestName,
      path.string());
  const auto found =
      step >= 0 ? std::optional(step) : latest_checkpoint(folder);
  FLATSHARD_CHECK(
      found && fs::exists(step_folder(folder, *found)),
      io,
      "{}expected a checkpoint{} in {}; it has checkpoints of steps [{}]",
      step >= 0 ? "--step: " : "",
      found ? fmt::format(" of step {}", *found) : "",
      folder.string(),
      fmt::to_string(fmt::join(steps, ", ")));
  return step_folder(folder, *found);
}

std::string tokenizer_corpus(const std::vector<data::SourceChoice>& train) {
  for (const data::SourceChoice& choice : train) {
    if (!choice.is_random()) {
      return choice.path;
    }
  }
  return {};
}

Config checkpoint_config(const fs::path& folder, const Manifest& manifest) {
  const auto text = manifest.state.find(std::string(kConfigState));
  FLATSHARD_CHECK(
      text != manifest.state.end() &&
          manifest.tensors.contains(std::string(kWeightRole)),
      format,
      "{}: expected the weights and the config of a training run",
      folder.string());
  return parse_config(text->second, (folder / kManifestName).string());
}

at::Tensor read_weight(
    const fs::path& folder,
    const Manifest& manifest,
    const std::string& name,
    int num_threads) {
  const auto* tensors = &manifest.tensors.at(std::string(kWeightRole));
  const auto buffers = manifest.tensors.find(std::string(kBufferRole));
  if (!tensors->contains(name) && buffers != manifest.tensors.end()) {
    tensors = &buffers->second;
  }
  const auto found = tensors->find(name);
  FLATSHARD_CHECK(
      found != tensors->end(),
      format,
      "{}: the parameter '{}' is missing",
      folder.string(),
      name);
  const StoredTensor& stored = found->second;
  const at::Tensor values =
      at::empty(stored.shape, scalar_type(stored.dtype, name));
  const WantedBox whole{&stored, Rectangle::whole(stored.shape), 0};
  read_chunks(
      folder,
      manifest,
      plan_reads(manifest, std::span(&whole, 1)),
      {static_cast<std::byte*>(values.data_ptr()),
       static_cast<std::size_t>(values.nbytes())},
      num_threads);
  return values;
}

StoredModel open_model(const fs::path& path, std::int64_t step) {
  std::error_code error;
  const bool is_run = fs::exists(path / kRunConfig, error);
  if (fs::exists(path / kHfConfig, error) && !is_run) {
    FLATSHARD_CHECK(
        step < 0,
        config,
        "--step: {} is a Hugging Face model directory and has no steps",
        path.string());
    return of_hf_folder(path);
  }
  const auto latest =
      is_run ? latest_checkpoint(checkpoints_of(path)) : std::nullopt;
  const char* const file =
      is_run ? run_weights(load_config(path / kRunConfig)) : kRunWeights;
  const fs::path weights = path / file;
  // A run that resumed from its end and was interrupted still has the weights
  // of that end. Does not use a file's time, because copying changes it.
  if (is_run && step < 0 && fs::exists(weights, error) &&
      (!latest || metrics_say_ended(
                      path / kRunMetrics,
                      load_config(path / kRunConfig).training.steps))) {
    return of_run(path);
  }
  FLATSHARD_CHECK(
      is_run || fs::exists(path / kManifestName, error) ||
          !list_checkpoints(path).empty(),
      io,
      "--run: expected the output_dir of a run, a checkpoint (.../step-100) or "
      "a Hugging Face folder (with {}), got {}",
      kHfConfig,
      path.string());
  FLATSHARD_CHECK(
      !is_run || latest,
      io,
      "--run: {} has neither {} (written when a run ends) nor a checkpoint "
      "(written every checkpoint.interval steps)",
      path.string(),
      file);
  const fs::path folder = find_checkpoint(path, step);
  StoredModel model = of_checkpoint(folder);
  model.is_latest = step < 0 && folder != path;
  return model;
}

std::unique_ptr<data::TextCodec> open_hf_codec(
    const fs::path& folder,
    const data::CodecOptions& options) {
  const fs::path path = data::find_tokenizer(folder);
  const MappedFile file(path);
  if (data::same_tokens(
          std::string(file.text()),
          data::byte_tokenizer_json(),
          path.string())) {
    return data::TextCodec::bytes();
  }
  // generate() of transformers uses generation_config.json if there is
  // one.
  auto tokens = models::special_tokens_from_hf_json(folder / kHfConfig);
  std::error_code error;
  if (fs::exists(folder / kGenerationConfig, error)) {
    const auto generation =
        models::special_tokens_from_hf_json(folder / kGenerationConfig);
    if (!generation.eos.empty()) {
      tokens.eos = generation.eos;
    }
  }
  return data::TextCodec::hf_tokenizer(path, tokens.eos, options);
}

void StoredModel::use_dtype(const std::string& dtype) {
  FLATSHARD_CHECK(
      dtype == "auto" || dtype == "float32" || dtype == "bfloat16",
      config,
      "--dtype: expected auto, float32 or bfloat16, got '{}'",
      dtype);
  if (dtype != "auto") {
    compute = dtype == "float32" ? at::kFloat : at::kBFloat16;
  }
}

models::Llama load_model(const StoredModel& stored, at::Device device) {
  // Without a backward plain operations cost little memory.
  models::Llama model(
      stored.shape,
      models::LlamaOptions{.plain_attention = true});
  if (stored.lora.enabled()) {
    models::add_lora(*model, stored.lora);
  }
  nn::materialize(
      *model,
      device,
      stored.compute,
      [&](const std::string& name, const InitSpec&, at::Tensor& parameter) {
        stored.read(name, parameter);
      });
  for (const models::RouterOf& of : model->routers()) {
    of.router->make_bias(device);
    if (of.router->bias().defined()) {
      stored.read(of.bias_name(), of.router->bias());
    }
  }
  return model;
}

}  // namespace flatshard
