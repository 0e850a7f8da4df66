// Picks tokens by their probability.

const NEGLIGIBLE = 48 * Math.LN2; // less likely by 2^48: a whole vocabulary of them is drawn once in 10^9 tokens

/** Random numbers in [0, 1): mulberry32; without a seed, another sequence each time. */
export function generator(seed = Math.floor(Math.random() * 2 ** 32)) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** A token by its probability, among the `topK` likeliest (0: all) and the fewest that reach `topP` together.
    `candidates`: all logits, or [token, logit] of at least so many. */
export function sample(candidates, temperature, topK, topP, random) {
  const pairs = near(candidates, temperature).sort(([a, x], [b, y]) => y - x || a - b);
  const order = pairs.slice(0, topK || pairs.length).map(([id]) => id);
  const weights = order.map((_, i) => Math.exp((pairs[i][1] - pairs[0][1]) / temperature));
  let limit = topP * weights.reduce((sum, weight) => sum + weight, 0);
  let kept = 0;
  for (; kept < weights.length && limit > 0; kept++) limit -= weights[kept];
  let point = random() * weights.slice(0, Math.max(1, kept)).reduce((sum, weight) => sum + weight, 0);
  return order[weights.findIndex((weight) => (point -= weight) < 0)] ?? order[0];
}

/** Of all logits those that are not negligible: few of a large vocabulary, so that sorting takes no time. */
function near(candidates, temperature) {
  if (Array.isArray(candidates)) return candidates;
  const least = candidates.reduce((a, b) => Math.max(a, b)) - NEGLIGIBLE * temperature;
  const found = [];
  candidates.forEach((logit, id) => { if (logit >= least) found.push([id, logit]); });
  return found;
}
