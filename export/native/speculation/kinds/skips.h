// Drafts with the model without some of its attentions and feed-forward networks (SWIFT, arXiv:2410.06916):
// compressor_runtime/speculation/kinds/skips.py.
#pragma once

#include <memory>

#include "../chain.h"

namespace speculation {

// Some of the parts of a model: those that run, how often its guesses agree, and the cost of one in steps, as measured
// when the model was compressed.
struct Subset {
  std::vector<size_t> kept;
  double agreement, cost;
};

class Skipping : public Draft {
 public:
  static constexpr const char* kName = "self";

  Skipping(Target& target, const std::vector<Subset>& subsets, Pace& pace, const Acceptance& acceptance)
      : Draft(kName), pace_(pace) {
    for (const Subset& subset : subsets) {
      Tried& tried = tried_.emplace_back(Tried{subset.cost, std::make_shared<Times>(), nullptr, 0});
      auto step = [&target, kept = subset.kept, times = tried.times](int64_t token, size_t ahead) {
        auto begin = Clock::now();
        Logits logits = target.draft_through(kept, token, ahead);
        times->add(since(begin));
        return logits;
      };
      tried.chain = std::make_unique<Chain>(kName, step, pace, acceptance, subset.agreement);
    }
  }

  void extend(const Tokens& text) override {  // the subset that drafted last learns how far it was right
    for (Tried& one : tried_) one.chain->extend(text);
  }

  Tree propose(const Room& room) override { return next().chain->propose(room); }

 private:
  static constexpr int64_t kOthersEach = 16;  // drafts, of which one is by another subset: so others are known too
  static constexpr size_t kChain = 8;  // tokens for which subsets are compared

  struct Tried {
    double cost;
    std::shared_ptr<Times> times;
    std::unique_ptr<Chain> chain;
    int64_t last;  // number of the draft that it made
  };

  // The subset that is expected to give most tokens per second, or one to try again.
  Tried& next() {
    ++drafts_;
    auto best = std::max_element(tried_.begin(), tried_.end(),
                                 [this](const Tried& a, const Tried& b) { return speedup(a) < speedup(b); });
    if (drafts_ % kOthersEach == 0 && tried_.size() > 1) {
      auto other = tried_.end();
      for (auto one = tried_.begin(); one != tried_.end(); ++one) {
        if (one != best && (other == tried_.end() || one->last < other->last)) other = one;
      }
      best = other;
    }
    best->last = drafts_;
    return *best;
  }

  double speedup(const Tried& one) const {
    if (!pace_.knows()) return best_speedup(one.chain->mean(), one.cost, std::vector<double>(kChain, 1.0));
    double step = pace_.seconds(1);
    std::vector<double> verification;
    for (size_t rows = 1; rows <= kChain; ++rows) verification.push_back(pace_.seconds(1 + rows) / step);
    return best_speedup(one.chain->mean(), one.times->is_known() ? one.times->median() / step : one.cost, verification);
  }

  Pace& pace_;
  std::vector<Tried> tried_;
  int64_t drafts_ = 0;
};

}  // namespace speculation
