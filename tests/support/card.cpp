// A card for torch: the device "card" (PrivateUse1), whose tensors compute as the CPU's do and whose bytes the host
// cannot touch. `support/card.py` builds and loads it.
//
// Memory: one range of addresses without access (what `data_ptr` gives), and the bytes behind it at a fixed distance.
// A read or write of the host at a card's address is a segmentation fault. Fresh and freed memory holds 0xFF, a NaN in
// each floating dtype.
//
// Operators: one boxed kernel for all. It lays CPU tensors over the card's bytes, calls the CPU's kernel, and makes
// card tensors of the results; a result that is a view stays one. As on CUDA, operands of two devices are refused
// unless one is a CPU scalar of an elementwise operator, or a CPU index of `index` and `index_put`.
//
// Copies: every copy from and to the host is counted with its bytes, and each call in which the host waits for the
// card. A copy with non_blocking=True between the card and pinned memory is late, as on a card: bytes for the host
// come at the next wait for the card, and until then the destination holds 0xFF; the host's bytes of a copy to the
// card may not change before the next wait (`races` counts those that did).
//
// Loss: after `card_set_lost(1)` every call fails but those that free memory, as after an error in a kernel of CUDA.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/histc.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto kCard = c10::DeviceType::PrivateUse1;
constexpr size_t kSpan = size_t{16} << 30;  // bytes of addresses, most of them never touched
constexpr size_t kAlignment = 512;
const c10::Device kDevice(kCard, 0);

struct Counts {
    std::atomic<int64_t> to_card{0}, to_card_bytes{0}, to_host{0}, to_host_bytes{0}, waits{0}, races{0}, launches{0};
};
Counts counts;

// Once a kernel has failed, a card fails every call but those that free memory.
std::atomic<bool> is_lost{false};

void require_card() {
    TORCH_CHECK(!is_lost, "card error: an illegal memory access was encountered");
}

// Memory

class Memory {
   public:
    Memory() {
        void* found = mmap(nullptr, 2 * kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(found != MAP_FAILED, "card: no addresses for ", 2 * kSpan, " bytes");
        base_ = static_cast<char*>(found);
        TORCH_CHECK(mprotect(base_ + kSpan, kSpan, PROT_READ | PROT_WRITE) == 0, "card: no memory");
        free_[0] = kSpan;
    }

    bool has(const void* pointer) const {
        return pointer >= base_ && pointer < base_ + kSpan;
    }

    char* bytes(const void* pointer) const {
        TORCH_CHECK(pointer == nullptr || has(pointer), "card: ", pointer, " is no address of the card");
        return pointer == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(pointer)) + kSpan;
    }

    void* take(size_t num_bytes) {
        const size_t size = rounded(num_bytes);
        const std::lock_guard lock(mutex_);
        if (used_ + size <= limit) {
            for (auto range = free_.begin(); range != free_.end(); ++range) {
                if (range->second < size) continue;
                const auto [start, length] = *range;
                free_.erase(range);
                if (length > size) free_[start + size] = length - size;
                sizes_[start] = size;
                used_ += size;
                std::memset(base_ + kSpan + start, 0xFF, size);
                return base_ + start;
            }
        }
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "card out of memory. Tried to allocate ", num_bytes, " bytes; ", used_, " of ",
            limit.load(), " are allocated.");
    }

    void give_back(void* pointer) {
        const size_t start = static_cast<char*>(pointer) - base_;
        const std::lock_guard lock(mutex_);
        const size_t size = sizes_.at(start);
        sizes_.erase(start);
        used_ -= size;
        std::memset(base_ + kSpan + start, 0xFF, size);
        auto range = free_.emplace(start, size).first;
        if (auto next = std::next(range); next != free_.end() && next->first == start + size) {
            range->second += next->second;
            free_.erase(next);
        }
        if (range != free_.begin()) {
            if (auto before = std::prev(range); before->first + before->second == start) {
                before->second += range->second;
                free_.erase(range);
            }
        }
    }

    size_t used() {
        const std::lock_guard lock(mutex_);
        return used_;
    }

    std::atomic<size_t> limit{size_t{2} << 30};

   private:
    static size_t rounded(size_t num_bytes) {
        return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    }

    char* base_;
    std::mutex mutex_;
    std::map<size_t, size_t> free_, sizes_;  // start -> bytes
    size_t used_ = 0;
};

