// A stand-in for a GPU: tensors are on `cuda:0`, their memory is the host's, and operators run the kernels of the CPU on it.
//
// What a GPU refuses is refused: tensors of both devices in one operator, more memory than there is. Everything is synchronous,
// there is one stream, and random numbers are those of the CPU's generator. torch is a build without CUDA; see cuda.py for
// what such a build lacks in Python.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>

#include "aliases.h"

namespace stand_in {
namespace {

using Names = std::set<std::string>;
using Format = std::optional<c10::MemoryFormat>;
using Dtype = std::optional<c10::ScalarType>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return THE_GPU; }
  c10::Device getDevice() const override { return THE_GPU; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, THE_GPU); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(THE_GPU); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
} guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);

// Operators of which CUDA's kernels, too, take tensors of the host beside those of the GPU.
const Names TAKES_BOTH = {"aten::_index_put_impl_", "aten::index_put_", "aten::index_put", "aten::index", "aten::_foreach_copy_",
    "aten::_pin_memory", "aten::record_stream", "aten::is_same_size", "aten::set_data", "aten::resize_as_"};

// Operators whose results have a size or a value that the host must know.
const Names WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique_dim",
    "aten::_unique2"};

// The arguments of an operator become what a kernel of the CPU takes.
void to_host(c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) {
    value = aliases.of(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(aliases.of(each));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional<Tensor>(aliases.of(*each)) : std::nullopt);
    value = list;
  } else if (value.isDevice() && value.toDevice().is_cuda()) {
    value = c10::Device(c10::kCPU);
  } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
    value = c10::IValue();
  }
}

void to_gpu(c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) {
    value = aliases.result(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(aliases.result(each));
    value = list;
  }
}

// Any operator of the GPU that has no kernel below.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t begin = stack->size() - schema.arguments().size();
  Aliases aliases;
  for (size_t i = begin; i < stack->size(); ++i) to_host((*stack)[i], aliases);
  if (aliases.any && aliases.of_the_host.defined()) {
    const auto& self = (*stack)[begin];
    const bool self_is_of_the_host = self.isTensor() && !aliases.is_alias(self.toTensor());
    TORCH_CHECK(TAKES_BOTH.count(name) && !self_is_of_the_host,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ", a tensor of ",
        aliases.of_the_host.sizes(), " is on the CPU)");
  }
  if (WAITS.count(name)) ++syncs;
  {
    const KernelsOnly guard;
    op.callBoxed(stack);
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) to_gpu((*stack)[i], aliases);
}

c10::ScalarType chosen(Dtype dtype) { return dtype.value_or(c10::get_default_dtype_as_scalartype()); }
const c10::DispatchKeySet GPU_KEYS(c10::DispatchKey::CUDA);

Tensor empty(c10::SymIntArrayRef size, Dtype dtype, std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
    Format format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, GPU_KEYS, chosen(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, Dtype dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator, GPU_KEYS, chosen(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.device() != source.device() && !non_blocking) ++syncs;
  Aliases aliases;
  Tensor to = aliases.of(self), from = aliases.of(source);
  const KernelsOnly guard;
  to.copy_(from);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device().is_cuda(), "Attempted to set the storage of a tensor on device \"cuda:0\" to a storage on different "
      "device \"", source.device(), "\". This is no longer allowed; the devices must match.");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const int64_t begin = offset.guard_int(__FILE__, __LINE__);
  if (stride.empty() && !sizes.empty()) {
    impl->set_storage_offset(begin);
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), begin);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const std::vector<c10::SymInt> length{int64_t(source.nbytes() / self.dtype().itemsize())};
  return set_storage(self, std::move(source), 0, length, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_whole_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &device_allocator, true));
}

