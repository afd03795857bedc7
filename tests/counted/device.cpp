// A device that can tell when the host reads it: torch's PrivateUse1, with its memory on the host.
//
// Kernels are those of the CPU, on tensors that share the memory of the device's. What is different
// is what a GPU would notice:
//   read    the host waits for a value: item(), tolist(), bool(), nonzero(), a copy to pageable
//           memory, or a copy to pinned memory that is not asynchronous
//   upload  a copy from the host that is not asynchronous, or not from pinned memory
//   send    a copy from pinned memory of the host that is asynchronous, in another stream than 0
//   order   a stream waits for an event of another one; the host does not
//   fetch   an asynchronous copy to pinned memory; until an event or a wait shows that it is
//           complete, the target holds bytes of 0xff, so whoever looks too early gets NaN
//   query   an event or a stream is asked whether the device has passed it
//   wait    the host waits for an event, a stream or the device
// Each is told to a Python function, which is called in the thread that did it.

#include <ATen/core/Tensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kKind, 0);

// ---- Who is told -------------------------------------------------------------------------------

PyObject* listener = nullptr;  // never freed: threads of torch may outlive the interpreter
thread_local int unseen = 0;
std::atomic<int64_t> ticks{0};
thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream{0};

void tell(const char* what, const std::string& how, int64_t age = 0) {
  if (unseen > 0 || listener == nullptr) {
    return;
  }
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(listener)(what, how, age);
}

// ---- Memory ------------------------------------------------------------------------------------

void free_held(void* held) {
  delete static_cast<c10::DataPtr*>(held);
}

// The same memory, as that of another device.
c10::DataPtr moved(c10::DataPtr&& from, c10::Device device) {
  void* data = from.get();
  return c10::DataPtr(data, new c10::DataPtr(std::move(from)), free_held, device);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    return moved(c10::GetDefaultCPUAllocator()->allocate(size), kDevice);
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

DeviceMemory device_memory;
std::mutex pinned_lock;
std::map<const char*, size_t> pinned_blocks;

struct Pinned {
  c10::DataPtr block;
};

void free_pinned(void* held) {
  auto* pinned = static_cast<Pinned*>(held);
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_blocks.erase(static_cast<const char*>(pinned->block.get()));
  }
  delete pinned;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned_blocks.upper_bound(static_cast<const char*>(data));
  if (data == nullptr || after == pinned_blocks.begin()) {
    return false;
  }
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    auto* pinned = new Pinned{c10::GetDefaultCPUAllocator()->allocate(std::max<size_t>(size, 1))};
    void* data = pinned->block.get();
    {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned_blocks[static_cast<const char*>(data)] = std::max<size_t>(size, 1);
    }
    return c10::DataPtr(data, pinned, free_pinned, c10::Device(c10::kCPU));
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;

// ---- Tensors of the host on the memory of the device, and back ----------------------------------

at::Tensor with_storage(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  return made;
}

void free_storage(void* held) {
  delete static_cast<c10::Storage*>(held);
}

c10::Storage shared(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  void* data = storage.mutable_data();
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(data, new c10::Storage(storage), free_storage, device),
      allocator,
      /*resizable=*/true);
}

at::Tensor on_host(const at::Tensor& tensor) {
  auto storage = shared(tensor.storage(), c10::kCPU, c10::GetDefaultCPUAllocator());
  return with_storage(tensor, std::move(storage), c10::DispatchKey::CPU);
}

at::Tensor on_device(const at::Tensor& tensor) {
  auto storage = shared(tensor.storage(), kDevice, &device_memory);
  return with_storage(tensor, std::move(storage), c10::DispatchKey::PrivateUse1);
}

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kKind;
}

// ---- Copies that are under way -------------------------------------------------------------------

struct Copy {
  int64_t number;
  at::Tensor target, value;
};

std::mutex queue_lock;
std::vector<Copy> under_way;
int64_t last_number = 0;
std::atomic<int64_t> lag{0}, delay{0};

void complete(int64_t number) {
  std::vector<Copy> done;
  {
    std::lock_guard<std::mutex> guard(queue_lock);
    auto later = std::stable_partition(under_way.begin(), under_way.end(), [&](const Copy& copy) {
      return copy.number <= number;
    });
    std::move(under_way.begin(), later, std::back_inserter(done));
    under_way.erase(under_way.begin(), later);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& copy : done) {
    copy.target.copy_(copy.value);
  }
}

int64_t newest() {
  std::lock_guard<std::mutex> guard(queue_lock);
  return last_number;
}

