// Drafted continuations of a text that share their beginnings: compressor_runtime/speculation/tree.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>
#include <tuple>
#include <vector>

namespace speculation {

using Tokens = std::vector<int64_t>;
using Logits = std::vector<float>;  // of what comes after one token [V], or several
using Name = std::string_view;  // of a kind of drafts: a constant

constexpr int64_t kRoot = -1;  // the node of the last token that the text has

// What a guess rests on; by it one learns how often such guesses are right.
struct Source {
  Name kind;
  size_t first = 0, second = 0;

  bool operator<(const Source& other) const {
    return std::tie(kind, first, second) < std::tie(other.kind, other.first, other.second);
  }
};

class Tree {
 public:
  Tokens tokens;
  std::vector<int64_t> parents;  // of each node the one before it, which is smaller
  std::vector<double> chances;  // that the node is accepted, with all before it; never above its parent's
  std::vector<Source> sources;

  size_t size() const { return tokens.size(); }

  double chance(int64_t node) const { return node == kRoot ? 1.0 : chances[size_t(node)]; }

  const std::vector<int64_t>& children(int64_t node) const {  // in the order in which they were added
    static const std::vector<int64_t> none;
    return size_t(node + 1) < children_.size() ? children_[size_t(node + 1)] : none;
  }

  int64_t child(int64_t node, int64_t token) const {  // kRoot where there is none
    for (int64_t found : children(node)) {
      if (tokens[size_t(found)] == token) return found;
    }
    return kRoot;
  }

  // Adds a token behind a node, and returns its node; one that is there already keeps its better estimate.
  int64_t add(int64_t parent, int64_t token, double likely, const Source& source) {
    likely = std::min(likely, chance(parent));
    if (int64_t found = child(parent, token); found != kRoot) {
      if (likely > chances[size_t(found)]) chances[size_t(found)] = likely, sources[size_t(found)] = source;
      return found;
    }
    int64_t node = int64_t(size());
    children_.resize(size() + 2);
    children_[size_t(parent + 1)].push_back(node);
    tokens.push_back(token);
    parents.push_back(parent);
    chances.push_back(likely);
    sources.push_back(source);
    return node;
  }

  void merge(const Tree& other) {
    std::vector<size_t> all(other.size());
    std::iota(all.begin(), all.end(), 0);
    take(other, all);
  }

  // Without some tokens and all that is behind them.
  Tree without(const Tokens& unwanted) const {
    std::vector<size_t> kept;
    std::vector<bool> is_kept(size());
    for (size_t i = 0; i < size(); ++i) {
      is_kept[i] = (parents[i] == kRoot || is_kept[size_t(parents[i])]) &&
                   std::count(unwanted.begin(), unwanted.end(), tokens[i]) == 0;
      if (is_kept[i]) kept.push_back(i);
    }
    return of(kept);
  }

  // The nodes that are accepted most probably: with a node, all before it are among them.
  Tree likeliest(size_t count) const {
    std::vector<size_t> kept(size());
    std::iota(kept.begin(), kept.end(), 0);
    std::stable_sort(kept.begin(), kept.end(), [this](size_t a, size_t b) { return chances[a] > chances[b]; });
    kept.resize(std::min(count, size()));
    std::sort(kept.begin(), kept.end());
    return of(kept);
  }

 private:
  Tree of(const std::vector<size_t>& kept) const {
    Tree left;
    left.take(*this, kept);
    return left;
  }

  // Adds nodes of another tree, of each also all before it.
  void take(const Tree& other, const std::vector<size_t>& nodes) {
    std::vector<int64_t> places(other.size());  // in this tree
    for (size_t i : nodes) {
      int64_t parent = other.parents[i] == kRoot ? kRoot : places[size_t(other.parents[i])];
      places[i] = add(parent, other.tokens[i], other.chances[i], other.sources[i]);
    }
  }

  std::vector<std::vector<int64_t>> children_;  // of the root, then of each node
};

}  // namespace speculation
