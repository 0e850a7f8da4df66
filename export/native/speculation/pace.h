// Times of steps and verifications, by which drafts are made only where that is expected to pay:
// compressor_runtime/speculation/pace.py for one text.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <optional>

#include "cost.h"
#include "tree.h"

namespace speculation {

using Clock = std::chrono::steady_clock;

inline double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// The last times of something, of which the median counts.
class Times {
 public:
  void add(double seconds) {
    times_.push_back(seconds);
    if (times_.size() > kWindow) times_.pop_front();
    std::vector<double> sorted(times_.begin(), times_.end());
    std::sort(sorted.begin(), sorted.end());
    median_ = (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
  }

  double median() const { return median_; }
  bool is_known() const { return times_.size() > 1; }  // the first says little

 private:
  static constexpr size_t kWindow = 9;

  std::deque<double> times_;
  double median_ = 0;
};

// A token that a draft would have a model read next.
struct Wish {
  size_t most;  // tokens that the text may draft
  const std::vector<double>& chances;  // of those it has drafted, falling
  double following;  // probability that the next one is right, given that those before it are
};

using Rows = std::map<Name, size_t>;  // drafted tokens of each kind

// With an account of each draft: what it has gained, less what it has cost.
class Pace {
 public:
  virtual ~Pace() = default;

  void note(size_t rows, double seconds, size_t count = 1) {  // of a step, or a verification with more rows
    rounds_ += int64_t(count);
    elapsed_s_ += seconds * double(count);
    // Alone it would be the median, and keep this size from being tried again.
    if (sizes_.count(rows) == 0 && seconds > kLongest * double(rows) * shortest(seconds)) return;
    Size& size = sizes_[rows];
    size.times.add(seconds);
    size.seen = rounds_;
  }

  void note_draft(Name name, double seconds) {  // in which a model drafted one token
    Size& draft = drafts_[name];
    draft.times.add(seconds);
    draft.seen = rounds_;
  }

  // Whether a draft that runs a model should go on by a token.  One that was not expected to pay is tried again, with
  // one token, after as many rounds as a size of verifications is.
  virtual bool goes_on(Name name, size_t room, const Wish& wish) const {
    if (!knows()) return false;
    auto draft = drafts_.find(name);
    bool is_measured = draft != drafts_.end() && draft->second.times.is_known();
    bool is_untried = !is_measured || rounds_ - draft->second.seen > kStaleRounds;
    if (wish.chances.empty() && is_untried) return true;
    if (!is_measured) return false;
    Known known = fresh();
    size_t rows = std::min(room, most_drafted(known));
    return is_worth_drafting(
        wish.chances, wish.following, std::min(wish.most, std::max<size_t>(1, rows)),
        [&](size_t count) { return on_lines(known, double(count)); }, draft->second.times.median(), kMargin);
  }

  void wait(double seconds) { elapsed_s_ += seconds; }  // for a prompt, in which no token came

  bool knows() const {  // whether steps were measured
    auto found = sizes_.find(1);
    return found != sizes_.end() && found->second.times.is_known();
  }

  // Of a verification: measured, or on a line between measured sizes; beyond the largest, on that from a step through
  // it.
  double seconds(size_t rows) const { return on_lines(fresh(), double(rows)); }

  // A probability of being accepted below which no drafted token pays: a row's share of a step.
  virtual double least_chance() const {
    if (!knows()) return kRowGuess;
    Known known = fresh();
    double slope = known.size() > 1 ? INFINITY : 0;
    for (size_t i = 1; i < known.size(); ++i) {
      slope = std::min(slope, (known[i].second - step()) / (known[i].first - 1));
    }
    return std::max(kLeastChance, slope / step());
  }

  // How many drafted tokens to verify, given the probability that each is accepted, falling.
  virtual size_t choose(std::vector<double> chances) const {
    if (chances.empty() || !knows()) return 0;
    Known known = fresh();
    chances.resize(std::min(chances.size(), most_drafted(known)));
    return best_count(chances, [&](size_t rows) { return on_lines(known, double(rows)); }, kMargin);
  }

  // A draft's account may owe its share, of so many drafts together.
  virtual bool may_draft(Name name, size_t drafts) const {
    if (!knows()) return false;
    double debt = kDebt * elapsed_s_ + kGraceSteps * step();
    auto found = accounts_.find(name);
    return (found == accounts_.end() ? 0 : found->second) > -debt / double(drafts);
  }

