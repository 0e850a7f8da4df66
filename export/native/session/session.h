// A model with what it has read of several texts: compressor_runtime/session.py.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../early.h"
#include "hidden.h"

namespace runner {

// Texts of any lengths; each is read as if alone, with the same bits.
class Session : public speculation::Target {
 public:
  Session(const Kernels& kernels, const Model& model, size_t texts, int64_t capacity)
      : kernels_(kernels),
        model_(model),
        lengths_(texts),
        caches_(model, texts, std::min(capacity, model.limit)),
        parts_(kernels, model, caches_),
        hidden_(kernels) {}

  size_t texts() const override { return lengths_.size(); }

  // Appends the tokens that the only text begins with; logits [V] after the last.  Where the bundle predicts caches,
  // the others leave predicted keys and values.
  std::vector<float> prompt(const Sizes& ids) {
    if (!kernels_.has(kPredict) || ids.size() < 2) return append(ids);
    Sizes first(ids.begin(), ids.end() - 1);
    Sizes places = make_room(first);
    int64_t count = int64_t(first.size());
    std::vector<ffi::Any> arguments = {tensor(first).as_strided({1, count}, {count, 1}), tensor(places)};
    for (int64_t cache : {int64_t(0), model_.layers}) {
      for (int64_t i = cache; i < cache + model_.predicts; ++i) arguments.push_back(caches_.tensor(size_t(i)));
    }
    caches_.fill(kernels_.results(kPredict, std::move(arguments), 1)[0], count);
    advance(count);
    return append({ids.back()});
  }

  // Puts the only text of another session in the place of one; keys and values are copied.
  void take(int64_t slot, const Session& other) {
    int64_t length = other.lengths_[0];
    reserve({{}, {length - 1}, {}, {slot}, {length - 1}});
    caches_.take(slot, other.caches_, length);
    lengths_[size_t(slot)] = length;
  }

  std::vector<float> step(int64_t token) override {
    if (!hidden_.is_wanted()) return append({token});
    std::vector<float> logits = verified(speculation::kVerify, ahead({{token}, {0}, {0}}));
    hidden_.keep(0, 0);
    advance(1);
    return logits;
  }

  // Appends as many tokens to each text, [B, S]; logits [B, V] after the last of each.  The texts have the same length.
  std::vector<float> append(const Sizes& ids) {
    Sizes places = make_room(ids);
    int64_t count = int64_t(places.size());
    std::vector<float> logits = floats(call("main", ids, {int64_t(texts()), count}, {places, {count - 1}})[0]);
    hidden_.forget();
    advance(count);
    return logits;
  }

  std::vector<float> verify(const Sizes& ids, const Sizes& parents, const Sizes& slots) override {
    Rows rows = behind(ids, parents, slots);
    verified_rows_ = rows.row;
    if (!parts_.go_on_from_drafts(rows)) return verified(speculation::kVerify, rows);
    for (size_t index = 1; index + 1 < model_.parts.size(); ++index) parts_.run(index, rows);
    hidden_.forget_given();
    return parts_.end();
  }

  void accept(const speculation::Paths& paths) override {
    for (const auto& [slot, path] : paths) {
      int64_t& length = lengths_[size_t(slot)];
      for (size_t token : path) {  // a row moves towards the front, behind those that are there
        if (int64_t row = verified_rows_[token]; row != length) caches_.move_row(slot, row, length);
        ++length;
      }
      hidden_.keep(slot, path.back());
    }
  }

  std::vector<float> draft(const std::string& entry, const speculation::Reading& next) override {
    parts_.forget();  // it writes over what the first part left
    return verified(entry, ahead(next));
  }

  std::vector<float> draft_first(const speculation::Reading& next) override {
    Rows rows = ahead(next);
    parts_.run(0, rows);
    parts_.keep(rows, next.ahead);
    return parts_.end();
  }

  std::vector<float> draft_through(const std::vector<size_t>& parts, const speculation::Reading& next) override {
    parts_.forget();  // a verification runs the whole in one entry: an embedding is not worth its parts' calls
    Rows rows = ahead(next);
    parts_.run(0, rows);
    for (size_t index : parts) parts_.run(index, rows);
    return parts_.end();
  }

  speculation::Guesses heads(const speculation::Reading& following) override { return hidden_.heads(following); }

  // Appends a token of the only text that is read in stages; its position.
  int64_t advance_in_stages(int64_t token) {
    int64_t position = make_room({token})[0];
    advance(1);
    return position;
  }