// What is there stays, as far as there is room for it.
void resize_storage(c10::StorageImpl* storage, size_t size) {
  auto fresh = device_allocator.allocate(size);
  if (const size_t kept = std::min<size_t>(size, storage->nbytes())) std::memcpy(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, Format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t needed = (impl->storage_offset() + self.numel()) * self.dtype().itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

void record_stream(Tensor&, c10::Stream) {}

// Kernels that only CUDA has: products of 16-bit matrices that are summed in 32 bits, and histograms of integers.
Tensor& addmm_out(const Tensor& self, const Tensor& a, const Tensor& b, c10::ScalarType dtype, const at::Scalar& beta,
    const at::Scalar& alpha, Tensor& out) {
  return at::addmm_out(out, self.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}
Tensor& mm_out(const Tensor& a, const Tensor& b, c10::ScalarType dtype, Tensor& out) {
  return at::mm_out(out, a.to(dtype), b.to(dtype));
}
Tensor mm(const Tensor& a, const Tensor& b, c10::ScalarType dtype) { return at::mm(a.to(dtype), b.to(dtype)); }

Tensor& histc_out(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high, Tensor& out) {
  Aliases aliases;
  Tensor from = aliases.of(self);
  const KernelsOnly guard;
  const Tensor counted = at::histc(from.to(at::kFloat), bins, low, high).to(self.scalar_type());
  out.resize_(counted.sizes());
  aliases.of(out).copy_(counted);
  return out;
}
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  Tensor out = at::empty({bins}, self.options());
  return at::histc_out(out, self, bins, low, high);
}

// Pinned memory of the host as a GPU sees it: the same bytes, a tensor of the GPU.
Tensor view_of_pinned(const Tensor& host) {
  auto* held = new c10::Storage(host.storage());
  const auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::Storage storage(c10::Storage::use_byte_size_t(), held->nbytes(), c10::DataPtr(held->mutable_data(), held, drop, THE_GPU),
      &device_allocator, false);
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), GPU_KEYS, host.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return view;
}

} // namespace
} // namespace stand_in

TORCH_LIBRARY(stand_in, m) { m.def("view_of_pinned(Tensor host) -> Tensor", &stand_in::view_of_pinned); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&stand_in::run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &stand_in::empty);
  m.impl("empty_strided", &stand_in::empty_strided);
  m.impl("copy_", &stand_in::copy_);
  m.impl("set_.source_Storage_storage_offset", &stand_in::set_storage);
  m.impl("set_.source_Storage", &stand_in::set_whole_storage);
  m.impl("set_.source_Tensor", &stand_in::set_tensor);
  m.impl("set_", &stand_in::set_nothing);
  m.impl("resize_", &stand_in::resize_);
  m.impl("record_stream", &stand_in::record_stream);
  m.impl("addmm.dtype_out", &stand_in::addmm_out);
  m.impl("mm.dtype_out", &stand_in::mm_out);
  m.impl("mm.dtype", &stand_in::mm);
  m.impl("histc.out", &stand_in::histc_out);
  m.impl("histc", &stand_in::histc);
}

namespace at {
namespace {

struct Hooks final : CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override { ++stand_in::syncs; }
  bool isPinnedPtr(const void* data) const override { return stand_in::PinnedAllocator::has(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &stand_in::pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &stand_in::device_allocator; }
  Device getDeviceFromPtr(void*) const override { return stand_in::THE_GPU; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
};

// torch made its hooks, of a build without CUDA, when it was imported, and keeps them. They have no state, so ours replace
// them by their table of methods.
[[maybe_unused]] const bool are_replaced = [] {
  c10::SetAllocator(kCUDA, &stand_in::device_allocator, 1);
  static Hooks ours;
  auto& theirs = const_cast<CUDAHooksInterface&>(detail::getCUDAHooks());
  *reinterpret_cast<void**>(&theirs) = *reinterpret_cast<void**>(&ours);
  return true;
}();

} // namespace
} // namespace at

// What cuda.py calls.
extern "C" {
void stand_in_resize(void* storage, int64_t size) { stand_in::resize_storage(static_cast<c10::StorageImpl*>(storage), size); }
int64_t stand_in_allocated() { return stand_in::memory.allocated; }
int64_t stand_in_peak() { return stand_in::memory.peak; }
int64_t stand_in_refusals() { return stand_in::memory.refusals; }
void stand_in_reset_peak() { stand_in::memory.peak = stand_in::memory.allocated.load(); }
void stand_in_limit(int64_t bytes) { stand_in::memory.limit = bytes; }
int64_t stand_in_syncs() { return stand_in::syncs; }
}
