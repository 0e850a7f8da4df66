// Keys and values of the tokens that several texts have, and of drafted ones behind them.
#pragma once

#include <algorithm>
#include <vector>

#include "../model.h"
#include "../parameters.h"

namespace runner {

// The keys of all layers, then the values; of each [B, Hkv, capacity] rows, float32 or packed.
class Caches {
 public:
  Caches(const Model& model, size_t texts, int64_t capacity)
      : model_(model), texts_(int64_t(texts)), caches_(size_t(2 * model.layers)) {
    resize(capacity);
  }

  size_t count() const { return caches_.size(); }
  int64_t capacity() const { return capacity_; }

  ffi::Tensor tensor(size_t cache) const {
    int64_t width = model_.dense_cache ? model_.row_bytes / 4 : model_.row_bytes;
    DLDataType type = model_.dense_cache ? DLDataType{kDLFloat, 32, 1} : DLDataType{kDLUInt, 8, 1};
    return runner::tensor(caches_[cache], {texts_, heads_of(cache), capacity_, width}, type);
  }

  void move_row(int64_t text, int64_t from, int64_t to) {
    for (size_t i = 0; i < caches_.size(); ++i) {
      for (int64_t head = 0; head < heads_of(i); ++head) {
        std::memcpy(row(i, text, head, to), row(i, text, head, from), size_t(model_.row_bytes));
      }
    }
  }

  // Copies the first rows of another's only text.
  void take(int64_t text, const Caches& other, int64_t rows) {
    for (size_t i = 0; i < caches_.size(); ++i) {
      for (int64_t head = 0; head < heads_of(i); ++head) {
        std::memcpy(row(i, text, head, 0), other.row(i, 0, head, 0), size_t(rows * model_.row_bytes));
      }
    }
  }

  // Writes the first rows of the only text, as predicted: float32 [2 * layers, 1, heads, rows, width].
  void fill(const ffi::Tensor& predicted, int64_t rows) {
    int64_t bytes = rows * model_.row_bytes;
    if (predicted.dtype() != DLDataType{kDLFloat, 32, 1} || !predicted.IsContiguous() || !model_.dense_cache ||
        predicted.numel() * 4 != all_heads() * bytes) {
      fail(kUnusable, "model.so: its entry `predict` returns no keys and values; compress again");
    }
    auto* source = static_cast<const uint8_t*>(predicted.data_ptr());
    for (size_t i = 0; i < caches_.size(); ++i) {
      for (int64_t head = 0; head < heads_of(i); ++head, source += bytes) {
        std::memcpy(row(i, 0, head, 0), source, size_t(bytes));
      }
    }
  }

  void resize(int64_t capacity) {
    int64_t head_bytes, total, memory = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
    if (__builtin_mul_overflow(capacity, model_.row_bytes, &head_bytes) ||
        __builtin_mul_overflow(head_bytes, all_heads(), &total) || __builtin_mul_overflow(total, texts_, &total)) {
      total = INT64_MAX;
    }
    if (total > memory) {
      fail(kBadRequest, texts_, " sequences of ", capacity, " tokens: their keys, values and states take ", total,
           " bytes, more than this machine's memory; give fewer or shorter ones");
    }
    for (size_t i = 0; i < caches_.size(); ++i) {  // at most one is held twice
      int64_t heads = texts_ * heads_of(i);
      Bytes grown = zeros(size_t(heads * head_bytes));
      for (int64_t head = 0; head < heads && capacity_ != 0; ++head) {  // with rows of drafted tokens
        std::memcpy(grown.get() + head * head_bytes, row(i, 0, head, 0), size_t(capacity_ * model_.row_bytes));
      }
      caches_[i] = grown;
    }
    capacity_ = capacity;
  }

 private:
  int64_t heads_of(size_t cache) const { return model_.heads[cache % model_.heads.size()]; }  // keys, then values

  int64_t all_heads() const {  // of keys and values; read_model has checked them
    return 2 * std::accumulate(model_.heads.begin(), model_.heads.end(), int64_t(0));
  }

  uint8_t* row(size_t cache, int64_t text, int64_t head, int64_t place) const {
    return caches_[cache].get() + ((text * heads_of(cache) + head) * capacity_ + place) * model_.row_bytes;
  }

  const Model& model_;
  int64_t texts_, capacity_ = 0;
  std::vector<Bytes> caches_;
};

}  // namespace runner
