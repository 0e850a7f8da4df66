// Draft, verify, accept: the tokens of plain decoding, several in a step where drafts are right
// (compressor_runtime/speculation/engine.py for one text).
//
// At each node of a draft the model's token is chosen as in plain decoding, with the same random number; where a
// drafted token behind that node is this very token, the walk goes on there.  So drafts decide how fast tokens come,
// never which, but in a lenient text.
#pragma once

#include "acceptance.h"
#include "counts.h"
#include "pace.h"
#include "text.h"

namespace speculation {

constexpr size_t kMostRows = 32;  // of a verification: for so many a row's bits do not depend on the others

class Engine {
 public:
  Engine(Target& target, Pace& pace, Acceptance& acceptance, Counts& counts)
      : target_(target), pace_(pace), acceptance_(acceptance), counts_(counts) {}

  // Until the text ends; its first token is pending.
  void run(Text& text) {
    while (!text.is_ended) {
      auto may = [&](const auto& draft) { return pace_.may_draft(draft->name, text.drafts.size()); };
      if (text.most_nodes() == 0 || std::none_of(text.drafts.begin(), text.drafts.end(), may)) {
        rest(text);
        continue;
      }
      Round round = draft(text);
      round.verified.size() == 0 ? step(text, round) : verify(text, round);
    }
  }

 private:
  static constexpr size_t kRestSteps = 16;  // while no draft may go on: then they are asked again

  struct Round {
    Tree drafted, verified;
    std::vector<Draft*> awake;  // that take part
  };

  void rest(Text& text) {
    double seconds = 0;
    size_t most = pace_.knows() ? std::min(kRestSteps, size_t(text.left)) : 1, count = 0;
    int64_t before = text.left;
    while (count < most) {
      auto begin = Clock::now();
      Logits logits = target_.step(text.tokens.back());
      seconds += since(begin);
      if (++count == 1) slowed(seconds);
      if (!text.choose(logits.data(), logits.size())) break;
    }
    counts_.seconds += seconds;
    counts_.steps += int64_t(count);
    counts_.tokens += before - text.left;
    pace_.note(1, seconds / double(count), count);
  }

  // Drafts, and takes the likeliest of all nodes, as many as are expected to pay.
  Round draft(Text& text) {
    Round round;
    auto begin = Clock::now();
    double booked = 0;
    size_t rows = kMostRows - 1, most = std::min(rows, text.most_nodes());
    Room room{most, most, pace_.least_chance(), text.sampler, text.ends, rows};
    for (const auto& one : text.drafts) {
      if (pace_.may_draft(one->name, text.drafts.size())) round.awake.push_back(one.get());
    }
    for (Draft* one : round.awake) {
      auto own = Clock::now();
      one->extend(text.tokens);
      Tree found = one->propose(room);
      if (round.drafted.size() == 0) {
        round.drafted = std::move(found);
      } else {
        round.drafted.merge(found);
      }
      booked += charge(one->name, since(own));
    }
    Tree useful = round.drafted.without(text.ends).likeliest(rows);  // an end needs no row of its own
    std::vector<double> chances = useful.chances;
    std::sort(chances.rbegin(), chances.rend());
    round.verified = useful.likeliest(pace_.choose(chances));
    share(round, since(begin) - booked);
    return round;
  }

  double charge(Name name, double seconds) {
    pace_.charge(name, seconds);
    counts_.seconds += seconds;
    return seconds;
  }

  void share(const Round& round, double seconds) {  // what drafts have cost together
    for (Draft* one : round.awake) charge(one->name, seconds / double(round.awake.size()));
  }

  // A plain step; a draft that did not pay is compared with what comes nevertheless.
  void step(Text& text, const Round& round) {
    Tokens read = {text.tokens.back()}, came;
    auto begin = Clock::now();
    Logits logits = target_.step(read[0]);
    double seconds = since(begin);
    slowed(seconds);
    pace_.note(1, seconds);
    counts_.seconds += seconds;
    ++counts_.steps;
    if (text.choose(logits.data(), logits.size())) came = {text.tokens.back()};
    counts_.tokens += int64_t(came.size());
    learn(text, round, read, logits, came);
  }

  // Books a plain step behind a verification, whose code and weights others have taken the caches from.
  void slowed(double seconds) {
    if (!verified_.empty()) pace_.delay(seconds, verified_);
    verified_.clear();
  }

  // Verifies a draft, walks along the model's own tokens, and appends what was right.
  void verify(Text& text, const Round& round) {
    const Tree& tree = round.verified;
    Tokens ids = {text.tokens.back()}, parents = {kRoot};
    ids.insert(ids.end(), tree.tokens.begin(), tree.tokens.end());
    for (int64_t parent : tree.parents) parents.push_back(parent + 1);
    auto begin = Clock::now();
    Logits logits = target_.verify(ids, parents);
    double seconds = since(begin);
    size_t known = text.tokens.size();
    std::vector<size_t> path = walk(text, tree, logits);
    begin = Clock::now();
    target_.accept(path);
    seconds += since(begin);
    Rows drafted, accepted;
    for (const Source& source : tree.sources) ++drafted[source.kind];
    for (size_t i = 1; i < path.size(); ++i) ++accepted[tree.sources[path[i] - 1].kind];
    pace_.note(ids.size(), seconds);
    pace_.settle(seconds, drafted, accepted);
    verified_ = drafted;
    counts_.seconds += seconds;
    learn(text, round, ids, logits, Tokens(text.tokens.begin() + int64_t(known), text.tokens.end()));
  }

  // Chooses tokens along a draft while they are the drafted ones, or while the text takes those; the rows that were
  // right, the pending token's first.
  std::vector<size_t> walk(Text& text, const Tree& tree, const Logits& logits) {
    size_t width = logits.size() / (tree.size() + 1);
    std::vector<size_t> path = {0};
    int64_t node = kRoot, lenient = text.lenient, before = text.left;
    while (true) {
      Tokens behind;
      for (int64_t child : tree.children(node)) behind.push_back(tree.tokens[size_t(child)]);
      if (!text.choose(logits.data() + size_t(node + 1) * width, width, behind)) break;
      node = tree.child(node, text.tokens.back());
      counts_.tried += !behind.empty();
      counts_.matched += node != kRoot;
      if (text.is_ended || node == kRoot) break;
      path.push_back(size_t(node + 1));
    }
    counts_.tokens += before - text.left;
    counts_.drafted += int64_t(tree.size());
    counts_.accepted += int64_t(path.size()) - 1;
    counts_.lenient += text.lenient - lenient;
    ++counts_.verifications;
    return path;
  }

  // Lets estimates learn from the tokens that came, and drafts see what the model computed of those that it read.
  void learn(const Text& text, const Round& round, const Tokens& read, const Logits& logits, const Tokens& came) {
    auto begin = Clock::now();
    double booked = 0;
    acceptance_.learn(round.drafted, came);
    for (Draft* one : round.awake) {
      if (text.is_ended || !one->reads_logits()) continue;
      auto own = Clock::now();
      one->observe(read, logits.data(), logits.size() / read.size());
      booked += charge(one->name, since(own));
    }
    share(round, since(begin) - booked);
  }

  Target& target_;
  Pace& pace_;
  Acceptance& acceptance_;
  Counts& counts_;
  Rows verified_;  // drafted tokens of the round before; none after plain steps
};

}  // namespace speculation