Memory& memory() {
    static auto* made = new Memory;  // outlives every tensor
    return *made;
}

struct CardAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t num_bytes) override {
        if (num_bytes == 0) return {nullptr, kDevice};
        void* pointer = memory().take(num_bytes);
        return {pointer, pointer, raw_deleter(), kDevice};
    }

    c10::DeleterFnPtr raw_deleter() const override {
        return [](void* pointer) { memory().give_back(pointer); };
    }

    void copy_data(void* destination, const void* source, size_t num_bytes) const override {
        std::memcpy(memory().bytes(destination), memory().bytes(source), num_bytes);
    }
};
CardAllocator card_allocator;
REGISTER_ALLOCATOR(kCard, &card_allocator)

// Pinned memory of the host, and copies that are late

class PinnedMemory final : public c10::Allocator {
   public:
    c10::DataPtr allocate(size_t num_bytes) override {
        void* pointer = std::malloc(std::max<size_t>(num_bytes, 1));
        const std::lock_guard lock(mutex_);
        sizes_[static_cast<char*>(pointer)] = std::max<size_t>(num_bytes, 1);
        return {pointer, pointer, raw_deleter(), c10::Device(c10::kCPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override;

    void copy_data(void* destination, const void* source, size_t num_bytes) const override {
        std::memcpy(destination, source, num_bytes);
    }

    bool has(const void* pointer) const {
        const auto* address = static_cast<const char*>(pointer);
        const std::lock_guard lock(mutex_);
        auto next = sizes_.upper_bound(const_cast<char*>(address));
        if (next == sizes_.begin()) return false;
        --next;
        return address < next->first + next->second;
    }

    void give_back(char* pointer) {
        {
            const std::lock_guard lock(mutex_);
            sizes_.erase(pointer);
        }
        std::free(pointer);
    }

   private:
    mutable std::mutex mutex_;
    std::map<char*, size_t> sizes_;
};
PinnedMemory pinned;

class LateCopies {
   public:
    // Both keep the host's tensor alive until the next wait.
    void add_to_host(const at::Tensor& host, std::vector<char> bytes) {
        const std::lock_guard lock(mutex_);
        to_host_.push_back({host, std::move(bytes)});
    }

    void add_to_card(const at::Tensor& host) {
        const char* bytes = static_cast<const char*>(host.const_data_ptr());
        const std::lock_guard lock(mutex_);
        to_card_.push_back({host, std::vector<char>(bytes, bytes + host.nbytes())});
    }

    void finish() {
        std::vector<Late> to_host, to_card;
        {
            const std::lock_guard lock(mutex_);
            to_host.swap(to_host_);
            to_card.swap(to_card_);
        }
        for (auto& late : to_card) {
            counts.races += std::memcmp(late.host.const_data_ptr(), late.bytes.data(), late.bytes.size()) != 0;
        }
        for (auto& late : to_host) std::memcpy(late.host.mutable_data_ptr(), late.bytes.data(), late.bytes.size());
    }

   private:
    struct Late {
        at::Tensor host;
        std::vector<char> bytes;
    };
    std::mutex mutex_;
    std::vector<Late> to_host_, to_card_;
};
LateCopies& late_copies() {
    static auto* made = new LateCopies;
    return *made;
}

c10::DeleterFnPtr PinnedMemory::raw_deleter() const {
    return [](void* pointer) { pinned.give_back(static_cast<char*>(pointer)); };
}

void wait_for_card() {
    require_card();
    ++counts.waits;
    late_copies().finish();
}

void copied_to_card(int64_t num_bytes) {
    require_card();
    ++counts.to_card;
    counts.to_card_bytes += num_bytes;
}

void copied_to_host(int64_t num_bytes) {
    require_card();
    ++counts.to_host;
    counts.to_host_bytes += num_bytes;
    wait_for_card();
}

// Device, streams and events. A stream does its work at once; an event is a number.

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> num_streams{0};

struct CardGuard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = kCard;

    c10::DeviceType type() const override { return kCard; }
    c10::Device exchangeDevice(c10::Device device) const override {
        setDevice(device);
        return kDevice;
    }
    c10::Device getDevice() const override { return kDevice; }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() <= 0, "card: expected device card:0, got ", device);
    }
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++num_streams); }
    c10::Stream getNewStream(c10::Device, int) const override { return stream(++num_streams); }
    c10::Stream exchangeStream(c10::Stream next) const override {
        return stream(std::exchange(current_stream, next.id()));
    }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (*event == nullptr) *event = new char;
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<char*>(event); }
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeEvent(void* event) const override {
        if (event != nullptr) wait_for_card();
    }
    void synchronizeStream(const c10::Stream&) const override { wait_for_card(); }
    void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_card(); }
    double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }

   private:
    static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, CardGuard)

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = card_allocator.allocate(num_bytes);
    if (const size_t kept = std::min(impl->nbytes(), num_bytes)) {
        card_allocator.copy_data(data.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(num_bytes);
}

struct CardHooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex device) const override { CardGuard().setDevice({kCard, device}); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        setCurrentDevice(device);
        return 0;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
    bool isPinnedPtr(const void* pointer) const override { return pinned.has(pointer); }
    c10::Device getDeviceFromPtr(void* pointer) const override {
        TORCH_CHECK(memory().has(pointer), "card: ", pointer, " is no address of the card");
        return kDevice;
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
        resize_storage(storage, num_bytes);
    }
};
const bool hooks_registered = [] {
    at::RegisterPrivateUse1HooksInterface(new CardHooks);
    return true;
}();

