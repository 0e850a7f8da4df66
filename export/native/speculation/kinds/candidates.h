// The likeliest candidates of logits, and trees of them, the likeliest node first:
// compressor_runtime/speculation/kinds/candidates.py.
#pragma once

#include <map>
#include <queue>

#include "../acceptance.h"
#include "../draft.h"

namespace speculation {

constexpr size_t kCandidates = 8;  // by rank

inline double candidate_prior(size_t rank) {
  static constexpr double kPriors[kCandidates] = {0.4, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02};
  return kPriors[rank];
}

// Tokens with the largest of logits [V], the largest first, of equal ones the first.
inline Tokens top_candidates(const float* logits, size_t width) {
  Tokens best;
  for (size_t token = 0; token < width; ++token) {
    if (best.size() == kCandidates) {
      if (!(logits[token] > logits[best.back()])) continue;
      best.pop_back();
    }
    size_t place = best.size();
    while (place > 0 && logits[token] > logits[best[place - 1]]) --place;
    best.insert(best.begin() + int64_t(place), int64_t(token));
  }
  return best;
}

// The tree of the nodes that are accepted most probably, with the first tokens beside them that are watched.
class BestFirst {
 public:
  using Sources = std::function<Source(size_t depth, size_t rank)>;  // depth from 1
  using Candidates = std::function<Tokens(int64_t token, size_t depth)>;  // what may follow it there, by rank

  static Tree tree(const Room& room, const Acceptance& acceptance, Sources sources, Candidates candidates,
                   int64_t last) {
    BestFirst made(room, acceptance, std::move(sources), std::move(candidates));
    made.grow(last);
    return made.tree_;
  }

 private:
  static constexpr size_t kWatched = 3;  // first tokens that are drafted however unlikely: so estimates rise again

  struct Ranked {
    double chance;
    size_t rank;
  };
  struct Entry {  // of a node's candidates the next one; the others wait until it was taken, since they are less likely
    double chance;
    int64_t parent;
    size_t depth, place;

    bool operator<(const Entry& other) const { return key() > other.key(); }  // waits behind the other
    std::tuple<double, int64_t, size_t, size_t> key() const { return {-chance, parent, depth, place}; }
  };

  BestFirst(const Room& room, const Acceptance& acceptance, Sources sources, Candidates candidates)
      : room_(room), acceptance_(acceptance), sources_(std::move(sources)), candidates_(std::move(candidates)) {}

  void grow(int64_t last) {
    behind_[kRoot] = candidates_(last, 1);
    push(kRoot, 1, 0);
    while (!queue_.empty() && tree_.size() < room_.nodes) {
      auto [chance, parent, depth, place] = queue_.top();
      queue_.pop();
      size_t rank = ranks(depth)[place].rank;
      int64_t token = behind_[parent][rank], node = tree_.add(parent, token, chance, sources_(depth, rank));
      push(parent, depth, place + 1);
      if (depth < room_.depth) {
        behind_[node] = candidates_(token, depth + 1);
        push(node, depth + 1, 0);
      }
    }
  }

  void push(int64_t parent, size_t depth, size_t place) {
    const std::vector<Ranked>& ranked = ranks(depth);
    for (; place < ranked.size(); ++place) {
      if (ranked[place].rank >= behind_[parent].size()) continue;
      double chance = ranked[place].chance * tree_.chance(parent);
      if (chance >= room_.least || (parent == kRoot && place < kWatched)) queue_.push({chance, parent, depth, place});
      return;
    }
  }

  const std::vector<Ranked>& ranks(size_t depth) {  // the likeliest first
    auto [found, is_new] = ranks_.try_emplace(depth);
    std::vector<Ranked>& ranked = found->second;
    if (is_new) {
      for (size_t rank = 0; rank < kCandidates; ++rank) {
        ranked.push_back({acceptance_.chance(sources_(depth, rank)), rank});
      }
      std::sort(ranked.begin(), ranked.end(), [](const Ranked& a, const Ranked& b) {
        return std::tie(a.chance, a.rank) > std::tie(b.chance, b.rank);
      });
    }
    return ranked;
  }

  const Room& room_;
  const Acceptance& acceptance_;
  Sources sources_;
  Candidates candidates_;
  Tree tree_;
  std::map<size_t, std::vector<Ranked>> ranks_;  // by depth
  std::map<int64_t, Tokens> behind_;  // candidates by node
  std::priority_queue<Entry> queue_;
};

}  // namespace speculation
