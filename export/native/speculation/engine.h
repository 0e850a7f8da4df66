// Draft, verify, accept: the tokens of plain decoding, several in a step where drafts are right
// (compressor_runtime/speculation/engine.py).
//
// At each node of a draft the model's token is chosen as in plain decoding, with the same random number; where a
// drafted token behind that node is this very token, the walk goes on there.  So drafts decide how fast tokens come,
// never which, but in a lenient text.
#pragma once

#include "acceptance.h"
#include "chain.h"
#include "counts.h"
#include "pace.h"
#include "text.h"

namespace speculation {

constexpr size_t kMostRows = 32;  // of a verification, of all texts: for so many a row's bits do not depend on others

class Engine {
 public:
  Engine(Target& target, Pace& pace, Acceptance& acceptance, Counts& counts)
      : target_(target), pace_(pace), acceptance_(acceptance), counts_(counts) {}

  // Until all texts have ended, each with its first token pending.
  void run(const std::vector<Text*>& texts) {
    if (target_.texts() == 1) return run_alone(*texts[0]);  // of several, each goes its own way
    for (auto live = going_on(texts); !live.empty(); live = going_on(live)) {
      for (const std::vector<Text*>& group : together(live, kMostRows)) {
        std::vector<Round> rounds = draft(group);
        verify(rounds);
      }
    }
  }

 private:
  static constexpr size_t kRestSteps = 16;  // while no draft may go on: then they are asked again

  // A text's part of a verification: its draft, the nodes verified, and the row of its pending token.
  struct Round {
    Text* text;
    std::vector<Draft*> awake = {};  // that take part
    Tree drafted = {}, verified = {};
    size_t start = 0;

    size_t rows() const { return 1 + verified.size(); }
  };
  using Rounds = std::vector<Round>;

  static std::vector<Text*> going_on(const std::vector<Text*>& texts) {
    std::vector<Text*> live;
    std::copy_if(texts.begin(), texts.end(), std::back_inserter(live), [](Text* text) { return !text->is_ended; });
    return live;
  }

  void run_alone(Text& text) {
    while (!text.is_ended) {
      auto may = [&](const auto& draft) { return pace_.may_draft(draft->name, 1, text.drafts.size()); };
      if (text.most_nodes() == 0 || std::none_of(text.drafts.begin(), text.drafts.end(), may)) {
        rest(text);
        continue;
      }
      Rounds rounds = draft({&text});
      rounds[0].verified.size() == 0 ? step(rounds) : verify(rounds);
    }
  }

