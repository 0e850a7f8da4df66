// Drafts of a model, one token behind another: compressor_runtime/speculation/chain.py for one text and the likeliest
// tokens.
#pragma once

#include <functional>

#include "speculation.h"

namespace chain {

using speculation::Guess;
using speculation::Tokens;

constexpr size_t kLevels = 8;  // of confidence, each a sort of guesses

// Guesses are sorted by the model's own probability of them.
class Chain : public speculation::Drafts {
 public:
  // Reads a token so many places behind the stored ones; logits [V] of what comes after it.
  using Step = std::function<std::vector<float>(int64_t token, size_t ahead)>;

  Chain(const char* name, Step step, std::optional<size_t> length)
      : Drafts(name, priors(), length), step_(std::move(step)) {}

 private:
  Guess guess(const Tokens& text, const Tokens& ends, size_t most) override {
    Guess found;
    int64_t token = text.back();
    while (found.tokens.size() < most && pace_.goes_on(found.chances, acceptance_.mean(), most)) {
      auto begin = speculation::Pace::Clock::now();
      std::vector<float> logits = step_(token, found.tokens.size());
      token = std::max_element(logits.begin(), logits.end()) - logits.begin();
      size_t sort = confidence(logits, token);
      found.add(token, (found.chances.empty() ? 1 : found.chances.back()) * acceptance_.chance(sort), sort);
      pace_.note_draft(speculation::Pace::since(begin));
      if (std::count(ends.begin(), ends.end(), token) != 0) break;
    }
    return found;
  }

  static size_t confidence(const std::vector<float>& logits, int64_t token) {
    double sum = 0, top = logits[size_t(token)];
    for (float logit : logits) sum += std::exp(logit - top);
    return std::isnan(sum) ? 0 : std::min(size_t(kLevels / sum), kLevels - 1);
  }

  static std::vector<double> priors() {  // as often as the model says of itself
    std::vector<double> found;
    for (size_t level = 0; level < kLevels; ++level) found.push_back((double(level) + 0.5) / kLevels);
    return found;
  }

  Step step_;
};

}  // namespace chain
