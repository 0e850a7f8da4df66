// Drafts of tokens by lookup, and when they pay: compressor_runtime/speculation for one text, with chains in place of
// trees.  Drafts decide how fast tokens come, never which.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lookup {

using Tokens = std::vector<int64_t>;

constexpr size_t kLongest = 8, kShortest = 2;  // tokens that must agree, at most and at least
constexpr size_t kMostDrafted = 15;  // in a verification, which has a row more: for 32 no row's bits depend on others

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

// How often a guess is right, by the tokens that agree: a prior that counts like two guesses, then what was seen.
class Acceptance {
 public:
  double chance(size_t agreeing) const { return chances_[std::min(agreeing, kLongest)]; }

  // Compares a draft with the tokens that came.
  void learn(const Tokens& draft, size_t agreeing, const Tokens& came) {
    for (size_t i = 0; i < std::min(draft.size(), came.size()); ++i) {
      size_t kind = std::min(agreeing + i, kLongest);
      bool right = draft[i] == came[i];
      chances_[kind] += (right - chances_[kind]) / double(std::min<int64_t>(counts_[kind]++ + 3, kMemory));
      if (!right) break;
    }
  }

 private:
  static constexpr int64_t kMemory = 64;  // guesses that an estimate mostly rests on: texts change
  std::array<double, kLongest + 1> chances_{0.1, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85};
  std::array<int64_t, kLongest + 1> counts_{};
};

// Times of steps (one row) and verifications (more), as running medians, and what drafts gained, less what they cost.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  static double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  void wait(double seconds) { elapsed_s_ += seconds; }  // for a prompt, in which no token came

  void note(size_t rows, double seconds) {
    Size& size = sizes_[rows];
    size.times.push_back(seconds);
    if (size.times.size() > kWindow) size.times.pop_front();
    std::vector<double> sorted(size.times.begin(), size.times.end());
    std::sort(sorted.begin(), sorted.end());
    size.median = (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
    size.seen = ++rounds_;
    elapsed_s_ += seconds;
  }

  // A draft may have cost a share of all time, and part of a step, more than it has gained.
  bool may_draft() const { return knows() && account_s_ > -(kDebt * elapsed_s_ + kGraceSteps * step()); }

  // A probability of being accepted below which no drafted token pays: a row's share of a step.
  double least_chance() const {
    auto known = fresh();
    double slope = known.size() > 1 ? INFINITY : 0;
    for (size_t i = 1; i < known.size(); ++i) {
      slope = std::min(slope, (known[i].second - step()) / (known[i].first - 1));
    }
    return std::max(kLeastChance, slope / step());
  }

  // How many drafted tokens to verify so that most tokens per second are expected, of those with these probabilities.
  size_t choose(const std::vector<double>& chances) const {
    auto known = fresh();
    size_t best = 0;
    double tokens = 1, highest = (1 + kMargin) / step();
    for (size_t i = 0; i < chances.size(); ++i) {
      tokens += chances[i];
      double rate = tokens / expected_s(known, double(i + 2));
      if (rate > highest) best = i + 1, highest = rate;
    }
    return best;
  }

  void charge(double seconds) {  // for a draft
    elapsed_s_ += seconds;
    account_s_ -= seconds;
  }

  void settle(double seconds, size_t accepted) {  // after a verification: steps saved, less what it took longer
    account_s_ = std::min(account_s_ + double(accepted) * step() - (seconds - step()), kMostCreditSteps * step());
  }

 private:
  static constexpr size_t kWindow = 9;  // last times of each size, of which the median counts
  static constexpr int64_t kStaleRounds = 256;  // a size that was not seen for so long is tried again
  static constexpr double kRowGuess = 0.03;  // of a step: a further row's time, until one was measured
  static constexpr double kLeastChance = 0.02, kMargin = 0.03, kDebt = 0.006, kGraceSteps = 0.5;
  static constexpr double kMostCreditSteps = 20;  // a gain of long ago does not pay for long losses
  using Known = std::vector<std::pair<double, double>>;

  struct Size {
    std::deque<double> times;
    double median = 0;
    int64_t seen = 0;
  };

  bool knows() const {  // the first step of a process says little
    auto found = sizes_.find(1);
    return found != sizes_.end() && found->second.times.size() > 1;
  }
  double step() const { return sizes_.at(1).median; }

  Known fresh() const {  // rows and seconds, smallest first
    Known known;
    for (const auto& [rows, size] : sizes_) {
      if (rows == 1 || size.seen > rounds_ - kStaleRounds) known.emplace_back(double(rows), size.median);
    }
    return known;
  }

  // Measured, or on a line between measured sizes; beyond the largest, on that from a step through it.
  double expected_s(const Known& known, double rows) const {
    auto [below, seconds] = known[0];
    for (const auto& [size, time_s] : known) {
      if (size > rows) return seconds + (time_s - seconds) * (rows - below) / (size - below);
      below = size, seconds = time_s;
    }
    double slope = below == 1 ? kRowGuess * step() : std::max(0.0, seconds - step()) / (below - 1);
    return seconds + slope * (rows - below);
  }

  std::map<size_t, Size> sizes_;  // by rows
  int64_t rounds_ = 0;
  double elapsed_s_ = 0, account_s_ = 0;
};

