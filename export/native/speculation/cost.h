// What drafts gain, expected tokens over what they cost: compressor_runtime/speculation/cost.py.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace speculation {

// Expected tokens of verifying a chain: 1 + a + a^2 + ... + a^length (Leviathan et al., arXiv:2211.17192, equation 1).
inline double expected_tokens(double acceptance, size_t length) {
  double sum = 0;
  for (size_t i = 0; i <= length; ++i) sum += std::pow(acceptance, double(i));
  return sum;
}

// Tokens per second over those of plain steps that a chain promises at its best length.  Times are in steps:
// `verification` of 1, 2, ... drafted tokens with the one before them, `draft_cost` of drafting one.
inline double best_speedup(double acceptance, double draft_cost, const std::vector<double>& verification) {
  double best = 0;
  for (size_t length = 1; length <= verification.size(); ++length) {
    double spent = verification[length - 1] + double(length) * draft_cost;
    best = std::max(best, expected_tokens(acceptance, length) / spent);
  }
  return best;
}

// How many drafted tokens to verify so that most tokens per second are expected; 0 where plain steps are as fast.
// `chances` that each is accepted fall, `seconds` tells the time of so many rows; each of the texts gets one token
// whatever is drafted.
template <class Seconds>
size_t best_count(const std::vector<double>& chances, size_t texts, const Seconds& seconds, double margin) {
  size_t best = 0;
  double tokens = double(texts), highest = (1 + margin) * tokens / seconds(texts);
  for (size_t count = 1; count <= chances.size(); ++count) {
    tokens += chances[count - 1];
    double rate = tokens / seconds(texts + count);
    if (rate > highest) best = count, highest = rate;
  }
  return best;
}

// Whether to draft a further token of a chain.  Time has a price, the most tokens per second that can be had: those of
// plain steps, or of chains of the best length.  A further token is drafted if some number of further ones, at that
// price, is expected to bring more than verifying the chain as it stands.  Of the texts that wait, some draft together,
// a token of each in one call, in `draft_s`: the others are taken to be like this one.
template <class Seconds>
bool is_worth_drafting(const std::vector<double>& chances, double following, size_t most, size_t texts,
                       const Seconds& seconds, double draft_s, double margin, size_t together) {
  double price = (1 + margin) * double(texts) / seconds(texts);
  for (size_t n = 1; n <= most; ++n) {
    double tokens = double(texts - together) + double(together) * expected_tokens(following, n);
    price = std::max(price, tokens / (seconds(texts + together * n) + double(n) * draft_s));
  }
  size_t count = chances.size();
  double now = -price * seconds(texts + together * count), last = chances.empty() ? 1 : chances.back(), gained = 0;
  for (size_t n = 1; count + n <= most; ++n) {
    last *= following;
    gained += double(together) * last;
    if (gained - price * (seconds(texts + together * (count + n)) + double(n) * draft_s) > now) return true;
  }
  return false;
}

}  // namespace speculation
