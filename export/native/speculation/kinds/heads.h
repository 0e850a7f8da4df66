// Drafts what the model's own heads say of the last hidden state and of the token chosen behind it, head by head of the
// next places (Medusa, arXiv:2401.10774): compressor_runtime/speculation/kinds/heads.py.
#pragma once

#include <memory>

#include "candidates.h"

namespace speculation {

class Heads : public Draft {
 public:
  static constexpr const char* kName = "heads";

  Heads(std::shared_ptr<const Stepper> heads, int64_t slot, const Acceptance& acceptance)
      : Draft(kName), heads_(std::move(heads)), acceptance_(acceptance), slot_(slot) {}

  void extend(const Tokens& text) override { last_ = text.back(); }

  void begin(const Room& room) override { room_.emplace(room); }

  std::optional<Wish> wish() const override {
    if (!room_) return std::nullopt;
    return Wish{heads_.get(), slot_, last_, 0, room_->nodes, {}, acceptance_.chance(source(1, 0))};
  }

  void read(const float* logits, size_t each, size_t width) override {
    std::vector<Tokens> found;
    for (size_t head = 0; head < each; ++head) found.push_back(top_candidates(logits + head * width, width));
    auto candidates = [&found](int64_t, size_t depth) { return depth <= found.size() ? found[depth - 1] : Tokens(); };
    // Behind a prompt, and behind plain steps, no hidden state is kept.
    if (each != 0) tree_ = BestFirst::tree(*room_, acceptance_, source, candidates, last_);
    room_.reset();
  }

  static double prior(const Source& source) { return candidate_prior(source.second); }

 private:
  static Source source(size_t depth, size_t rank) { return {kName, depth, rank}; }

  std::shared_ptr<const Stepper> heads_;
  const Acceptance& acceptance_;
  int64_t slot_, last_ = kRoot;  // the text, and its last token
  std::optional<Room> room_;  // of a draft that has begun
};

}  // namespace speculation