  void rest(Text& text) {
    double seconds = 0;
    size_t most = pace_.knows(1) ? std::min(kRestSteps, size_t(text.left)) : 1, count = 0;
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

  // Drafts for each text, and takes the likeliest of all nodes, as many as are expected to pay.
  Rounds draft(const std::vector<Text*>& live) {
    auto begin = Clock::now();
    double before_s = drafts_s_;
    size_t room = kMostRows - live.size();
    Rounds rounds = propose(live, room);
    std::vector<Tree> useful;
    std::vector<std::tuple<double, size_t, size_t>> ranked;  // nodes, the likeliest first
    for (size_t place = 0; place < rounds.size(); ++place) {
      useful.push_back(rounds[place].drafted.without(live[place]->ends));  // an end needs no row of its own
      for (size_t node = 0; node < useful[place].size(); ++node) {
        ranked.emplace_back(-useful[place].chances[node], place, node);
      }
    }
    std::sort(ranked.begin(), ranked.end());
    ranked.resize(std::min(ranked.size(), room));
    std::vector<double> chances;
    for (const auto& one : ranked) chances.push_back(-std::get<0>(one));
    std::vector<size_t> taken(rounds.size());
    ranked.resize(pace_.choose(chances, live.size()));
    for (const auto& one : ranked) ++taken[std::get<1>(one)];
    for (size_t place = 0; place < rounds.size(); ++place) {
      rounds[place].verified = useful[place].likeliest(taken[place]);
    }
    share(rounds, begin, before_s);
    return rounds;
  }

  // The guesses of each text's drafts, kind by kind, as each leaves its own behind the stored tokens.
  Rounds propose(const std::vector<Text*>& live, size_t room) {
    Rounds rounds;
    std::vector<Name> names;
    size_t count = live.size();
    double least = pace_.least_chance(count);
    for (Text* text : live) {
      Round& round = rounds.emplace_back(Round{text});
      for (const auto& one : text->drafts) {
        if (text->most_nodes() == 0 || !pace_.may_draft(one->name, count, text->drafts.size())) continue;
        round.awake.push_back(one.get());
        if (std::count(names.begin(), names.end(), one->name) == 0) names.push_back(one->name);
      }
    }
    for (Name name : names) {
      auto begin = Clock::now();
      std::vector<Draft*> drafts;
      std::vector<Tree*> trees;
      for (Round& round : rounds) {
        for (Draft* one : round.awake) {
          if (one->name != name) continue;
          size_t most = std::min(room, round.text->most_nodes());
          one->extend(round.text->tokens);
          one->begin({most, most, least, round.text->sampler, round.text->ends});
          drafts.push_back(one), trees.push_back(&round.drafted);
        }
      }
      draft_together(name, drafts, pace_, count, room);
      for (size_t i = 0; i < drafts.size(); ++i) {
        Tree found = drafts[i]->take();
        if (trees[i]->size() == 0) {
          *trees[i] = std::move(found);
        } else {
          trees[i]->merge(found);
        }
      }
      charge(name, since(begin));
    }
    return rounds;
  }

  void charge(Name name, double seconds) {
    pace_.charge(name, seconds);
    drafts_s_ += seconds;
    counts_.seconds += seconds;
  }

  // Books what drafts have cost together since `begin`, when `before_s` were booked.
  void share(const Rounds& rounds, Clock::time_point begin, double before_s) {
    double seconds = since(begin) - (drafts_s_ - before_s);
    size_t count = 0;
    for (const Round& round : rounds) count += round.awake.size();
    for (const Round& round : rounds) {
      for (Draft* one : round.awake) charge(one->name, seconds / double(count));
    }
  }

  // A plain step of the only text; a draft that did not pay is compared with what comes nevertheless.
  void step(const Rounds& rounds) {
    Text& text = *rounds[0].text;
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
    learn(rounds, read, logits, {came});
  }

  // Books a plain step behind a verification, whose code and weights others have taken the caches from.
  void slowed(double seconds) {
    if (!verified_.empty()) pace_.delay(seconds, verified_);
    verified_.clear();
  }

  // Verifies the drafts of all texts at once, walks along the model's own tokens, and appends what was right.
  void verify(Rounds& rounds) {
    auto begin = Clock::now();
    Tokens ids, parents, slots;
    for (Round& round : rounds) {
      round.start = ids.size();
      ids.push_back(round.text->tokens.back()), parents.push_back(kRoot);
      ids.insert(ids.end(), round.verified.tokens.begin(), round.verified.tokens.end());
      for (int64_t parent : round.verified.parents) parents.push_back(int64_t(round.start) + 1 + parent);
      slots.insert(slots.end(), round.rows(), round.text->slot);
    }
    Logits logits = target_.verify(ids, parents, slots);
    double seconds = since(begin);
    Paths paths;
    std::vector<Tokens> gained;
    Counted drafted, accepted;
    for (const Round& round : rounds) {
      Text& text = *round.text;
      size_t known = text.tokens.size(), width = logits.size() / ids.size();
      std::vector<size_t>& path = paths[text.slot];
      path = walk(text, round.verified, logits.data() + round.start * width, width);
      gained.emplace_back(text.tokens.begin() + int64_t(known), text.tokens.end());
      for (const Source& source : round.verified.sources) ++drafted[source.kind];
      for (size_t i = 1; i < path.size(); ++i) ++accepted[round.verified.sources[path[i] - 1].kind];
      for (size_t& row : path) row += round.start;
    }
    begin = Clock::now();
    target_.accept(paths);
    seconds += since(begin);
    pace_.note(ids.size(), seconds);
    if (!drafted.empty()) pace_.settle(seconds, rounds.size(), drafted, accepted);
    verified_ = rounds.size() == 1 ? drafted : Counted();
    counts_.seconds += seconds;
    learn(rounds, ids, logits, gained);
  }

  // Chooses tokens along a draft while they are the drafted ones, or while the text takes those; of its rows, with
  // logits [1 + nodes, V], those that were right, the pending token's first.
  std::vector<size_t> walk(Text& text, const Tree& tree, const float* logits, size_t width) {
    std::vector<size_t> path = {0};
    int64_t node = kRoot, lenient = text.lenient, before = text.left;
    while (true) {
      Tokens behind;
      for (int64_t child : tree.children(node)) behind.push_back(tree.tokens[size_t(child)]);
      if (!text.choose(logits + size_t(node + 1) * width, width, behind)) break;
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
    ++(tree.size() == 0 ? counts_.steps : counts_.verifications);
    return path;
  }

  // Lets estimates learn from the tokens that each text gained, and drafts see what the model computed of those that it
  // read.
  void learn(const Rounds& rounds, const Tokens& read, const Logits& logits, const std::vector<Tokens>& gained) {
    auto begin = Clock::now();
    double before_s = drafts_s_;
    size_t width = logits.size() / read.size();
    for (size_t place = 0; place < rounds.size(); ++place) {
      const Round& round = rounds[place];
      acceptance_.learn(round.drafted, gained[place]);
      auto first = read.begin() + int64_t(round.start);
      Tokens own(first, first + int64_t(round.rows()));
      for (Draft* one : round.awake) {
        if (round.text->is_ended || !one->reads_logits()) continue;
        auto observing = Clock::now();
        one->observe(own, logits.data() + round.start * width, width);
        charge(one->name, since(observing));
      }
    }
    share(rounds, begin, before_s);
  }

  Target& target_;
  Pace& pace_;
  Acceptance& acceptance_;
  Counts& counts_;
  Counted verified_;  // drafted tokens of the only text's round before; none after plain steps
  double drafts_s_ = 0;  // that drafts have cost
};

}  // namespace speculation
