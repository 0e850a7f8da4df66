// Times of steps and verifications, by which drafts are made only where that is expected to pay:
// compressor_runtime/speculation/pace.py.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <optional>

#include "cost.h"
#include "draft.h"

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

using Counted = std::map<Name, size_t>;  // drafted tokens of each kind

// With an account of each draft: what it has gained, less what it has cost.  One serves all texts of a process.
class Pace {
 public:
  virtual ~Pace() = default;

  void note(size_t rows, double seconds, size_t count = 1) {  // of a step, a row a text, or of a verification
    rounds_ += int64_t(count);
    elapsed_s_ += seconds * double(count);
    // Alone it would be the median, and keep this size from being tried again.
    if (sizes_.count(rows) == 0 && seconds > kLongest * double(rows) * shortest(seconds)) return;
    Size& size = sizes_[rows];
    size.times.add(seconds);
    size.seen = rounds_;
  }

  void note_draft(Name name, double seconds, size_t texts) {  // in which a model drafted a token of each in one call
    Model& model = drafts_[name];
    model.times[texts].add(seconds);
    model.seen = rounds_;
  }

  // Those of some drafts that should go on by a token, which one model reads in one call; all have drafted as many.
  // Those that would not pay beside the others are left out, until all that are left do.  Drafts that were not expected
  // to pay are tried again, with one token, after as many rounds as a size of verifications is.
  virtual Wishes going(Name name, size_t texts, size_t room, const Wishes& wishes) const {
    if (!knows(texts)) return {};
    auto draft = drafts_.find(name);
    bool are_first = std::all_of(wishes.begin(), wishes.end(), [](auto& one) { return one.second.chances.empty(); });
    if (are_first && (draft == drafts_.end() || is_untried(draft->second, wishes.size()))) return wishes;
    if (draft == drafts_.end()) return {};
    Known known = fresh(texts);
    auto seconds = [&known](size_t rows) { return on_lines(known, double(rows)); };
    size_t rows = std::min(room, most_drafted(known, texts));
    Wishes going = wishes;
    while (!going.empty()) {
      std::optional<double> draft_s = draft->second.seconds(going.size());
      if (!draft_s) return {};
      Wishes paying;
      for (const auto& [place, wish] : going) {
        size_t most = std::min(wish.most, std::max<size_t>(1, rows / going.size()));
        bool pays = is_worth_drafting(wish.chances, wish.following, most, texts, seconds, *draft_s, kMargin,
                                      going.size());
        if (pays) paying.emplace(place, wish);
      }
      if (paying.size() == going.size()) break;
      going = std::move(paying);
    }
    return going;
  }

  void wait(double seconds) { elapsed_s_ += seconds; }  // for a prompt, in which no token came

  bool knows(size_t texts) const {  // whether steps of so many were measured
    auto found = sizes_.find(texts);
    return found != sizes_.end() && found->second.times.is_known();
  }

  // Of a verification: measured, or on a line between measured sizes; beyond the largest, on that from a step through
  // it.
  double seconds(size_t rows, size_t texts = 1) const { return on_lines(fresh(texts), double(rows)); }

  // A probability of being accepted below which no drafted token pays: a row's share of a step.
  virtual double least_chance(size_t texts) const {
    if (!knows(texts)) return kRowGuess;
    Known known = fresh(texts);
    double slope = known.size() > 1 ? INFINITY : 0;
    for (size_t i = 1; i < known.size(); ++i) {
      slope = std::min(slope, (known[i].second - step(texts)) / (known[i].first - double(texts)));
    }
    return std::max(kLeastChance, slope / step(texts) * double(texts));
  }

  // How many drafted tokens to verify, given the probability that each is accepted, falling.
  virtual size_t choose(std::vector<double> chances, size_t texts) const {
    if (chances.empty() || !knows(texts)) return 0;
    Known known = fresh(texts);
    chances.resize(std::min(chances.size(), most_drafted(known, texts)));
    return best_count(chances, texts, [&](size_t rows) { return on_lines(known, double(rows)); }, kMargin);
  }

  // A draft's account may owe its share, of so many drafts together.
  virtual bool may_draft(Name name, size_t texts, size_t drafts) const {
    if (!knows(texts)) return false;
    double debt = kDebt * elapsed_s_ + kGraceSteps * step(texts);
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
  void settle(double seconds, size_t texts, const Counted& drafted, const Counted& accepted) {
    if (!knows(texts)) return;
    size_t rows = sum(drafted);
    double step_s = step(texts);
    if (seconds > kLongest * double(rows + texts) * step_s) seconds = this->seconds(rows + texts, texts);
    double extra = seconds - step_s;
    for (const auto& [name, count] : drafted) {
      auto right = accepted.find(name);
      double saved = double(right == accepted.end() ? 0 : right->second) * step_s / double(texts);
      double gain = saved - extra * double(count) / double(rows);
      accounts_[name] = std::min(accounts_[name] + gain, kMostCreditSteps * step_s);
    }
  }

  // Books what a plain step of one text took longer because the round before it verified these.
  void delay(double seconds, const Counted& drafted) {
    if (!knows(1) || seconds - step(1) > kLongest * step(1)) return;
    double extra = seconds - step(1);
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

  struct Model {  // that drafts: one token of each of so many texts, in one call
    std::map<size_t, Times> times;
    int64_t seen = 0;  // the round when it last drafted

    // Measured, or on a line between measured numbers of texts; fewer than any measured are taken to need the same
    // time.
    std::optional<double> seconds(size_t texts) const {
      Known known;
      for (const auto& [count, measured] : times) {
        if (measured.is_known()) known.emplace_back(double(count), measured.median());
      }
      if (known.empty()) return std::nullopt;
      return on_lines(known, std::max(double(texts), known[0].first));
    }
  };

  bool is_untried(const Model& draft, size_t texts) const {
    auto found = draft.times.find(texts);
    return found == draft.times.end() || !found->second.is_known() || rounds_ - draft.seen > kStaleRounds;
  }

  static size_t sum(const Counted& rows) {
    size_t all = 0;
    for (const auto& [name, count] : rows) all += count;
    return all;
  }

  static size_t most_drafted(const Known& known, size_t texts) {  // a guess far from what is measured is none
    double largest = known.back().first;
    return size_t(largest + std::max(kFirstRows, largest)) - texts;
  }

  double step(size_t texts) const { return sizes_.at(texts).times.median(); }

  double shortest(double otherwise) const {
    double found = sizes_.empty() ? otherwise : INFINITY;
    for (const auto& [rows, size] : sizes_) found = std::min(found, size.times.median());
    return found;
  }

  Known fresh(size_t texts) const {  // rows and seconds, smallest first, from a step's on
    Known known;
    for (const auto& [rows, size] : sizes_) {
      bool counts = rows == texts || (rows > texts && size.seen > rounds_ - kStaleRounds);
      if (counts) known.emplace_back(double(rows), size.times.median());
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
  std::map<Name, Model> drafts_;
  std::map<Name, double> accounts_;
  int64_t rounds_ = 0;
  double elapsed_s_ = 0;
};

// Verifies every drafted token, whether it pays or not: to measure how often drafts are right, and at what cost.
class Always : public Pace {
 public:
  Wishes going(Name, size_t, size_t, const Wishes& wishes) const override { return wishes; }
  double least_chance(size_t) const override { return kLeastChance; }
  size_t choose(std::vector<double> chances, size_t) const override { return chances.size(); }
  bool may_draft(Name, size_t, size_t) const override { return true; }
};

}  // namespace speculation
