// A model with what it has read.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "model.h"
#include "speculation/kinds/registry.h"

namespace runner {

constexpr const char* kStream = "stream";  // what the other parts give

// Tokens, a number of each for each, by the names of the entries' inputs.
struct Rows {
  Sizes ids, position, parent, slot, row;
};

// Keys and values of the tokens seen so far.
class Session : public speculation::Target {
 public:
  Session(const Kernels& kernels, const Model& model, int64_t capacity) : kernels_(kernels), model_(model) {
    resize(std::min(capacity, model.limit));
  }

  // Appends the tokens that a text begins with; logits [V] after the last.  Where the bundle predicts caches, the others
  // leave predicted keys and values.
  std::vector<float> prompt(const Sizes& ids) {
    if (!kernels_.has(kPredict) || ids.size() < 2) return append(ids);
    predict(Sizes(ids.begin(), ids.end() - 1));
    return append({ids.back()});
  }

  std::vector<float> step(int64_t token) override {
    if (!std::exchange(wants_hidden_, false)) return append({token});
    hidden_.clear();
    std::vector<float> logits = verified(speculation::kVerify, in_a_row(make_room({token}), {token}));
    accept({0});
    return logits;
  }

  std::vector<float> draft(const std::string& entry, int64_t token, size_t ahead) override {
    drafted_.clear();  // it writes over what the first part left
    return verified(entry, in_a_row(make_room({token}, int64_t(ahead)), {token}));
  }

  std::vector<float> draft_first(int64_t token, size_t ahead) override {
    part(0, in_a_row(make_room({token}, int64_t(ahead)), {token}));
    drafted_.resize(ahead);
    drafted_.push_back({token, {}});
    for (const ffi::String& name : model_.parts[0].gives) drafted_.back().values.emplace(name, values_.at(name));
    part(model_.parts.size() - 1, {});
    return floats(values_.at(kLogits));
  }

  std::vector<float> draft_through(const std::vector<size_t>& parts, int64_t token, size_t ahead) override {
    drafted_.clear();  // a verification runs the whole in one entry: an embedding is not worth its parts' calls
    Rows rows = in_a_row(make_room({token}, int64_t(ahead)), {token});
    part(0, rows);
    for (size_t index : parts) part(index, rows);
    part(model_.parts.size() - 1, {});
    return floats(values_.at(kLogits));
  }

  std::vector<float> verify(const Sizes& ids, const Sizes& parents) override {
    Rows rows = behind(ids, parents);
    if (!go_on_from_draft(rows)) return verified(speculation::kVerify, rows);
    for (size_t index = 1; index < model_.parts.size(); ++index) part(index, rows);
    given_.reset();
    return floats(values_.at(kLogits));
  }

  void accept(const std::vector<size_t>& path) override {
    for (size_t i = 0; i < path.size(); ++i) {  // a row moves towards the front, behind those that are there
      if (path[i] != i) move_row(position_ + int64_t(path[i]), position_ + int64_t(i));
    }
    wants_hidden_ = false;
    hidden_.clear();
    if (given_) {
      int64_t width = given_->shape()[2];
      auto* row = static_cast<const float*>(given_->data_ptr()) + int64_t(path.back()) * width;
      hidden_.assign(row, row + width);
    }
    advance(int64_t(path.size()));
  }

  std::vector<speculation::Logits> heads(int64_t following) override {
    wants_hidden_ = true;
    std::vector<speculation::Logits> found;
    if (hidden_.empty()) return found;
    Bytes bytes = zeros(hidden_.size() * sizeof(float));
    std::memcpy(bytes.get(), hidden_.data(), hidden_.size() * sizeof(float));
    ffi::Tensor state = tensor(bytes, {1, 1, int64_t(hidden_.size())}, {kDLFloat, 32, 1});
    std::vector<ffi::Any> arguments = {state, tensor(Sizes{following}).as_strided({1, 1}, {1, 1})};
    ffi::Tensor logits = kernels_.results(speculation::Heads::kName, std::move(arguments), 1)[0];
    std::vector<float> all = floats(logits);
    if (logits.shape().size() != 4) fail(kUnusable, "model.so: its entry `heads` returns no rows; compress again");
    for (auto width = logits.shape()[3], head = int64_t(0); head < logits.shape()[2]; ++head) {
      found.emplace_back(all.begin() + head * width, all.begin() + (head + 1) * width);
    }
    return found;
  }

