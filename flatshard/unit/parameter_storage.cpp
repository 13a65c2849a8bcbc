#include "flatshard/unit/parameter_storage.h"

#include "flatshard/nn/module.h"

#include <ATen/ATen.h>

namespace flatshard {

ParameterStorage::ParameterStorage(
    at::Tensor parameter,
    at::ScalarType dtype,
    at::Device device)
    : parameter_(std::move(parameter)) {
  const at::NoGradGuard no_grad;
  const auto sizes = parameter_.sizes().vec();
  nbytes_ = parameter_.numel() * c10::elementSize(dtype);
  // A tensor of these sizes over a storage that never had memory.
  storage_ = at::Storage(
      at::Storage::use_byte_size_t(),
      nbytes_,
      at::DataPtr(nullptr, device),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  at::Tensor shell =
      at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  shell.set_(storage_, 0, sizes);
  nn::set_parameter_data(parameter_, shell);
  clear();
}

void ParameterStorage::point_at(void* data) const {
  at::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(at::DataPtr(data, impl->device()));
  impl->set_nbytes(nbytes_);
}

void ParameterStorage::clear() const {
  at::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(at::DataPtr(nullptr, impl->device()));
  impl->set_nbytes(0);
}

bool ParameterStorage::is_intact() const {
  return parameter_.storage().unsafeGetStorageImpl() ==
         storage_.unsafeGetStorageImpl();
}

}  // namespace flatshard
