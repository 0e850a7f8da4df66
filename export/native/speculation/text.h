// Each of some texts as far as it has come, and what chooses its tokens: compressor_runtime/speculation/text.py.
#pragma once

#include <functional>
#include <memory>

#include "draft.h"

namespace speculation {

constexpr size_t kMostNodes = 15;  // drafted tokens of a verification
constexpr size_t kLenientNodes = 7;  // of a lenient text always so many: the text depends on them

// Takes drafted tokens whose probability is at least (1 - tolerance) times the likeliest one's, in a greedy text.
struct Lenience {
  double tolerance;
  int64_t spare;  // further tokens that the model has room for: a shorter text is the beginning of a longer one

  bool takes(int64_t token, const float* logits, size_t count) const {
    double below = tolerance < 1 ? std::log1p(-tolerance) : -INFINITY;
    return double(logits[token]) >= double(*std::max_element(logits, logits + count)) + below;
  }
};

struct Text {
  int64_t slot;  // its number
  Tokens tokens;  // its prompt, and what it has gained; the model has not read the last one
  sampling::Sampler sampler;
  const Tokens& ends;
  int64_t left;  // at most so many further tokens; the model has room for one less
  std::function<void()> changed;  // called behind each token, and where it has ended
  std::vector<std::unique_ptr<Draft>> drafts = {};
  size_t most = kMostNodes;  // drafted tokens of a verification
  std::optional<Lenience> lenience = {};
  int64_t lenient = 0;  // tokens that are not the model's choice
  bool is_ended = false;

  size_t most_nodes() const {  // behind as many tokens as may come, no row is of use
    int64_t room = lenience ? std::min(int64_t(kLenientNodes), left - 1 + lenience->spare) : left - 1;
    return size_t(std::max<int64_t>(0, std::min(room, int64_t(most))));
  }

  // Chooses the next token from logits [V]; false where it ends the text.  Of the drafted ones a lenient text takes the
  // first that is nearly as likely; where the model ends the text, it ends.
  bool choose(const float* logits, size_t count, const Tokens& drafted = {}) {
    int64_t token = sampler.pick(logits, count);
    if (std::count(ends.begin(), ends.end(), token) != 0) {
      end();
      return false;
    }
    if (lenience && std::count(drafted.begin(), drafted.end(), token) == 0) {
      auto near = std::find_if(drafted.begin(), drafted.end(),
                               [&](int64_t one) { return lenience->takes(one, logits, count); });
      if (near != drafted.end()) ++lenient, token = *near;
    }
    tokens.push_back(token);
    is_ended = --left == 0;
    changed();
    return true;
  }

  void end() {
    is_ended = true;
    changed();
  }
};

// Texts in groups that are verified together: all, but of lenient ones as many as have room for their drafts.
inline std::vector<std::vector<Text*>> together(const std::vector<Text*>& texts, size_t most_rows) {
  bool is_lenient = std::any_of(texts.begin(), texts.end(), [](Text* one) { return one->lenience.has_value(); });
  size_t count = is_lenient ? std::max<size_t>(1, most_rows / (1 + kLenientNodes)) : texts.size();
  std::vector<std::vector<Text*>> groups;
  for (size_t begin = 0; begin < texts.size(); begin += count) {
    auto first = texts.begin() + int64_t(begin);
    groups.emplace_back(first, first + int64_t(std::min(count, texts.size() - begin)));
  }
  return groups;
}

}  // namespace speculation
