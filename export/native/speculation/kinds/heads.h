// Drafts what the model's own heads say of the last hidden state and of the token chosen behind it, head by head of the
// next places (Medusa, arXiv:2401.10774): compressor_runtime/speculation/kinds/heads.py.
#pragma once

#include "../pace.h"
#include "candidates.h"

namespace speculation {

class Heads : public Draft {
 public:
  static constexpr const char* kName = "heads";

  Heads(Target& target, Pace& pace, const Acceptance& acceptance)
      : Draft(kName), target_(target), pace_(pace), acceptance_(acceptance) {}

  void extend(const Tokens& text) override { last_ = text.back(); }

  Tree propose(const Room& room) override {
    std::vector<double> none;
    if (!pace_.goes_on(name, room.rows, {room.nodes, none, acceptance_.chance(source(1, 0))})) return {};
    auto begin = Clock::now();
    std::vector<Tokens> found;
    for (const Logits& head : target_.heads(last_)) found.push_back(top_candidates(head.data(), head.size()));
    if (found.empty()) return {};  // behind a prompt, and behind plain steps, no hidden state is kept
    auto candidates = [&found](int64_t, size_t depth) { return depth <= found.size() ? found[depth - 1] : Tokens(); };
    Tree tree = BestFirst::tree(room, acceptance_, source, candidates, last_);
    pace_.note_draft(name, since(begin) / double(found.size()));
    return tree;
  }

  static double prior(const Source& source) { return candidate_prior(source.second); }

 private:
  static Source source(size_t depth, size_t rank) { return {kName, depth, rank}; }

  Target& target_;
  Pace& pace_;
  const Acceptance& acceptance_;
  int64_t last_ = kRoot;
};

}  // namespace speculation
