#include "flatshard/nn/documents.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <numeric>

namespace flatshard::nn {
namespace {

// No value of the offsets reaches the host.
at::Tensor masked(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Documents& documents,
    const AttentionArgs& args) {
  const std::int64_t batch = q.size(0);
  const std::int64_t seq = q.size(1);
  const std::int64_t group = q.size(2) / k.size(2);
  const at::Tensor tokens =
      at::arange(batch * seq, documents.offsets.options());
  const at::Tensor document = at::searchsorted(
                                  documents.offsets,
                                  tokens,
                                  /*out_int32=*/true,
                                  /*right=*/true)
                                  .view({batch, seq});
  if (args.soft_cap > 0.0 || args.sinks.defined()) {
    return plain_attention(q, k, v, args, document);
  }
  at::Tensor mask = document.unsqueeze(2).eq(document.unsqueeze(1)).tril_();
  if (args.window > 0) {
    mask = mask.triu_(1 - args.window);
  }
  return at::scaled_dot_product_attention(
             q.transpose(1, 2),
             k.repeat_interleave(group, 2).transpose(1, 2),
             v.repeat_interleave(group, 2).transpose(1, 2),
             mask.unsqueeze(1),
             /*dropout_p=*/0.0,
             /*is_causal=*/false,
             own_scale(args))
      .transpose(1, 2);
}

at::Tensor one_by_one(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Documents& documents,
    const AttentionArgs& args) {
  const auto flat = [](const at::Tensor& x) {
    return x.flatten(0, 1).unsqueeze(0);
  };
  const std::array<at::Tensor, 3> rows{flat(q), flat(k), flat(v)};
  const std::int64_t num_tokens = rows[0].size(1);
  const auto* offsets = documents.offsets.const_data_ptr<std::int32_t>();
  TensorList parts;
  std::int64_t begin = 0;
  for (std::int64_t i = 1; i <= documents.offsets.numel(); ++i) {
    // These are tokens after the last document. An emulated graph records with
    // offsets of zeros.
    const std::int64_t end =
        i < documents.offsets.numel() ? offsets[i] : num_tokens;
    if (end > begin) {
      const auto of = [&](const at::Tensor& x) {
        return x.narrow(1, begin, end - begin);
      };
      parts.push_back(
          causal_attention(of(rows[0]), of(rows[1]), of(rows[2]), args));
      begin = end;
    }
  }
  return at::cat(parts, 1);
}

}  // namespace

void write_documents(
    std::span<const std::int64_t> lengths,
    std::int64_t seq_len,
    std::span<std::int32_t> offsets,
    std::span<std::int32_t> positions) {
  FLATSHARD_CHECK(
      lengths.size() < offsets.size(),
      usage,
      "expected at most {} documents, got {}",
      offsets.size() - 1,
      lengths.size());
  const auto num_tokens = static_cast<std::int64_t>(positions.size());
  std::int64_t at = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    FLATSHARD_CHECK(
        lengths[i] > 0 && at % seq_len + lengths[i] <= seq_len &&
            at + lengths[i] <= num_tokens,
        usage,
        "document {}: expected at least one token and its end in row {} of {} "
        "tokens, got {} tokens from token {} of the row on",
        i,
        at / seq_len,
        seq_len,
        lengths[i],
        at % seq_len);
    offsets[i] = static_cast<std::int32_t>(at);
    const auto end = at + lengths[i];
    std::iota(positions.begin() + at, positions.begin() + end, 0);
    at = end;
  }
  FLATSHARD_CHECK(
      at == num_tokens,
      usage,
      "expected documents of {} tokens, as the batch has, got {}",
      num_tokens,
      at);
  std::ranges::fill(
      offsets.subspan(lengths.size()),
      static_cast<std::int32_t>(at));
}

