// `flatshard export --fp8`.
#include "flatshard/train/tools/export_float8.h"

#include "flatshard/checkpoint/float8_blocks.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/train/tools/export_hf.h"
#include "tests/train/run/float8_run.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

at::Tensor
read(const HfFolder& folder, const std::string& name, at::ScalarType dtype) {
  const HfFolder::Found found = folder.find(name);
  at::Tensor out = at::empty(found.entry->shape, dtype);
  EXPECT_EQ(found.entry->nbytes(), out.nbytes()) << name;
  found.read(
      0,
      {static_cast<std::byte*>(out.data_ptr()),
       static_cast<std::size_t>(out.nbytes())});
  return out;
}

// Computes the values as a reader of such folders does: each element times the
// scale of its block, the last blocks being as short as they are.
at::Tensor dequantize(const at::Tensor& data, const at::Tensor& scales) {
  at::Tensor out = at::empty(data.sizes(), at::kFloat);
  const at::Tensor values = data.to(at::kFloat);
  const auto from = values.accessor<float, 2>();
  const auto scale = scales.accessor<float, 2>();
  auto to = out.accessor<float, 2>();
  for (std::int64_t r = 0; r < data.size(0); ++r) {
    for (std::int64_t c = 0; c < data.size(1); ++c) {
      to[r][c] = from[r][c] * scale[r / 128][c / 128];
    }
  }
  return out;
}

// Half a step of three bits of mantissa; below the least normal number half a
// step of its subnormals.
void expect_within_format(
    const at::Tensor& got,
    const at::Tensor& expected,
    const at::Tensor& scales) {
  const at::Tensor step = scales.repeat_interleave(128, 0)
                              .repeat_interleave(128, 1)
                              .narrow(0, 0, got.size(0))
                              .narrow(1, 0, got.size(1));
  const at::Tensor bound =
      at::maximum(expected.abs() * (1.0F / 16), step * 0x1p-10F) * 1.0001F;
  EXPECT_TRUE((got - expected).abs().le(bound).all().item<bool>());
}

class Float8ExportTest : public Float8Trainer {
 protected:
  ExportOptions options(bool fp8) const {
    return {
        .run = folder_ / "run",
        .to = folder_ / (fp8 ? "fp8" : "plain"),
        .fp8 = fp8};
  }

  /// A run of one step that keeps its last checkpoint.
  void run(std::vector<std::string> overrides = {}) const {
    overrides.insert(
        overrides.end(),
        {"training.steps=1", "checkpoint.interval=1", "training.seq_len=4"});
    train("run", overrides);
  }

  std::string refused(const ExportOptions& options) const {
    try {
      export_hf(options);
    } catch (const Error& error) {
      EXPECT_FALSE(std::filesystem::exists(options.to));
      return error.what();
    }
    ADD_FAILURE() << "expected an error";
    return {};
  }
};

