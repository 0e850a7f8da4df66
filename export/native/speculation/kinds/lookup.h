// Drafts what followed earlier where the text had the same last tokens: compressor_runtime/speculation/kinds/lookup.py.
// Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding) and CopySpec
// (arXiv:2502.08923), with an index in place of a search, and with several continuations as a tree.
#pragma once

#include <set>
#include <unordered_map>

#include "../acceptance.h"
#include "../draft.h"

namespace speculation {

class Lookup : public Draft {
 public:
  static constexpr const char* kName = "lookup";

  explicit Lookup(const Acceptance& acceptance) : Draft(kName), acceptance_(acceptance) {}

  void extend(const Tokens& text) override {
    for (size_t end = ids_.size(); end < text.size(); ++end) {
      size_t place = kNowhere;
      if (end >= kShortest) {
        auto [found, is_new] = latest_.try_emplace(last_pair(), end);
        if (!is_new) place = std::exchange(found->second, end);
      }
      earlier_.push_back(place);
      ids_.push_back(text[end]);
    }
  }

  void begin(const Room& room) override {
    std::vector<Match> found = matches();
    for (size_t rank = 0; rank < std::min(found.size(), kBranches); ++rank) {
      auto [length, place] = found[rank];
      int64_t node = kRoot;
      for (size_t offset = 0; offset < room.depth && tree_.size() < room.nodes; ++offset) {
        Source source{kName, std::min(length + offset, kLongest), offset == 0 ? rank : 0};
        double chance = tree_.chance(node) * acceptance_.chance(source);
        // A first token may be unlikely: what becomes of it is how estimates rise again.
        if (offset != 0 && chance < room.least) break;
        node = tree_.add(node, at(place, offset), chance, source);
      }
    }
  }

  static double prior(const Source& source) {  // by the tokens that agree, and by how many others were preferred
    static constexpr double kPriors[] = {0.1, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85};
    double found = kPriors[source.first];
    return source.second == 0 ? found : (1 - found) / double(2 * source.second);
  }

 private:
  static constexpr size_t kLongest = 8, kShortest = 2;  // tokens that must agree, at most and at least
  static constexpr size_t kPlaces = 16, kBranches = 3;  // latest places that are compared, and continuations
  static constexpr size_t kNowhere = SIZE_MAX;

  struct Match {
    size_t length, place;  // tokens that agree, and the index of the token that followed
  };

  // Where the text went on after its last tokens stood there before: the longest match first, of equal ones the latest,
  // one for each token that followed.
  std::vector<Match> matches() const {
    std::vector<Match> found, best;
    auto latest = ids_.size() < kShortest ? latest_.end() : latest_.find(last_pair());
    size_t place = latest == latest_.end() ? kNowhere : latest->second;
    while (place != kNowhere && found.size() < kPlaces) {
      size_t length = kShortest, most = std::min(kLongest, place);
      while (length < most && ids_[place - length - 1] == ids_[ids_.size() - length - 1]) ++length;
      found.push_back({length, place});
      if (length == kLongest) break;  // none is better, and the others would be tried after it
      place = earlier_[place];
    }
    std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.length > b.length; });
    std::set<int64_t> followed;
    for (const Match& match : found) {
      if (followed.insert(ids_[match.place]).second) best.push_back(match);
    }
    return best;
  }

  // The token `offset` behind a match; where the text ends, it repeats itself.
  int64_t at(size_t place, size_t offset) const { return ids_[place + offset % (ids_.size() - place)]; }

  uint64_t last_pair() const {  // a vocabulary has fewer than 2^32 tokens
    return uint64_t(ids_[ids_.size() - 2]) << 32 | uint64_t(ids_.back());
  }

  const Acceptance& acceptance_;
  Tokens ids_;
  std::unordered_map<uint64_t, size_t> latest_;  // pair of tokens -> index of what followed it last
  std::vector<size_t> earlier_;  // index -> what followed the same pair before
};

}  // namespace speculation
