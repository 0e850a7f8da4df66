// Drafts of a model, one token behind another as long as that pays: compressor_runtime/speculation/chain.py.
#pragma once

#include "acceptance.h"
#include "draft.h"
#include "pace.h"

namespace speculation {

// Each token is chosen as the text's own next one will be, with the same random number.  How often a guess is right is
// estimated by the draft's own probability of it.
class Chain : public Draft {
 public:
  // Reads a token so many places behind the stored ones; logits [V] of what comes after it.
  using Step = std::function<Logits(int64_t token, size_t ahead)>;

  // `mean` is how often guesses of all levels are right: high at first, so that a draft is tried.
  Chain(Name name, Step step, Pace& pace, const Acceptance& acceptance, double mean = 0.8)
      : Draft(name), step_(std::move(step)), pace_(pace), acceptance_(acceptance), mean_(mean) {}

  double mean() const { return mean_.value(); }

  void extend(const Tokens& text) override {
    size_t came = std::min(guessed_.size(), text.size() - known_);
    for (size_t i = 0; i < came; ++i) {
      bool right = guessed_[i] == text[known_ + i];
      mean_.add(right);
      if (!right) break;
    }
    guessed_.clear();
    known_ = text.size();
    last_ = text.back();
  }

  Tree propose(const Room& room) override {
    Tree tree;
    int64_t token = last_;
    size_t most = std::min(room.nodes, room.depth);
    std::vector<double> numbers = room.sampler.ahead(most);
    while (tree.size() < most && pace_.goes_on(name, room.rows, {most, tree.chances, mean()})) {
      size_t ahead = tree.size();
      auto begin = Clock::now();
      Logits logits = step_(token, ahead);
      token = room.sampler.guess(logits.data(), logits.size(), numbers[ahead]);
      Source source{name, confidence(logits, token)};
      int64_t before = int64_t(ahead) - 1;
      tree.add(before, token, tree.chance(before) * acceptance_.chance(source), source);
      pace_.note_draft(name, since(begin));
      if (std::count(room.ends.begin(), room.ends.end(), token) != 0) break;
    }
    guessed_ = tree.tokens;
    return tree;
  }

  static double prior(const Source& source) { return (double(source.first) + 0.5) / kLevels; }  // as it says of itself

 private:
  static constexpr size_t kLevels = 8;  // of confidence, each a sort of guesses

  static size_t confidence(const Logits& logits, int64_t token) {
    double sum = 0, top = *std::max_element(logits.begin(), logits.end());
    for (float logit : logits) sum += std::exp(logit - top);
    return std::min(size_t(std::exp(logits[size_t(token)] - top) / sum * kLevels), kLevels - 1);
  }

  Step step_;
  Pace& pace_;
  const Acceptance& acceptance_;
  Mean mean_;
  Tokens guessed_;
  int64_t last_ = kRoot;
  size_t known_ = 0;  // tokens of the text
};

}  // namespace speculation