// 128 x 160 and 160 x 128: the last blocks of a side have 32 elements.
TEST_F(Float8ExportTest, HoldsBlocksAsDeepSeekV3sFoldersDo) {
  run({"model.ffn_dim=160"});
  const std::string said = export_hf(options(true));
  EXPECT_THAT(said, HasSubstr("14 in FP8, the rest bfloat16"));
  export_hf(options(false));
  const HfFolder fp8(folder_ / "fp8");
  const HfFolder plain(folder_ / "plain");
  std::size_t num_scales = 0;
  for (const std::string& name : plain.names()) {
    const at::Tensor expected = read(plain, name, at::kFloat);
    if (!name.ends_with("_proj.weight")) {
      EXPECT_TRUE(
          at::equal(read(fp8, name, at::kBFloat16), expected.to(at::kBFloat16)))
          << name;
      continue;
    }
    ++num_scales;
    EXPECT_EQ(fp8.find(name).entry->dtype, "F8_E4M3") << name;
    const std::string scales_name = name + "_scale_inv";
    EXPECT_EQ(fp8.find(scales_name).entry->dtype, "F32") << name;
    const at::Tensor scales = read(fp8, scales_name, at::kFloat);
    EXPECT_EQ(
        scales.sizes(),
        (at::IntArrayRef{
            (expected.size(0) + 127) / 128,
            (expected.size(1) + 127) / 128}))
        << name;
    const at::Tensor data = read(fp8, name, at::kFloat8_e4m3fn);
    const float8::Plane sent = quantize_blocks(name, expected, "");
    EXPECT_TRUE(sent.data.view(at::kByte).equal(data.view(at::kByte))) << name;
    EXPECT_TRUE(sent.scales.equal(scales)) << name;
    expect_within_format(dequantize(data, scales), expected, scales);
    // The largest of the first block is the format's largest.
    EXPECT_EQ(
        data.narrow(0, 0, 128)
            .narrow(1, 0, 128)
            .to(at::kFloat)
            .abs()
            .max()
            .item<float>(),
        448.0F)
        << name;
  }
  EXPECT_EQ(num_scales, 14U);
  EXPECT_EQ(fp8.names().size(), plain.names().size() + num_scales);

  std::ifstream file(folder_ / "fp8" / "config.json");
  const auto json = nlohmann::json::parse(file);
  EXPECT_EQ(json["torch_dtype"], "bfloat16");
  EXPECT_EQ(json["quantization_config"], nlohmann::json::parse(R"({
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128]})"));
}

TEST_F(Float8ExportTest, WeightsThatTrainedInBfloat16StaySo) {
  run({"float8.recipe=rowwise", "float8.exclude=*layers.1.*, *down_proj*"});
  EXPECT_THAT(export_hf(options(true)), HasSubstr("6 in FP8"));
  const HfFolder fp8(folder_ / "fp8");
  EXPECT_EQ(
      fp8.find("model.layers.1.self_attn.q_proj.weight").entry->dtype,
      "BF16");
  std::ifstream file(folder_ / "fp8" / "config.json");
  const std::vector<std::string> kept = nlohmann::json::parse(
      file)["quantization_config"]["modules_to_not_convert"];
  EXPECT_THAT(
      kept,
      UnorderedElementsAre(
          "model.layers.0.mlp.down_proj",
          "model.layers.1.mlp.down_proj",
          "model.layers.1.mlp.gate_proj",
          "model.layers.1.mlp.up_proj",
          "model.layers.1.self_attn.k_proj",
          "model.layers.1.self_attn.o_proj",
          "model.layers.1.self_attn.q_proj",
          "model.layers.1.self_attn.v_proj",
          "lm_head"));
}

TEST_F(Float8ExportTest, WhatDoesNotFitIsRefusedByName) {
  run({"float8.recipe=rowwise", "float8.exclude=*"});
  EXPECT_THAT(
      refused(options(true)),
      HasSubstr("--fp8: expected linear layers"));
  ExportOptions half = options(true);
  half.dtype = "float16";
  EXPECT_THAT(
      refused(half),
      HasSubstr("--dtype: expected bfloat16 with --fp8"));
  at::Tensor spoilt = at::ones({16, 16});
  spoilt[3][5] = std::numeric_limits<float>::infinity();
  try {
    Float8Export::quantize("model.layers.0.mlp.up_proj.weight", spoilt);
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr("--fp8: model.layers.0.mlp.up_proj.weight has values that "
                  "are not finite"));
  }
}

TEST_F(Float8ExportTest, NoRunBeginsWithIt) {
  run();
  export_hf(options(true));
  try {
    train(
        "other",
        {"training.steps=1",
         fmt::format("model.init_from={}", (folder_ / "fp8").string())});
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("_proj.weight: expected dtype F32"));
    EXPECT_THAT(
        error.what(),
        HasSubstr("got F8_E4M3; FP8 weights are not read: export without"));
  }
}

}  // namespace
}  // namespace flatshard