Documents Documents::of(
    std::span<const std::int64_t> lengths,
    std::int64_t seq_len,
    at::Device device,
    std::span<const std::int64_t> padding) {
  const auto num_tokens =
      std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const auto options = at::TensorOptions().dtype(at::kInt);
  const at::Tensor offsets =
      at::empty({static_cast<std::int64_t>(lengths.size()) + 1}, options);
  const at::Tensor positions = at::empty({num_tokens}, options);
  const auto elements = [](const at::Tensor& tensor) {
    return std::span(
        tensor.mutable_data_ptr<std::int32_t>(),
        static_cast<std::size_t>(tensor.numel()));
  };
  write_documents(lengths, seq_len, elements(offsets), elements(positions));
  Documents documents{
      .offsets = offsets.to(device),
      .positions = positions.to(device),
      .max_length = lengths.empty() ? 0 : *std::ranges::max_element(lengths)};
  if (!padding.empty()) {
    const at::Tensor is_padding = at::empty({num_tokens}, at::kBool);
    write_padding(
        padding,
        seq_len,
        {is_padding.mutable_data_ptr<bool>(),
         static_cast<std::size_t>(num_tokens)});
    documents.padding = is_padding.to(device);
  }
  return documents;
}

void write_padding(
    std::span<const std::int64_t> num_padding,
    std::int64_t seq_len,
    std::span<bool> padding) {
  FLATSHARD_CHECK(
      num_padding.size() * static_cast<std::size_t>(seq_len) ==
              padding.size() &&
          std::ranges::all_of(
              num_padding,
              [&](std::int64_t n) { return n >= 0 && n <= seq_len; }),
      usage,
      "expected 0 to {} tokens of padding for each of {} rows, got {} rows",
      seq_len,
      padding.size() / static_cast<std::size_t>(seq_len),
      num_padding.size());
  for (std::size_t row = 0; row < num_padding.size(); ++row) {
    const auto of_row = padding.subspan(
        row * static_cast<std::size_t>(seq_len),
        static_cast<std::size_t>(seq_len));
    const auto begin = static_cast<std::size_t>(seq_len - num_padding[row]);
    std::ranges::fill(of_row.first(begin), false);
    std::ranges::fill(of_row.subspan(begin), true);
  }
}

at::Tensor lengths_of_tokens(const Documents& documents) {
  const at::Tensor& offsets = documents.offsets;
  const at::Tensor tokens =
      at::arange(documents.positions.numel(), offsets.options());
  // An emulated graph records with offsets of zeros: no document has a token.
  const at::Tensor end =
      at::searchsorted(offsets, tokens, /*out_int32=*/false, /*right=*/true)
          .clamp_max(offsets.numel() - 1);
  return (offsets.index_select(0, end) - offsets.index_select(0, end - 1))
      .to(at::kLong);
}

void Documents::append_to(TensorList& inputs) const {
  if (defined()) {
    inputs.push_back(offsets);
    inputs.push_back(positions);
    inputs.push_back(at::empty({max_length, 0}, positions.options()));
  }
}

Documents Documents::after(const TensorList& inputs, std::size_t count) {
  if (inputs.size() == count) {
    return {};
  }
  return {
      .offsets = inputs.at(count),
      .positions = inputs.at(count + 1),
      .max_length = inputs.at(count + 2).size(0)};
}

at::Tensor document_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Documents& documents,
    const AttentionArgs& args) {
  FLATSHARD_CHECK(
      are_grouped_heads(q, k, v) &&
          documents.positions.numel() == q.size(0) * q.size(1),
      usage,
      "document_attention: expected q [b, t, h, d], k, v [b, t, kv, d] with h "
      "a multiple of kv, and documents of b * t tokens, got {}, {}, {} and {} "
      "tokens",
      c10::str(q.sizes()),
      c10::str(k.sizes()),
      c10::str(v.sizes()),
      documents.positions.numel());
  at::Tensor out;
  if (args.soft_cap == 0.0 && flash_attention_takes(q)) {
    const FlashSequences sequences{documents.offsets, documents.max_length};
    out = flash_attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        args,
        &sequences);
  } else if (q.is_cpu()) {
    out = one_by_one(q, k, v, documents, args);
  } else {
    out = masked(q, k, v, documents, args);
  }
  return out.reshape({q.size(0), q.size(1), -1});
}

}  // namespace flatshard::nn