std::string shape(const at::Tensor& tensor) {
  std::string text = c10::toString(tensor.scalar_type());
  text += "[";
  for (auto size : tensor.sizes()) {
    text += (text.back() == '[' ? "" : ", ") + std::to_string(size);
  }
  return text + "]";
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (is_ours(source) && is_ours(target)) {
    on_host(target).copy_(on_host(source));
  } else if (is_ours(source)) {
    if (source.numel() == 0) {
      return target;
    }
    auto alike = source.scalar_type() == target.scalar_type() && target.is_non_overlapping_and_dense();
    if (non_blocking && alike && is_pinned(target.const_data_ptr())) {
      tell("fetch", "copy of " + shape(source) + " to pinned memory");
      auto value = on_host(source).clone();
      std::memset(target.mutable_data_ptr(), 0xff, target.nbytes());
      std::lock_guard<std::mutex> guard(queue_lock);
      under_way.push_back({++last_number, target, value});
    } else {
      const bool pinned = is_pinned(target.const_data_ptr());
      tell("read", "copy of " + shape(source) + " to " + (pinned ? "pinned" : "pageable") +
           " memory" + (non_blocking ? "" : ", blocking"));
      complete(newest());
      target.copy_(on_host(source));
    }
  } else {
    if (source.numel() > 0 && non_blocking && is_pinned(source.const_data_ptr())) {
      if (current_stream != 0) tell("send", "copy of " + shape(source) + " in stream " + std::to_string(current_stream));
    } else if (source.numel() > 0) {
      const bool pinned = is_pinned(source.const_data_ptr());
      tell("upload", "copy of " + shape(source) + " from " + (pinned ? "pinned" : "pageable") +
           " memory" + (non_blocking ? "" : ", blocking"));
    }
    on_host(target).copy_(source);
  }
  return target;
}

c10::Scalar local_scalar(const at::Tensor& tensor) {
  tell("read", "value of " + shape(tensor));
  complete(newest());
  at::AutoDispatchBelowADInplaceOrView below;
  return on_host(tensor).item();
}

// ---- Everything else -----------------------------------------------------------------------------

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  auto options = at::TensorOptions().dtype(dtype).device(c10::kCPU);
  return on_device(at::empty(C10_AS_INTARRAYREF_SLOW(size), options, format));
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  auto options = at::TensorOptions().dtype(dtype).device(c10::kCPU);
  return on_device(at::empty_strided(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), options));
}

