// Continues texts: alone, together, or in turns.
#pragma once

#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "options.h"
#include "session/session.h"

namespace runner {

using speculation::Text;

// What drafts: the kind that is asked for, or that the recipe asks for, and the kinds that it stands for, none without
// drafts.
struct Drafting {
  std::string kind;
  std::vector<const speculation::Kind*> members;
  std::optional<speculation::Lossy> lossy;  // only greedy texts are
};

// Prints texts in their order, a line each: of the first that goes on each token as soon as it is there.
class Lines {
 public:
  explicit Lines(const std::vector<Text>& texts) : texts_(texts) {
    for (const Text& text : texts) prompts_.push_back(text.tokens.size());
  }

  void print() {
    for (; place_ < texts_.size(); ++place_, printed_ = 0) {
      const Text& text = texts_[place_];
      for (size_t count = text.tokens.size() - prompts_[place_]; printed_ < count; ++printed_) {
        std::cout << (printed_ == 0 ? "" : ",") << text.tokens[prompts_[place_] + printed_] << std::flush;
      }
      if (!text.is_ended) return;
      std::cout << std::endl;
    }
  }

 private:
  const std::vector<Text>& texts_;
  std::vector<size_t> prompts_;  // tokens of each
  size_t place_ = 0, printed_ = 0;  // the text in turn, and how many of its tokens are printed
};

// Continues the texts of a run.
class Generation {
 public:
  Generation(const Options& options, const Model& model, const Kernels& kernels, const Drafting& drafting)
      : options_(options), model_(model), kernels_(kernels), drafting_(drafting) {
    for (const Sizes& ids : options.ids) {
      check_prompt(model, ids);
      int64_t slot = int64_t(texts_.size());
      sampling::Options own = options.sampling;
      own.seed += uint64_t(slot);
      int64_t left = std::min(options.max_tokens, room_behind(ids));
      texts_.push_back({slot, ids, sampling::Sampler(own), model.ends, left, {}});
      texts_.back().is_ended = left == 0;
    }
    check_together();
  }

  void run() {
    lines_.emplace(texts_);
    for (Text& text : texts_) text.changed = [this] { lines_->print(); };
    if (leaves_early()) {
      run_in_turns();
    } else {
      run_together();
    }
    if (!std::cout) fail(kUnusable, "standard output cannot be written");
  }

 private:
  bool drafts() const { return !drafting_.members.empty(); }
  bool leaves_early() const { return model_.exits && !drafts(); }  // drafts are verified by all blocks

  // Tokens that the model has room for behind a prompt; nothing follows the last.
  int64_t room_behind(const Sizes& prompt) const {
    return model_.limit - int64_t(prompt.size()) + 1;
  }

  // Refuses texts that no call of an entry takes together, in Python's words.
  void check_together() const {
    size_t count = texts_.size();
    if (count > speculation::kMostRows) {
      if (drafts()) fail(kBadRequest, count, " sequences at once: with drafts, at most ", speculation::kMostRows);
      fail(kBadRequest, "batch=", count, ": give a number from 1 to ", speculation::kMostRows,
           ", up to which rows do not depend on others");
    }
    std::string lengths;
    bool are_alike = true;
    for (const Text& text : texts_) {
      lengths += (lengths.empty() ? "" : ", ") + std::to_string(text.tokens.size());
      are_alike = are_alike && text.tokens.size() == texts_[0].tokens.size();
    }
    if (!are_alike && !kernels_.has(speculation::kVerify)) {
      fail(kBadRequest, "ids [", count, ", 1]: the sequences have different lengths, [", lengths, "]; a step takes ",
           "one token of each, and verify() several; compress the model with `speculate: auto` in its recipe");
    }
  }

  // Each text in a session of its own, one behind another: its tokens leave where they are sure.
  void run_in_turns() {
    early::Counts counts;
    std::vector<std::unique_ptr<Session>> sessions;
    std::vector<std::vector<float>> logits;
    for (const Text& text : texts_) {
      sessions.push_back(open(1, text.tokens.size()));
      logits.push_back(sessions.back()->prompt(text.tokens));
    }
    write_logits(logits);
    lines_->print();
    for (size_t i = 0; i < texts_.size(); ++i) {
      Text& text = texts_[i];
      early::Exits exits(sessions[i]->stages(), *model_.exits, counts);
      for (begin(text, logits[i]); !text.is_ended;) {
        int64_t token = text.tokens.back();
        std::vector<float> next = exits.step(token, sessions[i]->advance_in_stages(token));
        if (exits.hopeless()) {
          text.end();
        } else {
          text.choose(next.data(), next.size());
        }
      }
    }
    std::cerr << counts.text(model_.exits->of) << std::endl;
  }

