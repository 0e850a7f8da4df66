// Runs what verifies tokens part by part, and uses the first part of drafted tokens again when they are verified:
// compressor_runtime/speculation/parts.py.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../kernels.h"
#include "caches.h"

namespace runner {

constexpr const char* kStream = "stream";  // what the other parts give

// Tokens, a number of each for each, by the names of the entries' inputs.
struct Rows {
  Sizes ids, position, parent, slot, row;
};

inline std::vector<float> floats(const ffi::Tensor& rows) {
  if (rows.dtype() != DLDataType{kDLFloat, 32, 1} || !rows.IsContiguous() || rows.numel() == 0) {
    fail(kUnusable, "model.so: one of its entries returns no float32 rows; compress again");
  }
  auto* data = static_cast<const float*>(rows.data_ptr());
  return std::vector<float>(data, data + rows.numel());
}

inline ffi::Tensor floats(const std::vector<float>& values, const Sizes& shape) {
  Bytes bytes = zeros(values.size() * sizeof(float));
  std::memcpy(bytes.get(), values.data(), values.size() * sizeof(float));
  return tensor(bytes, shape, {kDLFloat, 32, 1});
}

class Parts {
 public:
  Parts(const Kernels& kernels, const Model& model, const Caches& caches)
      : kernels_(kernels), model_(model), caches_(caches) {}

  // Runs a part of the model on tokens, or on the stream alone; what it gives is kept by name.
  void run(size_t index, const Rows& rows) {
    const Part& facts = model_.parts[index];
    int64_t count = int64_t(rows.ids.size());
    std::vector<ffi::Any> arguments;
    for (const ffi::String& given : facts.takes) {
      std::string name = given;
      if (size_t digits = name.find("_cache_"); digits == 1) {
        size_t layer = size_t(std::stoll(name.substr(8)));
        arguments.push_back(caches_.tensor(layer + (name[0] == 'v' ? size_t(model_.layers) : 0)));
      } else if (auto value = values_.find(name); value != values_.end()) {
        arguments.push_back(value->second);
      } else if (name == "ids") {
        arguments.push_back(tensor(rows.ids).as_strided({1, count}, {count, 1}));
      } else {
        arguments.push_back(tensor(name == "parent" ? rows.parent
                                   : name == "slot" ? rows.slot
                                   : name == "row"  ? rows.row
                                   : name == "keep" ? every_row()
                                                    : rows.position));
      }
    }
    std::vector<ffi::Tensor> found = kernels_.results(facts.entry, std::move(arguments), facts.gives.size());
    for (size_t i = 0; i < facts.gives.size(); ++i) values_[facts.gives[i]] = found[i];
  }

  // Logits [T, V] of all rows of the stream, whichever parts they have been through.
  std::vector<float> end() {
    run(model_.parts.size() - 1, {});
    return floats(values_.at(kLogits));
  }

  std::vector<float> stream() const { return floats(values_.at(kStream)); }
  void put_stream(const std::vector<float>& rows, int64_t count) {
    values_[kStream] = floats(rows, {1, count, int64_t(rows.size()) / count});
  }

  // Keeps what the first part gave of drafted tokens, each so many behind the stored ones.
  void keep(const Rows& rows, const std::vector<size_t>& ahead) {
    for (size_t t = 0; t < ahead.size(); ++t) {
      Begun& begun = begun_[rows.slot[t]];
      if (begun.drafted.empty()) begun.length = rows.position[t] - int64_t(ahead[t]);
      if (ahead[t] > begun.drafted.size()) continue;
      begun.drafted.resize(ahead[t]);
      begun.drafted.push_back({rows.ids[t], {}});
      for (size_t i = 0; i < first().gives.size(); ++i) {
        begun.drafted.back().values.emplace(first().gives[i], given(i, t, ahead.size()));
      }
    }
  }

  void forget() { begun_.clear(); }  // other keys and values are in the caches behind the stored ones

  // Brings tokens to where the first part ends, with what drafts left of those that it has read at the same places
  // behind the same tokens; false where it has read none.
  bool go_on_from_drafts(const Rows& rows) {
    size_t count = rows.ids.size();
    std::vector<const Values*> found = reused(rows);
    std::vector<size_t> fresh, places(count);  // tokens that no draft has read, and the place of each among them
    for (size_t t = 0; t < count; ++t) {
      if (found[t] == nullptr) places[t] = fresh.size(), fresh.push_back(t);
    }
    if (fresh.size() == count) {
      forget();
      return false;
    }
    if (!fresh.empty()) {
      Rows own;
      for (size_t t : fresh) {
        // One whose parent was read before follows rows of the cache, as behind a shorter text.
        bool is_own = rows.parent[t] >= 0 && found[size_t(rows.parent[t])] == nullptr;
        own.ids.push_back(rows.ids[t]), own.position.push_back(rows.position[t]), own.slot.push_back(rows.slot[t]);
        own.parent.push_back(is_own ? int64_t(places[size_t(rows.parent[t])]) : speculation::kRoot);
        own.row.push_back(rows.row[t]);
      }
      run(0, own);
    }
    for (size_t i = 0; i < first().gives.size(); ++i) {
      const ffi::String& name = first().gives[i];
      if (first().axes[i] < 0) continue;  // the same for all
      std::vector<ffi::Tensor> pieces;
      for (size_t t = 0; t < count; ++t) {
        pieces.push_back(found[t] != nullptr ? found[t]->at(name) : given(i, places[t], fresh.size()));
      }
      values_[name] = joined(pieces, size_t(first().axes[i]));
    }
    forget();
    return true;
  }

 private:
  using Values = std::map<std::string, ffi::Tensor>;

  // A drafted token, and what the first part gave of it.
  struct Drafted {
    int64_t token;
    Values values;
  };

  // Drafted tokens of a text, one behind another.
  struct Begun {
    int64_t length;  // tokens stored
    std::vector<Drafted> drafted;
  };

  const Part& first() const { return model_.parts[0]; }

  // What the first part gave of one of the tokens that it read last.
  ffi::Tensor given(size_t index, size_t place, size_t count) const {
    const ffi::Tensor& all = values_.at(first().gives[index]);
    bool is_of_tokens = first().axes[index] >= 0 && count > 1;
    return is_of_tokens ? one_of(all, size_t(first().axes[index]), place, count) : all;
  }

  // What drafts left of each token at this very place behind these very tokens, or none.
  std::vector<const Values*> reused(const Rows& rows) const {
    std::vector<const Values*> found;
    for (size_t t = 0; t < rows.ids.size(); ++t) {
      found.push_back(nullptr);
      auto begun = begun_.find(rows.slot[t]);
      if (begun == begun_.end()) continue;
      const auto& [length, drafted] = begun->second;
      int64_t place = rows.row[t] - length, parent = rows.parent[t];
      bool follows = place == 0 ? parent < 0 : parent >= 0 && found[size_t(parent)] != nullptr;
      bool is_there = place >= 0 && place < int64_t(drafted.size()) && rows.row[t] == rows.position[t];
      if (follows && is_there && drafted[size_t(place)].token == rows.ids[t]) found[t] = &drafted[size_t(place)].values;
    }
    return found;
  }

  Sizes every_row() const {  // of the stream [1, T, C]
    ffi::ShapeView shape = values_.at(kStream).shape();
    Sizes rows(shape.size() < 2 ? 0 : size_t(shape[1]));
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }

  const Kernels& kernels_;
  const Model& model_;
  const Caches& caches_;
  Values values_;  // that parts gave, by name
  std::map<int64_t, Begun> begun_;  // by text
};

}  // namespace runner