struct Counts {
  int64_t verifications = 0, drafted = 0, accepted = 0, steps = 0, tokens = 0;  // tokens: but the prompt's own
  double seconds = 0;  // of drafts, steps and verifications

  std::string text() const {
    char line[200];
    double each = verifications == 0 ? 1 : 1 + double(accepted) / double(verifications);
    std::snprintf(line, sizeof line,
                  "lookup: %lld verifications, %lld tokens drafted, %lld accepted, %.2f tokens a verification, "
                  "%lld plain steps, %.1f tokens/s",
                  static_cast<long long>(verifications), static_cast<long long>(drafted),
                  static_cast<long long>(accepted), each, static_cast<long long>(steps),
                  seconds > 0 ? double(tokens) / seconds : 0.0);
    return line;
  }
};

// Drafts one text.  In each round `draft` is asked first, and `learn` told what came.
class Drafts {
 public:
  Counts counts;

  void read_prompt(double seconds) { pace_.wait(seconds); }

  // Tokens to verify behind `text`, at most `most`; none where a plain step is expected to be as fast.
  Tokens draft(const Tokens& text, const Tokens& ends, size_t most) {
    draft_.clear();
    most = std::min(most, kMostDrafted);
    if (most == 0 || !pace_.may_draft()) return {};
    auto begin = Pace::Clock::now();
    index_.extend(text);
    match_ = index_.longest();
    std::vector<double> chances;
    double chance = 1, least = pace_.least_chance();
    while (match_.length != 0 && draft_.size() < most) {
      chance *= acceptance_.chance(match_.length + draft_.size());
      if (!draft_.empty() && chance < least) break;  // a first one may be unlikely: so estimates rise again
      draft_.push_back(index_.at(match_, draft_.size()));
      chances.push_back(chance);
    }
    auto end = std::find_first_of(draft_.begin(), draft_.end(), ends.begin(), ends.end());
    chances.resize(size_t(end - draft_.begin()));  // an end needs no row of its own
    double seconds = Pace::since(begin);
    pace_.charge(seconds);
    counts.seconds += seconds;
    return Tokens(draft_.begin(), draft_.begin() + int64_t(pace_.choose(chances)));
  }

  // Books a plain step, or a verification of so many drafted tokens, and the tokens that the text gained.
  void learn(size_t drafted, size_t accepted, const Tokens& came, double seconds) {
    pace_.note(drafted + 1, seconds);
    counts.tokens += int64_t(came.size());
    counts.seconds += seconds;
    acceptance_.learn(draft_, match_.length, came);  // verified or not
    if (drafted == 0) {
      ++counts.steps;
      return;
    }
    pace_.settle(seconds, accepted);
    ++counts.verifications;
    counts.drafted += int64_t(drafted);
    counts.accepted += int64_t(accepted);
  }

 private:
  Index index_;
  Acceptance acceptance_;
  Pace pace_;
  Tokens draft_;  // the last, also where it did not pay
  Index::Match match_{0, 0};
};

}  // namespace lookup