  int64_t left() const { return model_.limit - position_; }

  // Appends a token that is read in stages; its position.
  int64_t advance_in_stages(int64_t token) {
    int64_t position = make_room({token});
    advance(1);
    return position;
  }

  // The stages of tokens that are appended already.
  early::Stages stages() {
    auto put = [this](const early::Rows& rows, size_t count) {
      Bytes bytes = zeros(rows.size() * sizeof(float));
      std::memcpy(bytes.get(), rows.data(), rows.size() * sizeof(float));
      values_[kStream] = tensor(bytes, {1, int64_t(count), int64_t(rows.size() / count)}, {kDLFloat, 32, 1});
    };
    auto begin = [this](const Sizes& ids, int64_t first) {
      part(0, in_a_row(first, ids));
      begun_ = ids, first_ = first;
      return floats(values_.at(kStream));
    };
    auto run = [this, put, begin](size_t number, const Sizes& ids, int64_t first, const early::Rows& stream) {
      if (ids != begun_ || first != first_) begin(ids, first);  // what stages share depends on the places
      put(stream, ids.size());
      part(1 + number, in_a_row(first, ids));
      return floats(values_.at(kStream));
    };
    auto end = [this, put](const early::Rows& row) {
      put(row, 1);
      part(model_.parts.size() - 1, {});
      return floats(values_.at(kLogits));
    };
    return {begin, run, end};
  }

 private:
  using Values = std::map<std::string, ffi::Tensor>;

  // A drafted token, and what the first part gave of it.
  struct Drafted {
    int64_t token;
    Values values;
  };

  static std::vector<float> floats(const ffi::Tensor& rows) {
    if (rows.dtype() != DLDataType{kDLFloat, 32, 1} || !rows.IsContiguous() || rows.numel() == 0) {
      fail(kUnusable, "model.so: one of its entries returns no float32 rows; compress again");
    }
    auto* data = static_cast<const float*>(rows.data_ptr());
    return std::vector<float>(data, data + rows.numel());
  }

  // Tokens one behind another, each behind the rows of the cache: no tree.
  static Rows in_a_row(int64_t position, const Sizes& ids) {
    Sizes positions(ids.size());
    std::iota(positions.begin(), positions.end(), position);
    return {ids, positions, Sizes(ids.size(), speculation::kRoot), Sizes(ids.size()), positions};
  }

  // Trees of tokens behind the stored ones, which have room then.
  Rows behind(const Sizes& ids, const Sizes& parents) {
    check(ids);
    Rows rows{ids, {}, parents, Sizes(ids.size()), Sizes(ids.size())};
    for (int64_t parent : parents) {
      rows.position.push_back(parent == speculation::kRoot ? position_ : rows.position[size_t(parent)] + 1);
    }
    std::iota(rows.row.begin(), rows.row.end(), position_);
    int64_t deepest = *std::max_element(rows.position.begin(), rows.position.end());
    reserve(deepest + 1 - position_, int64_t(ids.size()));
    return rows;
  }

  // Brings tokens to where the first part ends, with what a draft left of those that it has read at the same places
  // behind the same tokens; false where it has read none.
  bool go_on_from_draft(const Rows& rows) {
    size_t count = rows.ids.size();
    std::vector<const Values*> found(count);
    std::vector<size_t> fresh, places(count);  // tokens that no draft has read, and the place of each among them
    for (size_t t = 0; t < count; ++t) {
      size_t place = size_t(rows.row[t] - position_), parent = size_t(rows.parent[t]);
      bool follows = place == 0 ? rows.parent[t] < 0 : rows.parent[t] >= 0 && found[parent] != nullptr;
      bool same = place < drafted_.size() && drafted_[place].token == rows.ids[t] && rows.row[t] == rows.position[t];
      if (same && follows) found[t] = &drafted_[place].values;
      if (found[t] == nullptr) places[t] = fresh.size(), fresh.push_back(t);
    }
    if (fresh.size() == count) {
      drafted_.clear();
      return false;
    }
    if (!fresh.empty()) {
      Rows own;
      for (size_t t : fresh) {
        // One whose parent was read before follows rows of the cache, as behind a shorter text.
        bool is_own = rows.parent[t] >= 0 && found[size_t(rows.parent[t])] == nullptr;
        own.ids.push_back(rows.ids[t]), own.position.push_back(rows.position[t]), own.slot.push_back(0);
        own.parent.push_back(is_own ? int64_t(places[size_t(rows.parent[t])]) : speculation::kRoot);
        own.row.push_back(rows.row[t]);
      }
      part(0, own);
    }
    const Part& first = model_.parts[0];
    for (size_t i = 0; i < first.gives.size(); ++i) {
      if (first.axes[i] < 0) continue;  // the same for all
      size_t axis = size_t(first.axes[i]);
      std::vector<ffi::Tensor> pieces;
      for (size_t t = 0; t < count; ++t) {
        pieces.push_back(found[t] != nullptr ? found[t]->at(first.gives[i])
                                             : one_of(values_.at(first.gives[i]), axis, places[t], fresh.size()));
      }
      values_[first.gives[i]] = joined(pieces, axis);
    }
    drafted_.clear();
    return true;
  }

