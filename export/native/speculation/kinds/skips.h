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

// The subsets of a model, and which one drafts next; texts share it.
class Choice {
 public:
  Choice(Target& target, const std::vector<Subset>& subsets, const Pace& pace) : pace_(pace) {
    for (const Subset& subset : subsets) {
      auto times = std::make_shared<Times>();
      auto step = [&target, kept = subset.kept, times](const Reading& next) {
        auto begin = Clock::now();
        Guesses found{target.draft_through(kept, next)};
        times->add(since(begin) / double(next.tokens.size()));
        return found;
      };
      auto guesser = std::make_shared<Guesser>(Guesser{step, Mean(subset.agreement)});
      tried_.push_back({subset.cost, times, guesser, 0});
    }
  }

  std::vector<std::shared_ptr<Guesser>> guessers() const {
    std::vector<std::shared_ptr<Guesser>> found;
    for (const Tried& one : tried_) found.push_back(one.guesser);
    return found;
  }

  // The subset that is expected to give most tokens per second, or one to try again.
  size_t next() {
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
    return size_t(best - tried_.begin());
  }

 private:
  static constexpr int64_t kOthersEach = 16;  // drafts, of which one is by another subset: so others are known too
  static constexpr size_t kChain = 8;  // tokens for which subsets are compared

  struct Tried {
    double cost;
    std::shared_ptr<Times> times;  // of a drafted token; of tokens in one call, the share of each
    std::shared_ptr<Guesser> guesser;
    int64_t last;  // number of the draft that it made
  };

  double speedup(const Tried& one) const {
    double mean = one.guesser->mean.value();
    if (!pace_.knows(1)) return best_speedup(mean, one.cost, std::vector<double>(kChain, 1.0));
    double step = pace_.seconds(1);
    std::vector<double> verification;
    for (size_t rows = 1; rows <= kChain; ++rows) verification.push_back(pace_.seconds(1 + rows) / step);
    return best_speedup(mean, one.times->is_known() ? one.times->median() / step : one.cost, verification);
  }

  const Pace& pace_;
  std::vector<Tried> tried_;
  int64_t drafts_ = 0;
};

// Drafts one text, each time by the subset that is best then.
class Skipping : public Draft {
 public:
  static constexpr const char* kName = "self";

  Skipping(std::shared_ptr<Choice> choice, int64_t slot, const Acceptance& acceptance)
      : Draft(kName), choice_(std::move(choice)) {
    for (auto& guesser : choice_->guessers()) {
      chains_.push_back(std::make_unique<Chain>(kName, guesser, slot, acceptance));
    }
  }

  void extend(const Tokens& text) override {  // the subset that drafted last learns how far it was right
    for (auto& chain : chains_) chain->extend(text);
  }

  void begin(const Room& room) override {
    own_ = choice_->next();
    chains_[own_]->begin(room);
  }

  std::optional<Wish> wish() const override { return chains_[own_]->wish(); }
  void read(const float* logits, size_t each, size_t width) override { chains_[own_]->read(logits, each, width); }
  Tree take() override { return chains_[own_]->take(); }

 private:
  std::shared_ptr<Choice> choice_;
  std::vector<std::unique_ptr<Chain>> chains_;  // by subset
  size_t own_ = 0;  // that drafts
};

}  // namespace speculation
