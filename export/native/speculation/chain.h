// Drafts of a model, one token behind another as long as that pays, of several texts in lockstep:
// compressor_runtime/speculation/chain.py.
#pragma once

#include "acceptance.h"
#include "draft.h"
#include "pace.h"

namespace speculation {

// A model that drafts, and how often its guesses are right, of all levels of confidence and all texts.
struct Guesser {
  Stepper step;
  Mean mean = Mean(0.8);  // high at first, so that a draft is tried
};

// Each token is chosen as the text's own next one will be, with the same random number.  How often a guess is right is
// estimated by the draft's own probability of it.
class Chain : public Draft {
 public:
  Chain(Name name, std::shared_ptr<Guesser> guesser, int64_t slot, const Acceptance& acceptance)
      : Draft(name), guesser_(std::move(guesser)), acceptance_(acceptance), slot_(slot) {}

  void extend(const Tokens& text) override {
    size_t came = std::min(guessed_.size(), text.size() - known_);
    for (size_t i = 0; i < came; ++i) {
      bool right = guessed_[i] == text[known_ + i];
      guesser_->mean.add(right);
      if (!right) break;
    }
    guessed_.clear();
    known_ = text.size();
    next_ = text.back();
  }

  void begin(const Room& room) override {
    sampler_ = &room.sampler, ends_ = &room.ends;
    most_ = std::min(room.nodes, room.depth);
    numbers_ = room.sampler.ahead(most_);
  }

  std::optional<Wish> wish() const override {
    if (tree_.size() >= most_) return std::nullopt;
    return Wish{&guesser_->step, slot_, next_, tree_.size(), most_, tree_.chances, guesser_->mean.value()};
  }

  void read(const float* logits, size_t, size_t width) override {
    size_t ahead = tree_.size();
    next_ = sampler_->guess(logits, width, numbers_[ahead]);
    Source source{name, confidence(logits, width, next_)};
    int64_t before = int64_t(ahead) - 1;
    tree_.add(before, next_, tree_.chance(before) * acceptance_.chance(source), source);
    guessed_.push_back(next_);
    if (std::count(ends_->begin(), ends_->end(), next_) != 0) most_ = 0;  // no draft behind it is of use
  }

  static double prior(const Source& source) { return (double(source.first) + 0.5) / kLevels; }  // as it says of itself

 private:
  static constexpr size_t kLevels = 8;  // of confidence, each a sort of guesses

  static size_t confidence(const float* logits, size_t width, int64_t token) {
    double sum = 0, top = *std::max_element(logits, logits + width);
    for (size_t i = 0; i < width; ++i) sum += std::exp(logits[i] - top);
    return std::min(size_t(std::exp(logits[token] - top) / sum * kLevels), kLevels - 1);
  }

  std::shared_ptr<Guesser> guesser_;
  const Acceptance& acceptance_;
  int64_t slot_;  // the text
  const sampling::Sampler* sampler_ = nullptr;
  const Tokens* ends_ = nullptr;
  std::vector<double> numbers_;  // random ones, of the next tokens
  Tokens guessed_;
  int64_t next_ = kRoot;  // the token to be read
  size_t most_ = 0, known_ = 0;  // tokens of a draft, and of the text
};

// Goes on with the drafts of one kind, those that ask the same model in lockstep: it reads a token of each in one call,
// as long as that is expected to pay.  `texts` wait for them, which may have so many drafted tokens verified.
inline void draft_together(Name name, const std::vector<Draft*>& drafts, Pace& pace, size_t texts, size_t room) {
  Wishes wishes;
  auto renew = [&](size_t place) {
    wishes.erase(place);
    if (std::optional<Wish> wish = drafts[place]->wish()) wishes.emplace(place, std::move(*wish));
  };
  for (size_t place = 0; place < drafts.size(); ++place) renew(place);
  while (!wishes.empty()) {
    Wishes asked;
    for (const auto& [place, wish] : wishes) {
      if (wish.model == wishes.begin()->second.model) asked.emplace(place, wish);
    }
    Wishes going = pace.going(name, texts, room, asked);
    for (const auto& [place, wish] : asked) {
      if (going.count(place) == 0) wishes.erase(place);
    }
    if (going.empty()) continue;
    auto begin = Clock::now();
    Reading next;
    for (const auto& [place, wish] : going) {
      next.tokens.push_back(wish.token), next.ahead.push_back(wish.ahead), next.slots.push_back(wish.slot);
    }
    auto [logits, each] = (*going.begin()->second.model)(next);
    size_t row = 0, width = logits.size() / std::max<size_t>(1, going.size() * each);
    for (const auto& [place, wish] : going) {
      drafts[place]->read(logits.data() + row++ * each * width, each, width);
      renew(place);
    }
    if (each != 0) pace.note_draft(name, since(begin) / double(each), going.size());
  }
}

}  // namespace speculation