  // The stages of tokens that are appended to the only text already.
  early::Stages stages() {
    auto begin = [this](const Sizes& ids, int64_t first) {
      parts_.run(0, in_a_row(ids, first));
      begun_ = ids, first_ = first;
      return parts_.stream();
    };
    auto run = [this, begin](size_t number, const Sizes& ids, int64_t first, const early::Rows& stream) {
      if (ids != begun_ || first != first_) begin(ids, first);  // what stages share depends on the places
      parts_.put_stream(stream, int64_t(ids.size()));
      parts_.run(1 + number, in_a_row(ids, first));
      return parts_.stream();
    };
    auto end = [this](const early::Rows& row) {
      parts_.put_stream(row, 1);
      return parts_.end();
    };
    return {begin, run, end};
  }

 private:
  // Tokens of the only text, one behind another, each behind the rows of the cache: no tree.
  static Rows in_a_row(const Sizes& ids, int64_t position) {
    Sizes positions(ids.size());
    std::iota(positions.begin(), positions.end(), position);
    return {ids, positions, Sizes(ids.size(), speculation::kRoot), Sizes(ids.size()), positions};
  }

  // Drafted tokens, each behind the rows of the cache, which has room then.
  Rows ahead(const speculation::Reading& next) {
    check_ids(model_, next.tokens);
    Rows rows{next.tokens, {}, Sizes(next.tokens.size(), speculation::kRoot), next.slots, {}};
    for (size_t i = 0; i < next.tokens.size(); ++i) {
      rows.position.push_back(lengths_[size_t(next.slots[i])] + int64_t(next.ahead[i]));
    }
    rows.row = rows.position;
    reserve(rows);
    return rows;
  }

  // Trees of tokens behind the stored ones, which have room then.
  Rows behind(const Sizes& ids, const Sizes& parents, const Sizes& slots) {
    check_ids(model_, ids);
    Rows rows{ids, {}, parents, slots, {}};
    Sizes next = lengths_;  // row of each text
    for (size_t t = 0; t < ids.size(); ++t) {
      bool is_first = parents[t] == speculation::kRoot;
      rows.position.push_back(is_first ? lengths_[size_t(slots[t])] : rows.position[size_t(parents[t])] + 1);
      rows.row.push_back(next[size_t(slots[t])]++);
    }
    reserve(rows);
    return rows;
  }

  // Makes room at the positions of some tokens behind the stored ones, and at their rows: a tree needs more of these.
  void reserve(const Rows& rows) {
    int64_t most = *std::max_element(rows.row.begin(), rows.row.end()) + 1;
    for (size_t t = 0; t < rows.position.size(); ++t) {
      int64_t length = lengths_[size_t(rows.slot[t])];
      if (rows.position[t] >= model_.limit) refuse_length(model_, rows.position[t] + 1 - length, length);
    }
    int64_t capacity = caches_.capacity();
    if (most > capacity) caches_.resize(std::max(most, std::min(model_.limit, 2 * capacity)));
  }

  // The positions [S] of tokens [B, S] that come next; there is room then.
  Sizes make_room(const Sizes& ids) {
    check_ids(model_, ids);
    Rows rows = in_a_row(Sizes(ids.size() / texts()), lengths_[0]);
    reserve(rows);
    return rows.position;
  }

  void advance(int64_t count) {
    for (int64_t& length : lengths_) length += count;
    parts_.forget();
  }

  // Logits [T, V] by an entry for drafted tokens.  Where heads draft, it also gives the hidden states that they read.
  std::vector<float> verified(const std::string& entry, const Rows& rows) {
    int64_t count = int64_t(rows.ids.size());
    Sizes order(rows.ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::vector<ffi::Tensor> found =
        call(entry, rows.ids, {1, count}, {rows.position, order, rows.parent, rows.slot, rows.row});
    hidden_.give(found, rows.ids.size(), entry);
    return floats(found[0]);
  }

  std::vector<ffi::Tensor> call(const std::string& entry, const Sizes& ids, const Sizes& shape,
                                const std::vector<Sizes>& places) {
    std::vector<ffi::Any> arguments = {tensor(ids).as_strided({shape[0], shape[1]}, {shape[1], 1})};
    for (const Sizes& values : places) arguments.push_back(tensor(values));
    for (size_t i = 0; i < caches_.count(); ++i) arguments.push_back(caches_.tensor(i));
    return kernels_.results(entry, std::move(arguments), 1);
  }

  const Kernels& kernels_;
  const Model& model_;
  Sizes lengths_;  // tokens that each text has stored
  Caches caches_;
  Parts parts_;
  Hidden hidden_;
  Sizes verified_rows_;  // of the tokens that were verified last
  Sizes begun_;  // tokens that the first stage read last, from this position on
  int64_t first_ = 0;
};

}  // namespace runner