at::Tensor& set_storage(
    at::Tensor& self,
    at::Storage source,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  std::vector<int64_t> strides(sizes.size(), 1);
  for (auto i = static_cast<int64_t>(sizes.size()) - 2; i >= 0; --i) {
    strides[i] = strides[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
  }
  impl->set_sizes_and_strides(
      sizes, stride.empty() ? c10::IntArrayRef(strides) : C10_AS_INTARRAYREF_SLOW(stride),
      offset.expect_int());
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, c10::SymInt(size), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

// Operations whose result has a shape, or is a number, that only the device knows.
const std::set<std::string> kReading = {
    "aten::equal",          "aten::nonzero",       "aten::nonzero.out",
    "aten::masked_select",  "aten::_unique",       "aten::_unique2",
    "aten::unique_dim",     "aten::bincount",      "aten::unique_consecutive",
    "aten::is_nonzero",     "aten::allclose",      "aten::masked_select.out",
    "aten::repeat_interleave.Tensor"};
const std::set<std::string> kIndexing = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::index_put",
    "aten::_index_put_impl_"};

class Arguments {
 public:
  explicit Arguments(const c10::OperatorHandle& op) : name_(c10::toString(op.operator_name())) {
    indexing_ = kIndexing.count(name_) > 0;
    if (kReading.count(name_) > 0) {
      tell("read", "result of " + name_);
    }
  }

  c10::IValue lower(const c10::IValue& value) {
    if (value.isTensor()) {
      return lower(value.toTensor());
    }
    if (value.isDevice()) {
      return value.toDevice().type() == kKind ? c10::IValue(c10::Device(c10::kCPU)) : value;
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& item : value.toTensorVector()) {
        list.push_back(lower(item));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& item : value.toOptionalTensorVector()) {
        if (item && indexing_ && is_ours(*item) &&
            (item->scalar_type() == at::kBool || item->scalar_type() == at::kByte)) {
          tell("read", name_ + " by a mask");
        }
        list.push_back(item ? std::make_optional(lower(*item)) : std::nullopt);
      }
      return list;
    }
    if (value.isList() && value.toListRef().size() > 0 && value.toListRef()[0].isTensor()) {
      TORCH_CHECK(false, name_, ": a list of another kind is not known to this device");
    }
    return value;
  }

  // What the operation did to the tensors it was given: a resize may have moved their memory.
  void settle() {
    TORCH_CHECK(!strangers_ || lent_.empty(), "Expected all tensors to be on the same device: ",
                name_, " has some on ", kDevice, " and some of more than 0 dimensions on the host");
    for (auto& [ours, theirs] : lent_) {
      auto* impl = ours.unsafeGetTensorImpl();
      if (theirs.storage().data() != ours.storage().data()) {
        auto storage = shared(theirs.storage(), kDevice, &device_memory);
        impl->storage().set_data_ptr_noswap(
            c10::DataPtr(storage.mutable_data(), new c10::Storage(storage), free_storage, kDevice));
        impl->storage().set_nbytes(storage.nbytes());
      }
      if (ours.sizes() != theirs.sizes() || ours.strides() != theirs.strides() ||
          ours.storage_offset() != theirs.storage_offset()) {
        impl->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
      }
    }
  }

  void check_before() {
    TORCH_CHECK(!strangers_ || lent_.empty(), "Expected all tensors to be on the same device: ",
                name_, " has some on ", kDevice, " and some of more than 0 dimensions on the host");
  }

  c10::IValue raise(const c10::IValue& value) {
    if (value.isTensor()) {
      return raise(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& item : value.toTensorVector()) {
        list.push_back(raise(item));
      }
      return list;
    }
    return value;
  }

 private:
  at::Tensor lower(const at::Tensor& tensor) {
    if (!is_ours(tensor)) {
      if (tensor.defined() && tensor.dim() > 0) {
        if (indexing_) {
          tell("upload", name_ + " by an index of the host, " + shape(tensor));
        } else {
          strangers_ = true;
        }
      }
      return tensor;
    }
    for (auto& [ours, theirs] : lent_) {
      if (ours.is_same(tensor)) {
        return theirs;
      }
    }
    // Two views of one storage stay two views of one storage.
    for (auto& [ours, theirs] : lent_) {
      if (ours.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        auto view = with_storage(tensor, theirs.storage(), c10::DispatchKey::CPU);
        lent_.emplace_back(tensor, view);
        return view;
      }
    }
    lent_.emplace_back(tensor, on_host(tensor));
    return lent_.back().second;
  }

  at::Tensor raise(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != c10::kCPU) {
      return tensor;
    }
    for (auto& [ours, theirs] : lent_) {
      if (theirs.is_same(tensor)) {
        return ours;
      }
    }
    for (auto& [ours, theirs] : lent_) {
      if (theirs.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        return with_storage(tensor, ours.storage(), c10::DispatchKey::PrivateUse1);
      }
    }
    return on_device(tensor);
  }

  std::string name_;
  bool indexing_ = false, strangers_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> lent_;
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto num = op.schema().arguments().size();
  const auto first = stack->size() - num;
  Arguments arguments(op);
  for (auto i = first; i < stack->size(); ++i) {
    (*stack)[i] = arguments.lower((*stack)[i]);
  }
  arguments.check_before();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  arguments.settle();
  for (auto& value : *stack) {
    value = arguments.raise(value);
  }
}

// ---- Streams and events --------------------------------------------------------------------------

struct Mark {
  int64_t number = 0, tick = 0, asked = 0;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kKind;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return getNewStream(kDevice, 0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(kDevice);
    current_stream = stream.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (*event == nullptr) {
      *event = new Mark;
    }
    *static_cast<Mark*>(*event) = {newest(), ticks, 0, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    tell("order", "stream " + std::to_string(stream.id()) + " waits for an event",
         ticks - static_cast<Mark*>(event)->tick);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    auto* mark = static_cast<Mark*>(event);
    const bool passed = mark->asked++ >= lag && ticks - mark->tick >= delay;
    tell("query", passed ? "event: passed" : "event: not yet", ticks - mark->tick);
    if (passed) {
      complete(mark->number);
    }
    return passed;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    auto* mark = static_cast<Mark*>(event);
    tell("wait", "for an event", ticks - mark->tick);
    complete(mark->number);
  }
  bool queryStream(const c10::Stream&) const override {
    tell("query", "stream");
    complete(newest());
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {
    tell("wait", "for a stream");
    complete(newest());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    tell("wait", "for the device");
    complete(newest());
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> time =
        static_cast<Mark*>(to)->time - static_cast<Mark*>(from)->time;
    return time.count();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return kDevice;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = device_memory.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(kKind, &device_memory);
  at::setHostAllocator(kKind, &pinned_memory);
  c10::impl::DeviceGuardImplRegistrar registrar(kKind, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.def("listen", [](py::object function) { listener = function.release().ptr(); });
  module.def("hide", [](int by) { unseen += by; });
  module.def("tick", [] { ++ticks; });
  module.def("set_lag", [](int64_t queries) { lag = queries; });
  module.def("set_delay", [](int64_t steps) { delay = steps; });
}
