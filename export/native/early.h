// Tokens that leave behind some of the blocks where they are sure: compressor_runtime/depth/early.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace early {

using Tokens = std::vector<int64_t>;
using Rows = std::vector<float>;  // of the residual stream, one token behind another

constexpr int64_t kMostRows = 32;  // that a stage runs at once: for so many no row's bits depend on others

// As the manifest has them.
struct Facts {
  std::vector<int64_t> blocks;  // in front of each exit
  int64_t of = 0;  // blocks of the model
  std::vector<double> thresholds;  // of confidence, a token leaves from there on
  double give_up = 0;  // mean confidence of the last tokens at the first exit below which a text ends; 0 for none
  size_t window = 0;  // of these tokens
};

// The model's stages, of tokens in a row from a position on.
struct Stages {
  std::function<Rows(const Tokens& ids, int64_t first)> begin;
  std::function<Rows(size_t number, const Tokens& ids, int64_t first, const Rows& stream)> run;
  std::function<std::vector<float>(const Rows& row)> end;  // one token's logits [V]
};

struct Counts {
  int64_t tokens = 0, ran = 0, heads = 0;  // ran: blocks, those that ran late included

  std::string text(int64_t blocks) const {
    char line[100];
    double count = double(std::max<int64_t>(1, tokens));
    std::snprintf(line, sizeof line, "%.2f of %lld blocks a token, %.2f heads", double(ran) / count,
                  static_cast<long long>(blocks), double(heads) / count);
    return line;
  }
};

// The steps of one text.  What tokens left undone waits in front of the next stage, until a token goes there.
class Exits {
 public:
  Exits(Stages stages, Facts facts, Counts& counts)
      : stages_(std::move(stages)), facts_(std::move(facts)), counts_(counts) {
    bounds_ = {0};
    bounds_.insert(bounds_.end(), facts_.blocks.begin(), facts_.blocks.end());
    bounds_.push_back(facts_.of);
    waiting_.resize(facts_.thresholds.size());
  }

  // Whether the text is to be given up.
  bool hopeless() const {
    if (facts_.give_up == 0 || confidences_.size() != facts_.window) return false;
    double sum = std::accumulate(confidences_.begin(), confidences_.end(), 0.0);
    return sum / double(confidences_.size()) < facts_.give_up;
  }

  // Reads the token at a position; logits [V] of what comes next.
  std::vector<float> step(int64_t token, int64_t position) {
    Tokens ids = {token};
    Rows stream = stages_.begin(ids, position);
    width_ = int64_t(stream.size());
    stream = run(0, ids, position, stream);
    ++counts_.tokens;
    for (size_t place = 0; place < waiting_.size(); ++place) {
      Waiting& waiting = waiting_[place];
      waiting.add(ids, position, stream);
      double threshold = facts_.thresholds[place];
      bool asks = place == 0 && facts_.give_up != 0;
      if (threshold <= 1 || asks) {
        std::vector<float> logits = end(stream);
        double confidence = top_probability(logits);
        if (asks) {
          confidences_.push_back(confidence);
          if (confidences_.size() > facts_.window) confidences_.pop_front();
        }
        if (confidence >= threshold && waiting.ids.size() < size_t(kMostRows) * (place + 1)) return logits;
      }
      Waiting taken = std::exchange(waiting, Waiting());
      ids = std::move(taken.ids), position = taken.first;
      stream = run(place + 1, ids, position, taken.streams);
    }
    return end(stream);
  }

 private:
  struct Waiting {
    Tokens ids;
    int64_t first = 0;  // position
    Rows streams;

    void add(const Tokens& more, int64_t position, const Rows& rows) {
      if (ids.empty()) first = position;
      ids.insert(ids.end(), more.begin(), more.end());
      streams.insert(streams.end(), rows.begin(), rows.end());
    }
  };

  Rows run(size_t number, const Tokens& ids, int64_t first, const Rows& stream) {
    counts_.ran += int64_t(ids.size()) * (bounds_[number + 1] - bounds_[number]);
    Rows found;
    for (int64_t begin = 0, count = int64_t(ids.size()); begin < count; begin += kMostRows) {
      int64_t end = std::min(count, begin + kMostRows);
      Tokens part(ids.begin() + begin, ids.begin() + end);
      Rows rows(stream.begin() + begin * width_, stream.begin() + end * width_);
      Rows made = stages_.run(number, part, first + begin, rows);
      found.insert(found.end(), made.begin(), made.end());
    }
    return found;
  }

  std::vector<float> end(const Rows& stream) {  // of the last row
    ++counts_.heads;
    return stages_.end(Rows(stream.end() - width_, stream.end()));
  }

  static double top_probability(const std::vector<float>& logits) {
    float top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (float logit : logits) sum += double(std::exp(logit - top));
    return 1 / sum;
  }

  Stages stages_;
  Facts facts_;
  std::vector<int64_t> bounds_;  // of stages, in blocks
  std::vector<Waiting> waiting_;
  std::deque<double> confidences_;  // at the first exit, of the last tokens
  int64_t width_ = 0;  // of the stream
  Counts& counts_;
};

}  // namespace early
