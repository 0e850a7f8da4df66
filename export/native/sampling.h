// Chooses tokens from logits: Sampler in compressor_runtime/generation.py, with the random numbers that NumPy draws.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

namespace sampling {

// PCG64 (O'Neill 2014, XSL-RR on 128 bits) seeded through NumPy's SeedSequence: the stream of `default_rng(seed)`.
class Generator {
 public:
  explicit Generator(uint64_t seed) {
    uint32_t pool[4] = {uint32_t(seed), uint32_t(seed >> 32), 0, 0}, factor = 0x43b0d7e5;
    auto hashed = [&factor](uint32_t value, uint32_t by) {
      value ^= factor;
      value *= factor *= by;
      return value ^ value >> 16;
    };
    for (uint32_t& word : pool) word = hashed(word, 0x931e8875);
    for (uint32_t& from : pool) {
      for (uint32_t& to : pool) {
        if (&from == &to) continue;
        uint32_t mixed = 0xca01f9dd * to - 0x4973f715 * hashed(from, 0x931e8875);
        to = mixed ^ mixed >> 16;
      }
    }
    factor = 0x8b51f9dd;
    Wide words[2] = {0, 0};  // state and sequence, of four words each: the upper half first, in it the lower word
    for (size_t i = 0; i < 8; ++i) {
      words[i / 4] |= Wide(hashed(pool[i % 4], 0x58f38ded)) << (32 * ((i % 4) ^ 2));
    }
    increment_ = words[1] << 1 | 1;
    step();
    state_ += words[0];
    step();
  }

  double next() {  // from 0 to below 1
    step();
    uint64_t bits = uint64_t(state_ >> 64) ^ uint64_t(state_), turn = uint64_t(state_ >> 122);
    return double((bits >> turn | bits << (-turn & 63)) >> 11) * 0x1p-53;
  }

 private:
  __extension__ using Wide = unsigned __int128;

  void step() { state_ = state_ * (Wide(0x2360ed051fc65da4) << 64 | 0x4385df649fccf645) + increment_; }

  Wide state_ = 0, increment_ = 0;
};

struct Options {
  double temperature = 0;  // 0 takes the likeliest token
  size_t top_k = 0;  // of so many likeliest only; 0 for all
  double top_p = 1;  // of the fewest whose probabilities reach it
  uint64_t seed = std::random_device()();
};

// With one draw of the stream for each token; greedily, with none.
class Sampler {
 public:
  explicit Sampler(const Options& options) : options_(options), generator_(options.seed) {}

  int64_t pick(const float* logits, size_t count) {
    return chosen(logits, count, options_.temperature == 0 ? 0 : generator_.next());
  }

  // What `pick` would take if `number` were the next random number.
  int64_t guess(const float* logits, size_t count, double number) const { return chosen(logits, count, number); }

  // The next random numbers, which stay to be drawn.
  std::vector<double> ahead(size_t count) const {
    std::vector<double> numbers(count);
    Generator copy = generator_;
    if (options_.temperature != 0) std::generate(numbers.begin(), numbers.end(), [&copy] { return copy.next(); });
    return numbers;
  }

 private:
  int64_t chosen(const float* logits, size_t count, double number) const {
    size_t best = 0;
    bool numbers = true;
    for (size_t i = 0; i < count; ++i) {
      numbers = numbers && !std::isnan(logits[i]);
      if (logits[i] > logits[best]) best = i;
    }
    if (!numbers || !std::isfinite(logits[best])) {
      throw std::runtime_error("the model computed logits that are NaN or infinity; its weights may be damaged");
    }
    if (options_.temperature == 0) return int64_t(best);
    std::vector<int64_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), 0);
    auto likelier = [logits](int64_t a, int64_t b) { return logits[a] > logits[b]; };
    bool is_cut = options_.top_k > 0 && options_.top_k < count;
    if (is_cut || options_.top_p < 1) std::stable_sort(tokens.begin(), tokens.end(), likelier);
    if (is_cut) tokens.resize(options_.top_k);
    std::vector<double> sums;
    double sum = 0, top = logits[best];
    for (int64_t token : tokens) sums.push_back(sum += std::exp((double(logits[token]) - top) / options_.temperature));
    if (options_.top_p < 1) {
      auto last = std::lower_bound(sums.begin(), sums.end(), options_.top_p * sum);
      sums.resize(std::min(sums.size(), size_t(last - sums.begin()) + 1));
    }
    auto found = std::upper_bound(sums.begin(), sums.end(), number * sums.back());
    return tokens[std::min(size_t(found - sums.begin()), sums.size() - 1)];
  }

  Options options_;
  Generator generator_;
};

}  // namespace sampling
