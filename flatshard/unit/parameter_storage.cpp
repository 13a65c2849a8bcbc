#include "flatshard/unit/parameter_storage.h"

#include "flatshard/nn/module.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace flatshard {
namespace {

at::Storage storage_without_memory(std::size_t nbytes, at::Device device) {
  return at::Storage(
      at::Storage::use_byte_size_t(),
      nbytes,
      at::DataPtr(nullptr, device),
      /*allocator=*/nullptr,
      /*resizable=*/false);
}

}  // namespace

ParameterStorage::ParameterStorage(
    at::Tensor parameter,
    const std::string& name,
    at::ScalarType dtype,
    at::Device device)
    : parameter_(std::move(parameter)) {
  const at::NoGradGuard no_grad;
  const auto sizes = parameter_.sizes().vec();
  nbytes_ = parameter_.numel() * c10::elementSize(dtype);
  // A tensor of these sizes over a storage that never had memory.
  storage_ = storage_without_memory(nbytes_, device);
  refusing_ = storage_without_memory(0, device);
  set_name(name);
  at::Tensor shell =
      at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  shell.set_(storage_, 0, sizes);
  nn::set_parameter_data(parameter_, shell);
  // A parameter made from `x.detach()` would refuse the changes below.
  parameter_.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
  clear();
}

void ParameterStorage::set_name(const std::string& name) const {
  refusing_.unsafeGetStorageImpl()
      ->release_data_and_set_meta_custom_data_ptr_error_msg_(fmt::format(
          "parameter {} is released: its data exist only while its unit "
          "computes. Read the shards of its group, or register it with "
          "share_parameter in the module that uses it",
          name));
}

void ParameterStorage::point_at(void* data) const {
  at::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(at::DataPtr(data, impl->device()));
  impl->set_nbytes(nbytes_);
  show(storage_);
}

void ParameterStorage::clear() const {
  at::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  if (released_) {
    impl->set_data_ptr_noswap(at::DataPtr(
        released_.get(),
        new std::shared_ptr<void>(released_),
        [](void* owner) { delete static_cast<std::shared_ptr<void>*>(owner); },
        impl->device()));
    impl->set_nbytes(nbytes_);
    show(storage_);
    return;
  }
  impl->set_data_ptr_noswap(at::DataPtr(nullptr, impl->device()));
  impl->set_nbytes(0);
  // An empty parameter has no data at any time, and is never pointed at them
  // when its unit has nothing else to gather.
  show(nbytes_ > 0 ? refusing_ : storage_);
}

void ParameterStorage::show(const at::Storage& storage) const {
  if (is_intact()) {
    parameter_.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  }
}

bool ParameterStorage::is_intact() const {
  const auto* now = parameter_.storage().unsafeGetStorageImpl();
  return now == storage_.unsafeGetStorageImpl() ||
         now == refusing_.unsafeGetStorageImpl();
}

}  // namespace flatshard