// Operators

bool is_on_card(const at::Tensor& tensor) {
    return tensor.defined() && tensor.device().type() == kCard;
}

// CPU tensors over the bytes of card tensors, and card tensors of what the CPU's kernels return.
class Overlay {
   public:
    at::Tensor lay(const at::Tensor& tensor) {
        if (!is_on_card(tensor)) return tensor;
        auto* impl = tensor.unsafeGetTensorImpl();
        if (auto laid = laid_.find(impl); laid != laid_.end()) return laid->second.cpu;
        auto& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
        if (!storage) {
            storage = c10::Storage(
                c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                c10::DataPtr(memory().bytes(tensor.storage().data()), c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
                /*resizable=*/true);
            bases_[storage.unsafeGetStorageImpl()] = tensor;
        }
        auto cpu = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
        cpu.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        if (impl->is_wrapped_number()) cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
        laid_[impl] = {tensor, cpu};
        card_tensor_of_[cpu.unsafeGetTensorImpl()] = tensor;
        return cpu;
    }

    // Operands that the kernel gave another shape or more memory (`out=`).
    void carry_resizes() {
        for (auto& [impl, pair] : laid_) {
            auto& [card, cpu] = pair;
            auto* storage = cpu.storage().unsafeGetStorageImpl();
            if (storage->nbytes() != card.storage().nbytes()) {
                resize_storage(card.storage(), storage->nbytes());
                if (storage->nbytes()) {
                    std::memcpy(memory().bytes(card.storage().data()), storage->data(), storage->nbytes());
                }
            }
            if (card.sizes() != cpu.sizes() || card.strides() != cpu.strides() ||
                card.storage_offset() != cpu.storage_offset()) {
                impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
            }
        }
    }

    at::Tensor lift(const at::Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cpu()) return tensor;
        if (auto found = card_tensor_of_.find(tensor.unsafeGetTensorImpl()); found != card_tensor_of_.end()) {
            return found->second;
        }
        TORCH_CHECK(tensor.layout() == c10::kStrided, "card: expected strided tensors, got ", tensor.layout());
        auto* cpu_storage = tensor.storage().unsafeGetStorageImpl();
        const auto base = bases_.find(cpu_storage);
        if (base == bases_.end()) {
            const size_t num_bytes = cpu_storage->nbytes();
            c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, &card_allocator, /*resizable=*/true);
            if (num_bytes) std::memcpy(memory().bytes(storage.data()), cpu_storage->data(), num_bytes);
            auto card = at::detail::make_tensor<c10::TensorImpl>(
                std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
            card.unsafeGetTensorImpl()->set_sizes_and_strides(
                tensor.sizes(), tensor.strides(), tensor.storage_offset());
            bases_[cpu_storage] = card;
            return card;
        }
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(base->second.storage()), base->second.key_set(), tensor.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        return view;
    }

