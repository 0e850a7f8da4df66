// How often guesses are right, from what became of earlier ones: compressor_runtime/speculation/acceptance.py.
#pragma once

#include <functional>
#include <map>
#include <utility>

#include "tree.h"

namespace speculation {

// An estimate begins at a prior that counts like two guesses, and moves with each outcome by 1 / (guesses + 3), at
// least by 1 / 64: texts change.
class Mean {
 public:
  explicit Mean(double value) : value_(value) {}

  double value() const { return value_; }

  void add(bool right) { value_ += (right - value_) / double(std::min<int64_t>(count_++ + 3, kMemory)); }

 private:
  static constexpr int64_t kMemory = 64;  // guesses that an estimate mostly rests on

  double value_;
  int64_t count_ = 0;
};

// Of each sort of guesses the probability that one is right, given that all before it are.
class Acceptance {
 public:
  using Prior = std::function<double(const Source&)>;

  explicit Acceptance(Prior prior) : prior_(std::move(prior)) {}

  double chance(const Source& source) const {
    auto found = found_.find(source);
    return found == found_.end() ? prior_(source) : found->second.value();
  }

  // Compares a draft, verified or not, with the tokens that came.
  void learn(const Tree& tree, const Tokens& came) {
    int64_t node = kRoot;
    for (int64_t token : came) {
      for (int64_t guess : tree.children(node)) {
        const Source& source = tree.sources[size_t(guess)];
        auto found = found_.find(source);
        if (found == found_.end()) found = found_.emplace(source, Mean(prior_(source))).first;
        found->second.add(tree.tokens[size_t(guess)] == token);
      }
      node = tree.child(node, token);
      if (node == kRoot) return;
    }
  }

 private:
  Prior prior_;
  std::map<Source, Mean> found_;
};

}  // namespace speculation
