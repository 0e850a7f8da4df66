// When drafts of tokens pay, and what became of them: compressor_runtime/speculation for one text, with chains in place of
// trees.  Drafts decide how fast tokens come, never which.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace speculation {

using Tokens = std::vector<int64_t>;

constexpr size_t kMostDrafted = 15;  // in a verification, which has a row more: for 32 no row's bits depend on others

// A chain of guesses.
struct Guess {
  Tokens tokens;
  std::vector<double> chances;  // that each is accepted, falling
  std::vector<size_t> sorts;  // of guesses, of which each has an estimate

  void add(int64_t token, double chance, size_t sort) {
    tokens.push_back(token);
    chances.push_back(chance);
    sorts.push_back(sort);
  }
};

// How often guesses of each sort are right, if those before them are: a prior that counts like two guesses, then what
// was seen.
class Acceptance {
 public:
  explicit Acceptance(std::vector<double> priors) : chances_(std::move(priors)), counts_(chances_.size()) {}

  double chance(size_t sort) const { return chances_[sort]; }

  // Compares a guess, verified or not, with the tokens that came.
  void learn(const Guess& guess, const Tokens& came) {
    for (size_t i = 0; i < std::min(guess.tokens.size(), came.size()); ++i) {
      bool right = guess.tokens[i] == came[i];
      double& chance = chances_[guess.sorts[i]];
      chance += (right - chance) / double(std::min<int64_t>(counts_[guess.sorts[i]]++ + 3, kMemory));
      if (!right) break;
    }
  }

 private:
  static constexpr int64_t kMemory = 64;  // guesses that an estimate mostly rests on: texts change
  std::vector<double> chances_;
  std::vector<int64_t> counts_;
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

  std::string text(const char* kind) const {
    char line[200];
    double each = verifications == 0 ? 1 : 1 + double(accepted) / double(verifications);
    std::snprintf(line, sizeof line,
                  "%s: %lld verifications, %lld tokens drafted, %lld accepted, %.2f tokens a verification, "
                  "%lld plain steps, %.1f tokens/s",
                  kind, static_cast<long long>(verifications), static_cast<long long>(drafted),
                  static_cast<long long>(accepted), each, static_cast<long long>(steps),
                  seconds > 0 ? double(tokens) / seconds : 0.0);
    return line;
  }
};

// Drafts one text.  In each round `draft` is asked first, and `learn` told what came.
class Drafts {
 public:
  Counts counts;

  // `name` is the kind's; `priors` are those of its sorts of guesses.
  Drafts(const char* name, std::vector<double> priors) : acceptance_(std::move(priors)), name_(name) {}
  virtual ~Drafts() = default;

  void read_prompt(double seconds) { pace_.wait(seconds); }

  // Tokens to verify behind `text`, at most `most`; none where a plain step is expected to be as fast.
  Tokens draft(const Tokens& text, const Tokens& ends, size_t most) {
    guess_ = Guess();
    most = std::min(most, kMostDrafted);
    if (most == 0 || !pace_.may_draft()) return {};
    auto begin = Pace::Clock::now();
    guess_ = guess(text, ends, most);
    auto end = std::find_first_of(guess_.tokens.begin(), guess_.tokens.end(), ends.begin(), ends.end());
    std::vector<double> useful = guess_.chances;
    useful.resize(size_t(end - guess_.tokens.begin()));  // an end needs no row of its own
    double seconds = Pace::since(begin);
    pace_.charge(seconds);
    counts.seconds += seconds;
    return Tokens(guess_.tokens.begin(), guess_.tokens.begin() + int64_t(pace_.choose(useful)));
  }

  // Books a plain step, or a verification of so many drafted tokens, and the tokens that the text gained.
  void learn(size_t drafted, size_t accepted, const Tokens& came, double seconds) {
    pace_.note(drafted + 1, seconds);
    counts.tokens += int64_t(came.size());
    counts.seconds += seconds;
    acceptance_.learn(guess_, came);  // verified or not
    if (drafted == 0) {
      ++counts.steps;
      return;
    }
    pace_.settle(seconds, accepted);
    ++counts.verifications;
    counts.drafted += int64_t(drafted);
    counts.accepted += int64_t(accepted);
  }

  std::string report() const { return counts.text(name_); }

 protected:
  // At most so many tokens that may follow the text; none behind an end is of use.
  virtual Guess guess(const Tokens& text, const Tokens& ends, size_t most) = 0;

  Acceptance acceptance_;
  Pace pace_;
  Guess guess_;  // the last, also where it did not pay

 private:
  const char* name_;
};

}  // namespace speculation
