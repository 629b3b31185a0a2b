// Tensors of the GPU as tensors of the CPU, for the time of one operator: the same memory, sizes and strides under another device.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <unordered_map>

#include "memory.h"

namespace stand_in {

using at::Tensor;

// While it lives, the kernels of the CPU are called as they are: autograd and autocast have had their turn on the GPU's tensors.
struct KernelsOnly {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

class Aliases {
 public:
  // The alias of a tensor of the GPU; any other tensor is noted and returned as it is.
  Tensor of(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0 && tensor.is_cpu()) of_the_host = tensor; // CUDA takes scalars of the host anywhere
      return tensor;
    }
    any = true;
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
        shared(tensor), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    originals_.emplace(impl, tensor);
    keys_.emplace(alias.storage().unsafeGetStorageImpl(), tensor.key_set());
    return alias;
  }

  bool is_alias(const Tensor& tensor) const { return originals_.count(tensor.unsafeGetTensorImpl()) > 0; }

  // What a kernel of the CPU has returned, as a tensor of the GPU: one that was given to it, a view of one, or a new one.
  Tensor result(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    const auto found = originals_.find(tensor.unsafeGetTensorImpl());
    if (found != originals_.end()) {
      follow(found->second, tensor);
      return found->second;
    }
    const auto of_view = keys_.find(tensor.storage().unsafeGetStorageImpl());
    // A view has the keys of its base, because it is an inference tensor if that is one.
    Tensor made = of_view == keys_.end()
        ? at::detail::make_tensor<c10::TensorImpl>(home(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype())
        : at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, home(tensor.storage()), of_view->second, tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
  }

  bool any = false; // tensor of the GPU was seen
  Tensor of_the_host; // the last tensor of the CPU that is no scalar

 private:
  // The storage of this tensor as one of the CPU; one for all tensors that lie in it.
  c10::Storage shared(const Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    auto [found, is_new] = forth_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) {
      found->second = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
          c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true);
      back_.emplace(found->second.unsafeGetStorageImpl(), storage);
    }
    return found->second;
  }

  // The storage of the GPU that an alias came from. Memory that the kernel has allocated becomes the GPU's, and counts.
  c10::Storage home(const c10::Storage& storage) {
    const auto found = back_.find(storage.unsafeGetStorageImpl());
    if (found != back_.end()) return found->second;
    struct Held {
      c10::Storage storage;
      size_t size;
      static void drop(void* context) {
        auto* held = static_cast<Held*>(context);
        memory.give_back(held->size);
        delete held;
      }
    };
    memory.take(storage.nbytes());
    auto* held = new Held{storage, storage.nbytes()};
    c10::Storage result(c10::Storage::use_byte_size_t(), storage.nbytes(),
        c10::DataPtr(held->storage.mutable_data(), held, &Held::drop, THE_GPU), &device_allocator, true);
    back_.emplace(storage.unsafeGetStorageImpl(), result);
    return result;
  }

  // An output that the kernel has resized: the tensor of the GPU becomes so, too.
  void follow(const Tensor& original, const Tensor& alias) {
    const bool has_moved = alias.storage().data() != original.storage().data();
    if (!has_moved && alias.sizes() == original.sizes() && alias.strides() == original.strides()) return;
    const auto storage = back_.find(alias.storage().unsafeGetStorageImpl());
    if (storage != back_.end() && alias.storage().data() != storage->second.data()) back_.erase(storage);
    auto* impl = original.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(home(alias.storage()));
    impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> forth_, back_; // storages: to their aliases, and from them
  std::unordered_map<c10::TensorImpl*, Tensor> originals_; // by alias
  std::unordered_map<c10::StorageImpl*, c10::DispatchKeySet> keys_; // of the originals, by storage of the alias
};

} // namespace stand_in
