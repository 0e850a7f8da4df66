// Drafts of tokens by lookup, and when they pay: compressor_runtime/speculation for one text, with chains in place of
// trees.  Drafts decide how fast tokens come, never which.

const LONGEST = 8, SHORTEST = 2; // tokens that must agree, at most and at least
const PLACES = 16; // latest ones that are compared
const MOST_DRAFTED = 15; // in a verification, which has a row more: for 32 no row's bits depend on others
const PRIOR = [0.1, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85]; // by the tokens that agree
const MEMORY = 64; // guesses that an estimate mostly rests on: texts change
const WINDOW = 9; // last times of each size, of which the median counts
const STALE_ROUNDS = 256; // a size that was not seen for so long is tried again
const ROW_GUESS = 0.03; // of a step: a further row's time, until one was measured
const FIRST_ROWS = 3; // that are added in a first verification; later ones have at most twice the rows of measured ones
const LEAST_CHANCE = 0.02, MARGIN = 0.03;
const DEBT = 0.003, GRACE_STEPS = 2; // of all time, and steps: what drafts may have cost more than they gained
const MOST_CREDIT_STEPS = 20; // a gain of long ago does not pay for long losses
const WIDEST = 2 ** 26; // more than any vocabulary: a pair of tokens is one number

/** What followed where the text had the same last tokens: prompt lookup decoding (Saxena 2023,
    https://github.com/apoorvumang/prompt-lookup-decoding) with an index in place of a search. */
export class Index {
  ids = [];
  latest = new Map(); // a pair of tokens -> the place of what followed it last
  earlier = []; // place -> that of what followed the same pair before, if anything did

  append(ids) {
    for (const id of ids) {
      const pair = this.#pair();
      this.earlier.push(this.latest.get(pair));
      if (this.ids.length >= SHORTEST) this.latest.set(pair, this.ids.length);
      this.ids.push(id);
    }
  }

  #pair() {
    return this.ids.at(-2) * WIDEST + this.ids.at(-1);
  }

  /** How many tokens agree, and where the longest match goes on, the latest of equal ones. */
  longest() {
    const { ids } = this;
    const best = { agreeing: 0, place: 0 };
    let place = this.latest.get(this.#pair());
    for (let tried = 0; place !== undefined && tried < PLACES && best.agreeing < LONGEST; tried++) {
      let agreeing = SHORTEST;
      while (agreeing < Math.min(LONGEST, place) && ids[place - agreeing - 1] === ids.at(-agreeing - 1)) agreeing++;
      if (agreeing > best.agreeing) Object.assign(best, { agreeing, place });
      place = this.earlier[place];
    }
    return best;
  }

  /** The token `offset` behind a place; where the text ends, it repeats itself. */
  at(place, offset) {
    return this.ids[place + offset % (this.ids.length - place)];
  }
}

/** How often a guess is right, by the tokens that agree: a prior that counts like two guesses, then what was seen. */
export class Acceptance {
  chances = [...PRIOR];
  counts = PRIOR.map(() => 0);

  chance(agreeing) {
    return this.chances[Math.min(agreeing, LONGEST)];
  }

  /** Compare a draft with the tokens that came. */
  learn(draft, agreeing, came) {
    for (let i = 0; i < Math.min(draft.length, came.length); i++) {
      const kind = Math.min(agreeing + i, LONGEST);
      const isRight = draft[i] === came[i];
      this.chances[kind] += (isRight - this.chances[kind]) / Math.min(this.counts[kind]++ + 3, MEMORY);
      if (!isRight) break;
    }
  }
}

/** Milliseconds of steps (one row) and verifications (more), as running medians, and what drafts gained, less what they
    cost. */
export class Pace {
  sizes = new Map(); // rows -> times, their median, and the round that last had so many
  rounds = 0;
  elapsed = 0;
  account = 0;
  hasVerified = false;

  wait(ms) { // for a prompt, in which no token came
    this.elapsed += ms;
  }

  note(rows, ms) {
    const times = [...this.sizes.get(rows)?.times ?? [], ms].slice(-WINDOW);
    const sorted = [...times].sort((a, b) => a - b);
    const median = (sorted[(times.length - 1) >> 1] + sorted[times.length >> 1]) / 2;
    this.sizes.set(rows, { times, median, seen: ++this.rounds });
    this.elapsed += ms;
  }

  get step() {
    return this.sizes.get(1).median;
  }

  /** Whether steps were measured, of which the first says little, and the account allows to go on. */
  mayDraft() {
    return this.sizes.get(1)?.times.length > 1 && this.account > -(DEBT * this.elapsed + GRACE_STEPS * this.step);
  }

