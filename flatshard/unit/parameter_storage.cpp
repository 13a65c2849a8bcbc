#include "flatshard/unit/parameter_storage.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/module.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace flatshard {
namespace {

// The flag by which a StorageImpl refuses reads. torch never clears it, while
// the memory of a parameter returns. An explicit instantiation may name a
// private member.
template <bool c10::StorageImpl::*flag>
struct RefusalFlag {
  friend bool& refuses_reads(c10::StorageImpl& storage) {
    return storage.*flag;
  }
};
bool& refuses_reads(c10::StorageImpl& storage);
template struct RefusalFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

// Only a storage with an allocator is resizable.
struct RefusingAllocator : c10::Allocator {
  at::DataPtr allocate(std::size_t nbytes) override {
    FLATSHARD_THROW(
        usage,
        "expected no resize of an unsharded parameter, because its unit owns "
        "the memory, got one to {} bytes; resize a clone()",
        nbytes);
  }
  void copy_data(void* to, const void* from, std::size_t nbytes)
      const override {
    default_copy_data(to, from, nbytes);
  }
};

c10::Allocator* refusing_allocator() {
  static RefusingAllocator allocator;
  return &allocator;
}

// Tensor.numpy() marks the storage: it makes it not resizable.
at::Storage storage_without_memory(std::size_t nbytes, at::Device device) {
  return at::Storage(
      at::Storage::use_byte_size_t(),
      nbytes,
      at::DataPtr(nullptr, device),
      refusing_allocator(),
      /*resizable=*/true);
}

// Throws on access to its data, and has the owner for the text of the error.
struct RefusingStorage : c10::StorageImpl {
  RefusingStorage(std::size_t nbytes, at::Device device)
      : c10::StorageImpl(
            use_byte_size_t(),
            nbytes,
            at::DataPtr(nullptr, device),
            /*allocator=*/nullptr,
            /*resizable=*/false) {}

  ParameterOwner owner;
};

RefusingStorage& refusal(const at::Storage& storage) {
  return static_cast<RefusingStorage&>(*storage.unsafeGetStorageImpl());
}

std::string retired_message(const ParameterOwner& owner) {
  return fmt::format(
      "parameter {} of {} no longer exists: the Runtime that fully_shard "
      "returned was destroyed together with the weights; keep it as long as "
      "the model is used",
      owner.parameter,
      owner.unit);
}

}  // namespace

ParameterStorage::ParameterStorage(
    at::Tensor parameter,
    const std::string& unit,
    const std::string& name,
    at::ScalarType dtype,
    at::Device device)
    : parameter_(std::move(parameter)) {
  const at::NoGradGuard no_grad;
  const auto sizes = parameter_.sizes().vec();
  const auto strides = parameter_.strides().vec();
  nbytes_ = parameter_.numel() * c10::elementSize(dtype);
  // A tensor of these sizes over a storage that never had memory.
  storage_ = storage_without_memory(nbytes_, device);
  // It has the same size, so that views of it can be made. Access to their data
  // raises an error.
  refusing_ = at::Storage(c10::intrusive_ptr<c10::StorageImpl>(
      c10::make_intrusive<RefusingStorage>(nbytes_, device)));
  set_name(unit, name);
  at::Tensor shell =
      at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  shell.set_(storage_, 0, sizes, strides);
  nn::set_parameter_data(parameter_, shell);
  // A parameter made from `x.detach()` would not allow the changes below.
  parameter_.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
  clear();
}

std::optional<ParameterOwner> ParameterStorage::owner_of(
    const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return std::nullopt;
  }
  const auto* refusing = dynamic_cast<const RefusingStorage*>(
      tensor.storage().unsafeGetStorageImpl());
  if (refusing == nullptr) {
    return std::nullopt;
  }
  return refusing->owner;
}