  void run_together() {
    size_t longest = 0;
    for (const Text& text : texts_) longest = std::max(longest, text.tokens.size());
    std::unique_ptr<Session> session = open(texts_.size(), longest);
    auto start = speculation::Clock::now();
    std::vector<std::vector<float>> logits = read_prompts(*session);
    double prompts_s = speculation::since(start);
    write_logits(logits);
    if (drafts()) {
      draft(*session, logits, prompts_s);
      return;
    }
    begin(logits);
    if (texts_.size() > 1 && kernels_.has(speculation::kVerify)) {
      verify_each(*session);
    } else {
      step_all(*session);
    }
  }

  // Each prompt as if alone, by the kernels that read it then; logits [V] after each.
  std::vector<std::vector<float>> read_prompts(Session& session) const {
    if (texts_.size() == 1) return {session.prompt(texts_[0].tokens)};
    std::vector<std::vector<float>> logits;
    for (const Text& text : texts_) {
      Session alone(kernels_, model_, 1, int64_t(text.tokens.size()));
      logits.push_back(alone.prompt(text.tokens));
      session.take(text.slot, alone);
    }
    return logits;
  }

  void draft(Session& session, const std::vector<std::vector<float>>& logits, double prompts_s) {
    speculation::Counts counts{drafting_.kind, drafting_.lossy};
    bool drafts_always = options_.draft_tokens || drafting_.lossy;
    auto pace = drafts_always ? std::make_unique<speculation::Always>() : std::make_unique<speculation::Pace>();
    speculation::Acceptance acceptance(speculation::prior);
    speculation::Shared shared{session, size_t(model_.vocabulary), model_.subsets, *pace, acceptance};
    for (const speculation::Kind* kind : drafting_.members) {
      speculation::Maker make = kind->start(kind->name, shared);
      for (Text& text : texts_) text.drafts.push_back(make(text.slot));
    }
    for (Text& text : texts_) {
      if (drafting_.lossy) text.lenience = {drafting_.lossy->tolerance, room_behind(text.tokens) - text.left};
      if (options_.draft_tokens) text.most = size_t(*options_.draft_tokens);
    }
    pace->wait(prompts_s);
    begin(logits);
    speculation::Engine(session, *pace, acceptance, counts).run(all());
    std::cerr << counts.text() << std::endl;
  }

  // Verifies the last token of each text that goes on: they may have any lengths.
  void verify_each(Session& session) {
    speculation::Counts counts;
    speculation::Always pace;
    speculation::Acceptance acceptance(speculation::prior);
    speculation::Engine(session, pace, acceptance, counts).run(all());
  }

  // Steps of all texts, which have one length; one that has ended repeats its last token, beside the others.
  void step_all(Session& session) {
    auto goes_on = [](const Text& text) { return !text.is_ended; };
    while (std::any_of(texts_.begin(), texts_.end(), goes_on)) {
      Sizes ids;
      for (const Text& text : texts_) ids.push_back(text.tokens.back());
      std::vector<float> logits = session.append(ids);
      size_t width = logits.size() / ids.size();
      for (Text& text : texts_) {
        if (goes_on(text)) text.choose(logits.data() + size_t(text.slot) * width, width);
      }
    }
  }

  std::unique_ptr<Session> open(size_t texts, size_t prompt) const {
    int64_t capacity = int64_t(prompt) + std::min<int64_t>(options_.max_tokens, 256);
    return std::make_unique<Session>(kernels_, model_, texts, capacity);
  }

  void begin(const std::vector<std::vector<float>>& logits) {
    lines_->print();
    for (size_t i = 0; i < texts_.size(); ++i) begin(texts_[i], logits[i]);
  }

  static void begin(Text& text, const std::vector<float>& logits) {
    if (!text.is_ended) text.choose(logits.data(), logits.size());
  }

  std::vector<Text*> all() {
    std::vector<Text*> found;
    for (Text& text : texts_) found.push_back(&text);
    return found;
  }

  void write_logits(const std::vector<std::vector<float>>& logits) const {
    if (options_.logits.empty()) return;
    std::ofstream file(options_.logits, std::ios::binary);
    for (const std::vector<float>& row : logits) {
      file.write(reinterpret_cast<const char*>(row.data()), std::streamsize(row.size() * sizeof(float)));
    }
    if (!file.flush()) fail(kUnusable, options_.logits.string(), ": cannot be written; choose another place");
  }

  const Options& options_;
  const Model& model_;
  const Kernels& kernels_;
  const Drafting& drafting_;
  std::vector<Text> texts_;
  std::optional<Lines> lines_;
};

}  // namespace runner
