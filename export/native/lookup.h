// Drafts of what followed earlier in the text: compressor_runtime/speculation/kinds/lookup.py, one chain of it.
#pragma once

#include <unordered_map>

#include "speculation.h"

namespace lookup {

using speculation::Guess;
using speculation::Tokens;

constexpr size_t kLongest = 8, kShortest = 2;  // tokens that must agree, at most and at least

// What followed where the text had the same last tokens, prompt lookup decoding (Saxena 2023,
// https://github.com/apoorvumang/prompt-lookup-decoding) with an index in place of a search.
class Index {
 public:
  struct Match {
    size_t length, place;  // tokens that agree, and the index of the token that followed; of no match, 0
  };

  // Appends those of `text` that it does not have yet.
  void extend(const Tokens& text) {
    for (; text_.size() < text.size(); text_.push_back(text[text_.size()])) {
      uint64_t hash = 0;
      for (size_t n = 1; n <= std::min(kLongest, text_.size()); ++n) {
        hash = mix(hash, text_[text_.size() - n]);
        if (n >= kShortest) places_[hash] = text_.size();
      }
    }
  }

  Match longest() const {  // the latest of those
    Match found{0, 0};
    uint64_t hash = 0;
    for (size_t n = 1; n <= std::min(kLongest, text_.size()); ++n) {
      hash = mix(hash, text_[text_.size() - n]);
      auto place = places_.find(hash);
      if (n < kShortest || place == places_.end()) continue;
      bool same = place->second >= n && std::equal(text_.end() - int64_t(n), text_.end(),
                                                   text_.begin() + int64_t(place->second - n));
      if (same) found = {n, place->second};  // else another n-gram has the same hash
    }
    return found;
  }

  // The token `offset` behind a match; where the text ends, it repeats itself.
  int64_t at(const Match& match, size_t offset) const {
    return text_[match.place + offset % (text_.size() - match.place)];
  }

 private:
  static uint64_t mix(uint64_t hash, int64_t token) {
    hash = (hash + uint64_t(token) + 1) * 0x9e3779b97f4a7c15;
    return hash ^ hash >> 29;
  }

  Tokens text_;
  std::unordered_map<uint64_t, size_t> places_;  // hash of an n-gram -> index of what followed it last
};

// Guesses are sorted by the tokens that agree, those drafted before among them.
class Lookup : public speculation::Drafts {
 public:
  Lookup() : Drafts("lookup", {0.1, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85}) {}

 private:
  Guess guess(const Tokens& text, const Tokens&, size_t most) override {
    index_.extend(text);
    Index::Match match = index_.longest();
    Guess found;
    double chance = 1, least = pace_.least_chance();
    while (match.length != 0 && found.tokens.size() < most) {
      size_t count = found.tokens.size(), sort = std::min(match.length + count, kLongest);
      chance *= acceptance_.chance(sort);
      if (count != 0 && chance < least) break;  // a first one may be unlikely: so estimates rise again
      found.add(index_.at(match, count), chance, sort);
    }
    return found;
  }

  Index index_;
};

}  // namespace lookup
