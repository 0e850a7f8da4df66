// Drafts from the likeliest successors that the model gave to each token when it last read it (token recycling,
// arXiv:2408.08696): compressor_runtime/speculation/kinds/recycling.py.
#pragma once

#include <memory>

#include "candidates.h"

namespace speculation {

// Candidates for what comes after each token, in less than 2 MB: of a larger vocabulary, tokens share rows.
class Successors {
 public:
  explicit Successors(size_t vocabulary) : rows_(std::min(vocabulary, kMostBytes / (4 * (kCandidates + 1)))) {}

  void write(const Tokens& tokens, const float* logits, size_t width) {  // the model's, of each token
    for (size_t i = 0; i < tokens.size(); ++i) {
      Row& row = of_row(tokens[i]);
      row.owner = int32_t(tokens[i]);
      Tokens best = top_candidates(logits + i * width, width);
      std::copy(best.begin(), best.end(), row.candidates);
    }
  }

  // What follows what in a text from an index on, for tokens that have no candidates.
  void write_text(const Tokens& text, size_t first) {
    std::vector<size_t> missing;
    for (size_t i = first; i + 1 < text.size(); ++i) {
      if (of_row(text[i]).owner != text[i]) missing.push_back(i);
    }
    for (size_t i : missing) {
      Row& row = of_row(text[i]);
      row = Row();
      row.owner = int32_t(text[i]), row.candidates[0] = int32_t(text[i + 1]);
    }
  }

  Tokens of(int64_t token) const {
    const Row& row = rows_[size_t(token) % rows_.size()];
    Tokens found;
    for (int32_t candidate : row.candidates) {
      if (row.owner == token && candidate >= 0) found.push_back(candidate);
    }
    return found;
  }

 private:
  static constexpr size_t kMostBytes = 2'000'000;

  struct Row {
    int32_t owner = -1, candidates[kCandidates] = {-1, -1, -1, -1, -1, -1, -1, -1};
  };

  Row& of_row(int64_t token) { return rows_[size_t(token) % rows_.size()]; }

  std::vector<Row> rows_;
};

class Recycling : public Draft {
 public:
  static constexpr const char* kName = "recycle";

  Recycling(std::shared_ptr<Successors> successors, const Acceptance& acceptance)
      : Draft(kName), successors_(std::move(successors)), acceptance_(acceptance) {}

  bool reads_logits() const override { return true; }

  void extend(const Tokens& text) override {
    successors_->write_text(text, known_);
    known_ = text.size();
    last_ = text.back();
  }

  void observe(const Tokens& tokens, const float* logits, size_t width) override {
    successors_->write(tokens, logits, width);
  }

  void begin(const Room& room) override {
    auto source = [](size_t depth, size_t rank) { return Source{kName, rank, depth == 1}; };
    auto candidates = [this](int64_t token, size_t) { return successors_->of(token); };
    tree_ = BestFirst::tree(room, acceptance_, source, candidates, last_);
  }

  static double prior(const Source& source) { return candidate_prior(source.first); }

 private:
  std::shared_ptr<Successors> successors_;  // texts share them
  const Acceptance& acceptance_;
  int64_t last_ = kRoot;
  size_t known_ = 0;  // tokens of the text
};

}  // namespace speculation
