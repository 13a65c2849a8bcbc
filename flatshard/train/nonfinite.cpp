#include "flatshard/train/nonfinite.h"
#include "flatshard/comm/collective_scope.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "flatshard/core/error.h"
#include "flatshard/diagnostics/nan_check.h"
#include "flatshard/flight/recorder.h"

namespace flatshard {
namespace {

/// The first text of all ranks that is not empty, cut at a length that any
/// parameter's name leaves room in.
std::string first_text(Mesh& mesh, const std::string& mine) {
  constexpr std::int64_t kLength = 512;
  const at::Tensor text = at::zeros({kLength}, at::kChar);
  std::memcpy(
      text.data_ptr(),
      mine.data(),
      std::min<std::size_t>(mine.size(), kLength - 1));
  if (mesh.size() == 1) {
    return mine;
  }
  const at::Tensor own = text.to(mesh.device());
  const at::Tensor all = at::empty({mesh.size() * kLength}, own.options());
  const CollectiveScope scope("name of a gradient");
  mesh.world().all_gather(all, own);
  const at::Tensor host = all.cpu();
  mesh.check();
  const auto* bytes = static_cast<const char*>(host.data_ptr());
  for (int rank = 0; rank < mesh.size(); ++rank) {
    if (bytes[rank * kLength] != '\0') {
      return bytes + rank * kLength;
    }
  }
  return "";
}

}  // namespace

std::string name_nonfinite_gradient(const Runtime& runtime, Mesh& mesh) {
  std::string mine;
  try {
    NanCheck::check_reduced_gradients(runtime);
  } catch (const Error& error) {
    mine = error.what();
  }
  return first_text(mesh, mine);
}

}  // namespace flatshard