void ParameterStorage::note_shared(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return;
  }
  at::StorageImpl* impl = tensor.storage().unsafeGetStorageImpl();
  if (impl->allocator() == refusing_allocator()) {
    impl->set_resizable(false);
  }
}

void ParameterStorage::check_not_shared() const {
  const at::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  if (impl->resizable()) {
    return;
  }
  // An array of a tensor that requires gradients refers to a detached tensor
  // of this storage. Views of autograd may refer to it, too.
  const bool is_shown = parameter_.storage().unsafeGetStorageImpl() == impl;
  if (parameter_.requires_grad() &&
      storage_.use_count() == (is_shown ? 2 : 1)) {
    return;
  }
  const ParameterOwner& owner = refusal(refusing_).owner;
  FLATSHARD_THROW(
      usage,
      "parameter {} of {} was passed to numpy() or DLPack while it was "
      "unsharded. Its unit is resharded now, so the array would read memory of "
      "other parameters; pass a copy, parameter.detach().clone()",
      owner.parameter,
      owner.unit);
}

void ParameterStorage::set_name(
    const std::string& unit,
    const std::string& name) const {
  ParameterOwner& owner = refusal(refusing_).owner;
  owner.unit = unit;
  owner.parameter = name;
  owner.retired = false;
  if (!has_values()) {
    set_access_error(fmt::format(
        "parameter {} of {} is stored in {} and has no values of this dtype: "
        "nn::Linear and modules that contain it read its planes "
        "(nn/weight_source.h). Exclude a parameter that other code reads; to "
        "read or write values, use the shards of its group "
        "(Runtime::all_groups)",
        name,
        unit,
        owner.stored_in));
    return;
  }
  set_access_error(fmt::format(
      "parameter {} of {} is resharded: it has values only while the unit "
      "computes. Call the unit itself, through its holder (`block(x)`, not "
      "`block->forward(x)` or one of its submodules); a module outside the "
      "unit that uses the parameter must register it with share_parameter; a "
      "view that outlives the unit's forward needs a clone(); to read or write "
      "values, use the shards of its group (Runtime::all_groups)",
      name,
      unit));
}

void ParameterStorage::set_access_error(const std::string& text) const {
  refusing_.unsafeGetStorageImpl()
      ->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
  storage_.unsafeGetStorageImpl()->get_extra_meta().custom_data_ptr_error_msg_ =
      text;
}

void ParameterStorage::store_in(const std::string& encoding) const {
  ParameterOwner& owner = refusal(refusing_).owner;
  owner.stored_in = encoding;
  set_name(std::string(owner.unit), std::string(owner.parameter));
}

bool ParameterStorage::has_values() const {
  return refusal(refusing_).owner.stored_in.empty();
}

void ParameterStorage::point_at(void* data) const {
  if (!has_values()) {
    return;
  }
  at::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  refuses_reads(*impl) = false;
  impl->set_resizable(true);
  impl->set_data_ptr_noswap(at::DataPtr(data, impl->device()));
  show(storage_);
}

void ParameterStorage::clear() const {
  at::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  if (released_) {
    refuses_reads(*impl) = false;
    impl->set_data_ptr_noswap(at::DataPtr(
        released_.get(),
        new std::shared_ptr<void>(released_),
        [](void* owner) { delete static_cast<std::shared_ptr<void>*>(owner); },
        impl->device()));
    show(storage_);
    return;
  }
  // Views of it raise an error, too, until it has memory again. Setting the
  // pointer makes the flag take effect.
  refuses_reads(*impl) = nbytes_ > 0;
  impl->set_data_ptr_noswap(at::DataPtr(nullptr, impl->device()));
  hide();
}

void ParameterStorage::retire() const {
  clear();
  if (released_) {
    return;  // its handler reports the access
  }
  ParameterOwner& owner = refusal(refusing_).owner;
  owner.retired = true;
  if (nbytes_ > 0) {
    set_access_error(retired_message(owner));
  }
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