  /** Rows and times, smallest first, without those of long ago. */
  known() {
    const fresh = [...this.sizes].filter(([rows, { seen }]) => rows === 1 || seen > this.rounds - STALE_ROUNDS);
    return fresh.map(([rows, { median }]) => [rows, median]).sort(([a], [b]) => a - b);
  }

  /** A probability of being accepted below which no drafted token pays: a row's share of a step. */
  leastChance() {
    const slopes = this.known().slice(1).map(([rows, ms]) => (ms - this.step) / (rows - 1));
    return Math.max(LEAST_CHANCE, slopes.length ? Math.min(...slopes) / this.step : 0);
  }

  /** How many drafted tokens to verify so that most tokens per second are expected, of those with these probabilities. */
  choose(chances) {
    const known = this.known();
    const largest = known.at(-1)[0];
    let best = 0, tokens = 1, highest = (1 + MARGIN) / this.step;
    chances.slice(0, largest + Math.max(FIRST_ROWS, largest) - 1).forEach((chance, i) => {
      tokens += chance;
      const rate = tokens / this.expected(known, i + 2);
      if (rate > highest) [best, highest] = [i + 1, rate];
    });
    return best;
  }

  /** Measured, or on a line between measured sizes; beyond the largest, on that from a step through it. */
  expected(known, rows) {
    let [below, ms] = known[0];
    for (const [size, time] of known) {
      if (size > rows) return ms + (time - ms) * (rows - below) / (size - below);
      [below, ms] = [size, time];
    }
    const slope = below === 1 ? ROW_GUESS * this.step : Math.max(0, ms - this.step) / (below - 1);
    return ms + slope * (rows - below);
  }

  charge(ms) { // for a draft
    this.elapsed += ms;
    this.account -= ms;
  }

  settle(ms, accepted) { // after a verification: steps saved, less what it took longer
    const gain = accepted * this.step - (ms - this.step);
    this.account = Math.min(this.account + gain, MOST_CREDIT_STEPS * this.step);
  }
}

/** Drafts one text. In each round `draft` is asked first, and `learn` told what came.
    `model` keeps what was measured and learnt for the next text. */
export class Drafts {
  counts = { kind: "lookup", verifications: 0, drafted: 0, accepted: 0, steps: 0, tokens: 0, ms: 0 };
  index = new Index();
  drafted = []; // the last, also where it did not pay
  agreeing = 0;
  missing = []; // tokens that the index lacks: it is read up only where a draft is allowed

  constructor(model, prompt, ends) {
    const { pace, acceptance } = (model.drafting ??= { pace: new Pace(), acceptance: new Acceptance() });
    Object.assign(this, { pace, acceptance, ends, missing: [...prompt] });
  }

  /** Tokens to verify behind the text, at most `most`; none where a plain step is expected to be as fast. */
  draft(most) {
    this.drafted = [];
    if (most < 1 || !this.pace.mayDraft()) return [];
    const began = performance.now();
    this.index.append(this.missing);
    this.missing = [];
    const { agreeing, place } = this.index.longest();
    const least = this.pace.leastChance();
    const chances = [];
    let chance = 1;
    while (agreeing && this.drafted.length < Math.min(most, MOST_DRAFTED)) {
      chance *= this.acceptance.chance(agreeing + chances.length);
      if (chances.length && chance < least) break; // a first one may be unlikely: so estimates rise again
      this.drafted.push(this.index.at(place, chances.length));
      chances.push(chance);
    }
    this.agreeing = agreeing;
    const end = this.drafted.findIndex((id) => this.ends.includes(id)); // an end needs no row of its own
    const count = this.pace.choose(end < 0 ? chances : chances.slice(0, end));
    const ms = performance.now() - began;
    this.pace.charge(ms);
    this.counts.ms += ms;
    return this.drafted.slice(0, count);
  }

  /** Book the prompt's time, with the first token that came. */
  begin(came, ms) {
    this.pace.wait(ms);
    this.missing.push(...came);
  }

  /** Book a plain step, or a verification of so many drafted tokens, and the tokens that came. */
  learn(count, came, ms) {
    const { counts, pace } = this;
    const isFirst = count > 0 && !pace.hasVerified; // which also compiles, and allots memory: it says nothing of others
    if (isFirst) pace.hasVerified = true;
    else pace.note(count + 1, ms);
    counts.tokens += came.length;
    counts.ms += ms;
    this.acceptance.learn(this.drafted, this.agreeing, came); // verified or not
    this.missing.push(...came);
    if (!count) {
      counts.steps += 1;
      return;
    }
    if (!isFirst) pace.settle(ms, came.length - 1);
    counts.verifications += 1;
    counts.drafted += count;
    counts.accepted += came.length - 1;
  }
}