   private:
    struct Pair {
        at::Tensor card, cpu;
    };
    std::unordered_map<c10::TensorImpl*, Pair> laid_;
    std::unordered_map<c10::TensorImpl*, at::Tensor> card_tensor_of_;
    std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // of a card's storage, the CPU's over it
    std::unordered_map<c10::StorageImpl*, at::Tensor> bases_;       // of a CPU's storage, a tensor of the card's
};

// Operators that are not tagged "pointwise" and take a CPU scalar on CUDA.
bool takes_cpu_scalar(const c10::OperatorHandle& op) {
    static constexpr std::string_view names[] = {"aten::where",       "aten::masked_fill", "aten::masked_fill_",
                                                 "aten::fill_",       "aten::index_put",   "aten::index_put_",
                                                 "aten::_index_put_impl_", "aten::index_fill", "aten::index_fill_",
                                                 "aten::floor_divide", "aten::floor_divide_"};
    if (op.hasTag(at::Tag::pointwise)) return true;
    const std::string_view name = op.schema().name();
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool takes_cpu_index(const c10::OperatorHandle& op) {
    const std::string_view name = op.schema().name();
    return name == "aten::index" || name == "aten::_unsafe_index" || name == "aten::index_put" ||
           name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::_unsafe_index_put";
}

// Operators whose result has a size that the host must learn from the card, or that answer to the host.
bool waits(const c10::OperatorHandle& op) {
    static constexpr std::string_view names[] = {
        "aten::nonzero", "aten::nonzero_numpy", "aten::masked_select", "aten::equal",    "aten::_unique2",
        "aten::_unique", "aten::unique_dim",    "aten::bincount",      "aten::unique_consecutive",
        "aten::repeat_interleave"};
    const std::string_view name = op.schema().name();
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

void check_devices(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
    const auto& schema = op.schema();
    bool has_card = false;
    for (const auto& argument : arguments) {
        if (argument.isTensor()) has_card |= is_on_card(argument.toTensor());
        if (argument.isTensorList()) {
            for (const at::Tensor& tensor : argument.toTensorVector()) has_card |= is_on_card(tensor);
        }
    }
    auto check = [&](size_t i, const at::Tensor& tensor, bool is_index) {
        if (!tensor.defined() || is_on_card(tensor)) return;
        const auto* alias = schema.arguments()[i].alias_info();
        const bool is_written = alias != nullptr && alias->isWrite();
        if (tensor.is_cpu() && has_card && !is_written) {
            if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
            if (tensor.dim() == 0 && takes_cpu_scalar(op)) return;
            if (is_index && takes_cpu_index(op)) {
                // The shape function of `index` has copied and counted it.
                if (schema.name() != "aten::index") copied_to_card(static_cast<int64_t>(tensor.nbytes()));
                return;
            }
        }
        TORCH_CHECK(
            false, "Expected all tensors to be on the same device, but got ", schema.arguments()[i].name(), " is on ",
            tensor.device(), ", different from other tensors on card:0 (when checking argument in ",
            schema.operator_name(), ")");
    };
    for (size_t i = 0; i < arguments.size(); ++i) {
        const auto& argument = arguments[i];
        if (argument.isTensor()) {
            if (has_card) check(i, argument.toTensor(), false);
        } else if (argument.isTensorList()) {
            for (const at::Tensor& tensor : argument.toTensorVector()) {
                if (has_card) check(i, tensor, false);
            }
        } else if (argument.isOptionalTensorList()) {
            for (const auto& tensor : argument.toOptionalTensorVector()) {
                if (!tensor.has_value() || !tensor->defined()) continue;
                check(i, *tensor, true);
                // `index` asks `nonzero`; `index_put` of one value fills, and asks nothing.
                const bool is_mask = tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte;
                const bool is_put = schema.name().find("index_put") != std::string::npos;
                if (is_mask && is_put && arguments[i + 1].toTensor().numel() != 1) copied_to_host(sizeof(int64_t));
            }
        }
    }
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const size_t num_arguments = op.schema().arguments().size();
    const size_t first = stack->size() - num_arguments;
    check_devices(op, c10::ArrayRef<c10::IValue>(*stack).slice(first));
    if (!op.schema().hasAnyAliasInfo() || op.schema().is_mutable()) require_card();  // views launch nothing
    ++counts.launches;
    if (waits(op)) copied_to_host(sizeof(int64_t));

    Overlay overlay;
    for (size_t i = first; i < stack->size(); ++i) {
        auto& argument = (*stack)[i];
        if (argument.isTensor()) {
            argument = overlay.lay(argument.toTensor());
        } else if (argument.isTensorList()) {
            auto tensors = argument.toTensorVector();
            for (auto& tensor : tensors) tensor = overlay.lay(tensor);
            argument = c10::IValue(std::move(tensors));
        } else if (argument.isOptionalTensorList()) {
            auto tensors = argument.toOptionalTensorVector();
            for (auto& tensor : tensors) {
                if (tensor.has_value()) tensor = overlay.lay(*tensor);
            }
            argument = c10::IValue(std::move(tensors));
        } else if (argument.isDevice() && argument.toDevice().type() == kCard) {
            argument = c10::Device(c10::kCPU);
        }
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    overlay.carry_resizes();
    for (auto result = stack->end() - static_cast<std::ptrdiff_t>(op.schema().returns().size()); result != stack->end();
         ++result) {
        if (result->isTensor()) {
            *result = overlay.lift(result->toTensor());
        } else if (result->isTensorList()) {
            auto tensors = result->toTensorVector();
            for (auto& tensor : tensors) tensor = overlay.lift(tensor);
            *result = c10::IValue(std::move(tensors));
        }
    }
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> is_pinned, std::optional<c10::MemoryFormat> format) {
    TORCH_CHECK(!is_pinned.value_or(false), "Only dense CPU tensors can be pinned");
    CardGuard().setDevice(device.value_or(kDevice));
    return at::detail::empty_generic(
        size, &card_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
        format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> is_pinned) {
    TORCH_CHECK(!is_pinned.value_or(false), "Only dense CPU tensors can be pinned");
    CardGuard().setDevice(device.value_or(kDevice));
    return at::detail::empty_strided_generic(
        size, stride, &card_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
    require_card();
    Overlay overlay;
    const auto from = overlay.lay(source);
    auto to = overlay.lay(destination);
    const bool is_late = non_blocking && from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous() &&
                         from.sizes() == to.sizes();
    if (is_on_card(source) && is_on_card(destination)) {
        ++counts.launches;
    } else if (is_on_card(destination)) {
        copied_to_card(static_cast<int64_t>(source.nbytes()));
        if (is_late && pinned.has(source.const_data_ptr())) {
            late_copies().add_to_card(source);
        }
    } else if (is_late && pinned.has(destination.const_data_ptr())) {
        ++counts.to_host;
        counts.to_host_bytes += static_cast<int64_t>(source.nbytes());
        const char* bytes = static_cast<const char*>(from.const_data_ptr());
        late_copies().add_to_host(destination, std::vector<char>(bytes, bytes + from.nbytes()));
        std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());
        return destination;
    } else {
        copied_to_host(static_cast<int64_t>(source.nbytes()));
    }
    to.copy_(from);
    return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
    destination.resize_(source.sizes());
    return copy_from(source, destination, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
    copied_to_host(static_cast<int64_t>(tensor.element_size()));
    Overlay overlay;
    return overlay.lay(tensor).item();
}

// The CPU's kernel has no integers, CUDA's has.
at::Tensor histogram(const at::Tensor& values, int64_t num_bins, const at::Scalar& low, const at::Scalar& high) {
    ++counts.launches;
    Overlay overlay;
    return overlay.lift(at::histc(overlay.lay(values).to(at::kDouble), num_bins, low, high).to(values.scalar_type()));
}

std::vector<int64_t> dense_strides(c10::IntArrayRef size) {
    std::vector<int64_t> strides(size.size(), 1);
    for (size_t i = size.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(size[i], 1);
    return strides;
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
    TORCH_CHECK(
        is_on_card(input) && is_on_card(weight) && (!bias.has_value() || !bias->defined() || is_on_card(*bias)),
        "Expected all tensors to be on the same device, but got an input on ", input.device(), " and a weight on ",
        weight.device(), " (when checking argument in aten::convolution)");
    ++counts.launches;
    Overlay overlay;
    const auto laid_bias = bias.has_value() ? std::optional(overlay.lay(*bias)) : std::nullopt;
    return overlay.lift(at::convolution(
        overlay.lay(input), overlay.lay(weight), laid_bias, stride, padding, dilation, transposed, output_padding,
        groups));
}

void set_geometry(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
    const size_t num_bytes = at::detail::computeStorageNbytes(size, stride, tensor.element_size(), offset);
    if (num_bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), num_bytes);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
    TORCH_CHECK(
        !format.has_value() || *format == c10::MemoryFormat::Contiguous, "card: expected a contiguous format");
    if (tensor.sizes() != size) {
        set_geometry(tensor, size, dense_strides(size), tensor.storage_offset());
    }
    return tensor;
}

at::Tensor& set_storage_offset(
    at::Tensor& tensor, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
    TORCH_CHECK(storage.device_type() == kCard, "card: expected a storage on card:0, got ", storage.device());
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    const auto dense = dense_strides(size);
    set_geometry(tensor, size, stride.size() == size.size() ? stride : c10::IntArrayRef(dense), offset);
    return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage storage) {
    const auto length = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
    return set_storage_offset(tensor, std::move(storage), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
    return set_storage_offset(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &card_allocator, /*resizable=*/true);
    return set_storage_offset(tensor, std::move(storage), 0, {0}, {1});
}

void record_stream(at::Tensor&, c10::Stream) {}

// `parameter.data = tensor` of another device, which torch knows of CUDA.
bool can_take_data(const at::Tensor&, const at::Tensor&) {
    return true;
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
    library.impl("_has_compatible_shallow_copy_type", can_take_data);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", local_scalar);
    library.impl("convolution_overrideable", convolution);
    library.impl("histc", histogram);
    library.impl("resize_", resize);
    library.impl("set_.source_Storage_storage_offset", set_storage_offset);
    library.impl("set_.source_Storage", set_storage);
    library.impl("set_.source_Tensor", set_tensor);
    library.impl("set_", set_nothing);
    library.impl("record_stream", record_stream);
    library.impl("_has_compatible_shallow_copy_type", can_take_data);
}

}  // namespace

// For Python, by ctypes.
extern "C" {
// to_card, to_card_bytes, to_host, to_host_bytes, waits, races, launches
void card_read_counts(int64_t* values) {
    const std::atomic<int64_t>* fields[] = {&counts.to_card, &counts.to_card_bytes, &counts.to_host,
                                            &counts.to_host_bytes, &counts.waits, &counts.races, &counts.launches};
    for (const auto* field : fields) *values++ = *field;
}
int64_t card_used_bytes() { return static_cast<int64_t>(memory().used()); }
int64_t card_total_bytes() { return static_cast<int64_t>(memory().limit); }
void card_set_total_bytes(int64_t num_bytes) { memory().limit = static_cast<size_t>(num_bytes); }
// Status 1: the card is lost.
int card_wait() {
    if (is_lost) return 1;
    wait_for_card();
    return 0;
}
void card_set_lost(int lost) { is_lost = lost != 0; }
}
