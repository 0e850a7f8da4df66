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
#include <optional>
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

  double mean() const { return mean_; }  // of all sorts

  // Compares a guess, verified or not, with the tokens that came.
  void learn(const Guess& guess, const Tokens& came) {
    for (size_t i = 0; i < std::min(guess.tokens.size(), came.size()); ++i) {
      bool right = guess.tokens[i] == came[i];
      move(right, chances_[guess.sorts[i]], counts_[guess.sorts[i]]);
      move(right, mean_, count_);
      if (!right) break;
    }
  }

 private:
  static constexpr int64_t kMemory = 64;  // guesses that an estimate mostly rests on: texts change

  static void move(bool right, double& chance, int64_t& count) {
    chance += (right - chance) / double(std::min<int64_t>(count++ + 3, kMemory));
  }

  std::vector<double> chances_;
  std::vector<int64_t> counts_;
  double mean_ = 0.8;  // high, so that a draft is tried
  int64_t count_ = 0;
};

// Times of steps (one row) and verifications (more), as running medians, and what drafts gained, less what they cost.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Pace(bool always) : always_(always) {}  // drafts and verifies whether that pays or not

  static double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  void wait(double seconds) { elapsed_s_ += seconds; }  // for a prompt, in which no token came

  void note(size_t rows, double seconds) {
    sizes_[rows].add(seconds, ++rounds_);
    elapsed_s_ += seconds;
  }

  void note_draft(double seconds) { draft_.add(seconds, rounds_); }  // one token of a draft that runs a model

  // A draft may have cost a share of all time, and part of a step, more than it has gained.
  bool may_draft() const {
    return always_ || (knows() && account_s_ > -(kDebt * elapsed_s_ + kGraceSteps * step()));
  }

  // Whether a draft that runs a model should draft a further token, behind those with these probabilities: if further
  // ones are expected to bring more than their time at the price of time, the most tokens per second that plain steps
  // or the best chain promise (cost.py).  One that did not pay is tried again with one token.
  bool goes_on(const std::vector<double>& chances, double following, size_t most) const {
    if (always_) return true;
    bool stale = rounds_ - draft_.seen > kStaleRounds;
    if (draft_.times.size() < 2 || (chances.empty() && stale)) return chances.empty();
    auto known = fresh();
    double largest = known.back().first, expected = 1, power = 1, price = (1 + kMargin) / step();
    most = std::min(most, size_t(largest + std::max(kFirstRows, largest)) - 1);  // a guess far from those is none
    auto seconds = [&](size_t drafted) { return expected_s(known, double(1 + drafted)); };
    for (size_t n = 1; n <= most; ++n) {
      expected += power *= following;
      price = std::max(price, expected / (seconds(n) + double(n) * draft_.median));
    }
    size_t count = chances.size();
    double gained = 0, last = count == 0 ? 1 : chances.back(), now = price * seconds(count);
    for (size_t n = 1; count + n <= most; ++n) {
      gained += last *= following;
      if (gained - price * (seconds(count + n) + double(n) * draft_.median) > -now) return true;
    }
    return false;
  }

  // A probability of being accepted below which no drafted token pays: a row's share of a step.
  double least_chance() const {
    if (always_) return kLeastChance;
    auto known = fresh();
    double slope = known.size() > 1 ? INFINITY : 0;
    for (size_t i = 1; i < known.size(); ++i) {
      slope = std::min(slope, (known[i].second - step()) / (known[i].first - 1));
    }
    return std::max(kLeastChance, slope / step());
  }

  // How many drafted tokens to verify so that most tokens per second are expected, of those with these probabilities.
  size_t choose(const std::vector<double>& chances) const {
    if (always_) return chances.size();
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
    if (!knows()) return;
    account_s_ = std::min(account_s_ + double(accepted) * step() - (seconds - step()), kMostCreditSteps * step());
  }

 private:
  static constexpr size_t kWindow = 9;  // last times of each size, of which the median counts
  static constexpr int64_t kStaleRounds = 256;  // a size that was not seen for so long is tried again
  static constexpr double kRowGuess = 0.03;  // of a step: a further row's time, until one was measured
  static constexpr double kLeastChance = 0.02, kMargin = 0.03, kDebt = 0.003, kGraceSteps = 2;
  static constexpr double kFirstRows = 3;  // that a first chain of a model adds; later ones have twice those measured
  static constexpr double kMostCreditSteps = 20;  // a gain of long ago does not pay for long losses
  using Known = std::vector<std::pair<double, double>>;

  struct Size {
    std::deque<double> times;
    double median = 0;
    int64_t seen = 0;  // the round

    void add(double seconds, int64_t round) {
      times.push_back(seconds);
      if (times.size() > kWindow) times.pop_front();
      std::vector<double> sorted(times.begin(), times.end());
      std::sort(sorted.begin(), sorted.end());
      median = (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
      seen = round;
    }
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

  bool always_;
  std::map<size_t, Size> sizes_;  // by rows
  Size draft_;
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

  // `name` is the kind's, `priors` those of its sorts of guesses; a `length` is drafted whether it pays or not.
  Drafts(const char* name, std::vector<double> priors, std::optional<size_t> length)
      : acceptance_(std::move(priors)), pace_(length.has_value()), name_(name), most_(length.value_or(kMostDrafted)) {}
  virtual ~Drafts() = default;

  void read_prompt(double seconds) { pace_.wait(seconds); }

  // Tokens to verify behind `text`, at most `most`; none where a plain step is expected to be as fast.
  Tokens draft(const Tokens& text, const Tokens& ends, size_t most) {
    guess_ = Guess();
    most = std::min(most, most_);
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
  size_t most_;
};

}  // namespace speculation