  void charge(Name name, double seconds) {  // for a draft
    elapsed_s_ += seconds;
    // Of one that runs a model, any time may be its own.
    if (drafts_.count(name) == 0) seconds = std::min(seconds, kLongest * shortest(seconds));
    accounts_[name] -= seconds;
  }

  // Books a verification: each draft gains the steps that its tokens saved, and bears its rows' share of the rest.
  void settle(double seconds, const Rows& drafted, const Rows& accepted) {
    if (!knows()) return;
    size_t rows = sum(drafted);
    if (seconds > kLongest * double(rows + 1) * step()) seconds = this->seconds(rows + 1);
    double extra = seconds - step();
    for (const auto& [name, count] : drafted) {
      auto right = accepted.find(name);
      double gain = double(right == accepted.end() ? 0 : right->second) * step() - extra * double(count) / double(rows);
      accounts_[name] = std::min(accounts_[name] + gain, kMostCreditSteps * step());
    }
  }

  // Books what a plain step took longer because the round before it verified these.
  void delay(double seconds, const Rows& drafted) {
    if (!knows() || seconds - step() > kLongest * step()) return;
    double extra = seconds - step();
    for (const auto& [name, count] : drafted) accounts_[name] -= extra * double(count) / double(sum(drafted));
  }

 protected:
  static constexpr double kLeastChance = 0.02;

 private:
  static constexpr int64_t kStaleRounds = 256;  // a size that was not seen for so long is tried again
  static constexpr double kRowGuess = 0.03;  // of a step: a further row's time, until one was measured
  static constexpr double kFirstRows = 3;  // that a first verification adds; later ones have twice those measured
  static constexpr double kMargin = 0.03;  // estimates are of drafts that look best, so a little less comes true
  static constexpr double kDebt = 0.003, kGraceSteps = 2;  // of all time, and steps, that drafts may have cost too much
  static constexpr double kMostCreditSteps = 20;  // a gain of long ago does not pay for long losses
  // Steps that a verification takes at most for each row, and a draft altogether: what took longer waited for another
  // process.
  static constexpr double kLongest = 2;
  using Known = std::vector<std::pair<double, double>>;

  struct Size {
    Times times;
    int64_t seen = 0;  // the round
  };

  static size_t sum(const Rows& rows) {
    size_t all = 0;
    for (const auto& [name, count] : rows) all += count;
    return all;
  }

  static size_t most_drafted(const Known& known) {  // a guess far from what is measured is none
    double largest = known.back().first;
    return size_t(largest + std::max(kFirstRows, largest)) - 1;
  }

  double step() const { return sizes_.at(1).times.median(); }

  double shortest(double otherwise) const {
    double found = sizes_.empty() ? otherwise : INFINITY;
    for (const auto& [rows, size] : sizes_) found = std::min(found, size.times.median());
    return found;
  }

  Known fresh() const {  // rows and seconds, smallest first
    Known known;
    for (const auto& [rows, size] : sizes_) {
      if (rows == 1 || size.seen > rounds_ - kStaleRounds) known.emplace_back(double(rows), size.times.median());
    }
    return known;
  }

  static double on_lines(const Known& known, double rows) {
    auto [first, step] = known[0];
    double below = first, seconds = step;
    for (size_t i = 1; i < known.size(); ++i) {
      auto [size, time_s] = known[i];
      if (size > rows) return seconds + (time_s - seconds) * (rows - below) / (size - below);
      below = size, seconds = time_s;
    }
    double slope = below == first ? kRowGuess * step : std::max(0.0, seconds - step) / (below - first);
    return seconds + slope * (rows - below);
  }

  std::map<size_t, Size> sizes_;  // by rows
  std::map<Name, Size> drafts_;  // of models that draft: one token
  std::map<Name, double> accounts_;
  int64_t rounds_ = 0;
  double elapsed_s_ = 0;
};

// Verifies every drafted token, whether it pays or not: to measure how often drafts are right, and at what cost.
class Always : public Pace {
 public:
  bool goes_on(Name, size_t, const Wish&) const override { return true; }
  double least_chance() const override { return kLeastChance; }
  size_t choose(std::vector<double> chances) const override { return chances.size(); }
  bool may_draft(Name, size_t) const override { return true; }
};

}  // namespace speculation
