// The memory of the stand-in GPU: blocks of the host, counted as a GPU counts them and limited as a GPU is.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>

namespace stand_in {

const c10::Device THE_GPU(c10::kCUDA, 0);

struct Memory {
  std::atomic<int64_t> allocated{0}, peak{0}, limit{int64_t(1) << 60}, refusals{0};

  void take(size_t size) {
    const int64_t now = allocated += blocks(size);
    if (now > limit) {
      allocated -= blocks(size);
      ++refusals;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size,
          " bytes; the stand-in GPU has ", limit - allocated, " free");
    }
    int64_t before = peak;
    while (now > before && !peak.compare_exchange_weak(before, now)) {}
  }

  void give_back(size_t size) { allocated -= blocks(size); }

 private:
  static int64_t blocks(size_t size) { return int64_t((size + 511) / 512 * 512); } // as torch's allocator rounds
};

inline Memory memory;
inline std::atomic<int64_t> syncs{0}; // how often the host has waited for the GPU

inline void* host_memory(size_t size) { return std::aligned_alloc(64, (size + 63) / 64 * 64); }

struct Block {
  void* data;
  size_t size;

  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    memory.give_back(block->size);
    std::free(block->data);
    delete block;
  }
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, THE_GPU};
    memory.take(size);
    auto* block = new Block{host_memory(size), size};
    return {block->data, block, &Block::free, THE_GPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

// Host memory that a GPU reads by itself. What is pinned is known, because `is_pinned` asks.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? host_memory(size) : nullptr;
    if (data) {
      const std::lock_guard<std::mutex> held(lock());
      blocks().insert(data);
    }
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  static bool has(const void* data) {
    const std::lock_guard<std::mutex> held(lock());
    return blocks().count(data) > 0;
  }

 private:
  static void unpin(void* data) {
    {
      const std::lock_guard<std::mutex> held(lock());
      blocks().erase(data);
    }
    std::free(data);
  }
  // Never destroyed: tensors are freed until the very end of the process.
  static std::mutex& lock() { static auto* one = new std::mutex; return *one; }
  static std::set<const void*>& blocks() { static auto* one = new std::set<const void*>; return *one; }
};

inline DeviceAllocator device_allocator;
inline PinnedAllocator pinned_allocator;

} // namespace stand_in
