// Hidden states that heads draft from, and the heads: compressor_runtime/speculation/hidden.py.
#pragma once

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "parts.h"

namespace runner {

// Of the last token of each text, if it was verified and accepted, or read by a step behind a request for its state.
class Hidden {
 public:
  explicit Hidden(const Kernels& kernels) : kernels_(kernels) {}

  // What each head says of the tokens behind some that follow the last ones; none where a state is missing.
  speculation::Guesses heads(const speculation::Reading& following) {
    is_wanted_ = true;
    std::vector<float> states;
    for (int64_t slot : following.slots) {
      auto kept = kept_.find(slot);
      if (kept == kept_.end()) return {{}, 0};
      states.insert(states.end(), kept->second.begin(), kept->second.end());
    }
    int64_t count = int64_t(following.tokens.size());
    std::vector<ffi::Any> arguments = {floats(states, {1, count, int64_t(states.size()) / count}),
                                       tensor(following.tokens).as_strided({1, count}, {count, 1})};
    ffi::Tensor logits = kernels_.results(speculation::Heads::kName, std::move(arguments), 1)[0];
    ffi::ShapeView shape = logits.shape();
    if (shape.size() != 4 || shape[1] != count) {
      fail(kUnusable, "model.so: its entry `heads` returns no rows; compress again");
    }
    return {floats(logits), size_t(shape[2])};
  }

  bool is_wanted() const { return is_wanted_; }  // the next step is to keep a state

  // Takes what an entry gave beside logits of so many tokens: states [1, T, D], or none.
  void give(const std::vector<ffi::Tensor>& found, size_t tokens, const std::string& entry) {
    given_.reset();
    if (found.size() < 2) return;
    ffi::ShapeView shape = found[1].shape();
    bool fits = shape.size() == 3 && shape[1] == int64_t(tokens) && floats(found[1]).size() > 0;
    if (!fits) fail(kUnusable, "model.so: its entry `", entry, "` returns no hidden states; compress again");
    given_ = found[1];
  }

  void forget_given() { given_.reset(); }

  // Keeps what was given last of a token that a text has now as its last.
  void keep(int64_t slot, size_t token) {
    is_wanted_ = false;
    kept_.erase(slot);
    if (!given_) return;
    int64_t width = given_->shape()[2];
    auto* row = static_cast<const float*>(given_->data_ptr()) + int64_t(token) * width;
    kept_[slot].assign(row, row + width);
  }

  void forget() { kept_.clear(); }

 private:
  const Kernels& kernels_;
  std::optional<ffi::Tensor> given_;  // [1, T, D], of the tokens that were verified last
  std::map<int64_t, std::vector<float>> kept_;  // by text
  bool is_wanted_ = false;
};

}  // namespace runner