  // Runs a part of the model on tokens, or on the stream alone; what it gives is kept by name.
  void part(size_t index, const Rows& rows) {
    const Part& facts = model_.parts[index];
    int64_t count = int64_t(rows.ids.size());
    std::vector<ffi::Any> arguments;
    for (const ffi::String& given : facts.takes) {
      std::string name = given;
      if (size_t digits = name.find("_cache_"); digits == 1) {
        size_t layer = size_t(std::stoll(name.substr(8))), cache = layer + (name[0] == 'v' ? size_t(model_.layers) : 0);
        arguments.push_back(cache_tensor(caches_[cache], heads_of(cache)));
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

  Sizes every_row() const {  // of the stream [1, T, C]
    ffi::ShapeView shape = values_.at(kStream).shape();
    Sizes rows(shape.size() < 2 ? 0 : size_t(shape[1]));
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }

  // Appends the first tokens with predicted keys and values: float32 [2 * layers, 1, heads, tokens, width].
  void predict(const Sizes& ids) {
    Rows places = in_a_row(make_room(ids), ids);
    int64_t count = int64_t(ids.size()), bytes = count * model_.row_bytes;
    std::vector<ffi::Any> arguments = {tensor(ids).as_strided({1, count}, {count, 1}), tensor(places.position)};
    for (int64_t first : {int64_t(0), model_.layers}) {
      for (size_t i = size_t(first); i < size_t(first + model_.predicts); ++i) {
        arguments.push_back(cache_tensor(caches_[i], heads_of(i)));
      }
    }
    ffi::Tensor rows = kernels_.results(kPredict, std::move(arguments), 1)[0];
    if (rows.dtype() != DLDataType{kDLFloat, 32, 1} || !rows.IsContiguous() || !model_.dense_cache ||
        rows.numel() * 4 != 2 * std::accumulate(model_.heads.begin(), model_.heads.end(), int64_t(0)) * bytes) {
      fail(kUnusable, "model.so: its entry `predict` returns no keys and values; compress again");
    }
    auto* source = static_cast<const unsigned char*>(rows.data_ptr());
    for (size_t i = 0; i < caches_.size(); ++i) {
      for (int64_t head = 0; head < heads_of(i); ++head, source += bytes) {
        std::memcpy(row(i, head, 0), source, size_t(bytes));
      }
    }
    advance(count);
  }

  void check(const Sizes& ids) const {
    auto [least, most] = std::minmax_element(ids.begin(), ids.end());
    if (*least < 0 || *most >= model_.vocabulary) {  // the kernels would read outside the table
      fail(kBadRequest, "token ids from ", *least, " to ", *most, ": the model knows 0 to ", model_.vocabulary - 1,
           "; does the tokenizer belong to this model?");
    }
  }

  // The position of the first of some tokens that come next, behind the stored ones and some drafted ones.
  int64_t make_room(const Sizes& ids, int64_t drafted = 0) {
    check(ids);
    int64_t count = drafted + int64_t(ids.size());
    reserve(count, count);
    return position_ + drafted;
  }

  // Makes room for so many positions behind the stored tokens, and for so many rows, of which a tree needs more.
  void reserve(int64_t positions, int64_t rows) {
    if (positions > left()) {
      fail(kBadRequest, positions, " tokens after ", position_, " others: the model ends at ", model_.limit,
           " positions; give fewer tokens");
    }
    if (position_ + rows > capacity_) resize(std::max(position_ + rows, std::min(model_.limit, 2 * capacity_)));
  }

  void advance(int64_t count) {
    position_ += count;
    drafted_.clear();
  }

  // Appends tokens; logits [V] after the last of them.
  std::vector<float> append(const Sizes& ids) {
    Rows places = in_a_row(make_room(ids), ids);
    std::vector<float> logits = floats(call("main", ids, {places.position, {int64_t(ids.size()) - 1}})[0]);
    hidden_.clear();
    advance(int64_t(ids.size()));
    return logits;
  }

  // Logits [T, V] by an entry for drafted tokens.  Where heads draft, it also gives the hidden states that they read.
  std::vector<float> verified(const std::string& entry, const Rows& rows) {
    Sizes order(rows.ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::vector<ffi::Tensor> found = call(entry, rows.ids, {rows.position, order, rows.parent, rows.slot, rows.row});
    given_.reset();
    if (found.size() > 1) {
      ffi::ShapeView shape = found[1].shape();
      bool fits = shape.size() == 3 && shape[1] == int64_t(order.size()) && floats(found[1]).size() > 0;
      if (!fits) fail(kUnusable, "model.so: its entry `", entry, "` returns no hidden states; compress again");
      given_ = found[1];
    }
    return floats(found[0]);
  }

  std::vector<ffi::Tensor> call(const std::string& entry, const Sizes& ids, const std::vector<Sizes>& places) {
    int64_t count = int64_t(ids.size());
    std::vector<ffi::Any> arguments = {tensor(ids).as_strided({1, count}, {count, 1})};
    for (const Sizes& values : places) arguments.push_back(tensor(values));
    for (size_t i = 0; i < caches_.size(); ++i) arguments.push_back(cache_tensor(caches_[i], heads_of(i)));
    return kernels_.results(entry, std::move(arguments), 1);
  }

  int64_t heads_of(size_t cache) const { return model_.heads[cache % model_.heads.size()]; }  // keys, then values

  uint8_t* row(size_t cache, int64_t head, int64_t place) const {
    return caches_[cache].get() + (head * capacity_ + place) * model_.row_bytes;
  }

  void move_row(int64_t from, int64_t to) {
    for (size_t i = 0; i < caches_.size(); ++i) {
      for (int64_t head = 0; head < heads_of(i); ++head) {
        std::memcpy(row(i, head, to), row(i, head, from), size_t(model_.row_bytes));
      }
    }
  }

  ffi::Tensor cache_tensor(const Bytes& cache, int64_t heads) const {
    int64_t width = model_.dense_cache ? model_.row_bytes / 4 : model_.row_bytes;
    DLDataType type = model_.dense_cache ? DLDataType{kDLFloat, 32, 1} : DLDataType{kDLUInt, 8, 1};
    return tensor(cache, {1, heads, capacity_, width}, type);
  }

  void resize(int64_t capacity) {
    int64_t head_bytes, total, memory = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
    int64_t all = 2 * std::accumulate(model_.heads.begin(), model_.heads.end(), int64_t(0));  // checked by read_model
    if (__builtin_mul_overflow(capacity, model_.row_bytes, &head_bytes) ||
        __builtin_mul_overflow(head_bytes, all, &total) || total > memory) {
      fail(kBadRequest, capacity, " tokens: their keys and values take more than this machine's memory; give fewer");
    }
    caches_.resize(size_t(2 * model_.layers));
    for (size_t i = 0; i < caches_.size(); ++i) {  // at most one is held twice
      Bytes grown = zeros(size_t(heads_of(i) * head_bytes));
      for (int64_t head = 0; head < heads_of(i) && capacity_ != 0; ++head) {  // with rows of drafted tokens
        std::memcpy(grown.get() + head * head_bytes, row(i, head, 0), size_t(capacity_ * model_.row_bytes));
      }
      caches_[i] = grown;
    }
    capacity_ = capacity;
  }

  const Kernels& kernels_;
  const Model& model_;
  std::vector<Bytes> caches_;
  int64_t position_ = 0, capacity_ = 0;
  Values values_;  // that parts gave, by name
  std::vector<Drafted> drafted_;  // by the first part, behind the stored tokens, one behind another
  std::optional<ffi::Tensor> given_;  // hidden states [1, T, D] of the tokens that were verified last
  std::vector<float> hidden_;  // of the last token; empty where it was not kept
  bool wants_hidden_ = false;  // the next step is to keep it
  Sizes begun_;  // tokens that the first stage read last, from this position on
  int64_t first_ = 0;
};

}  // namespace runner
