// Runs a bundle that `compress run` made for the target webgpu: loads it, checks it, continues prompts.
// A program is data (docs/web.md).  Engines run it: webgpu.js, or wasm.js where there is no WebGPU.

import { readFile, readManifest, readShard } from "./files.js";
import { BundleError, cachesOf, chainOf, checkedNumber, entryOf, evaluate } from "./program.js";

export { BundleError };

const MOST_VERIFIED = 32; // tokens: of so many no row's bits depend on others
const PROMPT_PART = 128; // tokens of a prompt that are computed at once: scratch buffers are as large as that needs

/** Load the bundle at `url`. See runner.d.ts for the options. */
export async function load(url = ".", { onProgress = () => {}, context = 2048, device = "auto", precision = "f32", threads, signal, gpu } = {}) {
  const here = globalThis.location?.href ?? `file://${globalThis.process?.cwd()}/`;
  const base = new URL(String(url).replace(/\/?$/, "/"), here);
  const manifest = await readManifest(base, signal);
  const on = async (kind) => {
    const { Engine } = await (kind === "wasm" ? import("./wasm.js") : import("./webgpu.js"));
    const engine = await Engine.open(manifest, (name) => readFile(base, manifest, name, signal), { precision, threads, isAuto: device === "auto", gpu });
    try {
      engine.compile?.();
      await fill(engine, base, manifest, onProgress, signal);
      await engine.hired; // threads
    } catch (error) {
      engine.destroy();
      throw error;
    }
    return new Model(base, manifest, engine, context);
  };
  if (manifest.engines && !manifest.engines.includes("webgpu")) {
    if (device === "webgpu") throw new BundleError("no-webgpu", "the bundle has kernels in WebAssembly alone; load it without `device`");
    return on("wasm");
  }
  if (device !== "auto") return on(device);
  try {
    return await on("webgpu");
  } catch (error) {
    if (!["no-webgpu", "memory"].includes(error.code) || !manifest.engines?.includes("wasm")) throw error;
    const model = await on("wasm");
    model.fallback = error.message;
    return model;
  }
}

/** Fetch the weights, shard after shard, into the engine's tensors. */
async function fill(engine, base, manifest, onProgress, signal) {
  const { shards, tensors } = manifest.weights;
  const total = shards.reduce((sum, shard) => sum + shard.bytes, 0);
  let loaded = 0;
  let start = 0; // of the shard's first byte among all
  for (const shard of shards) {
    const seen = (bytes) => onProgress({ loaded: (loaded += bytes), total, file: shard.file });
    const content = await readShard(base, shard, seen, signal);
    const end = start + content.length;
    for (const [name, { offset, bytes }] of Object.entries(tensors)) {
      const first = Math.max(offset, start);
      const last = Math.min(offset + 4 * Math.ceil(bytes / 4), end); // tensors are filled up to 16 bytes in the shards
      if (first < last) engine.write(name, first - offset, content.subarray(first - start, last - start));
    }
    start = end;
  }
}

/** A loaded bundle; made by `load`. */
export class Model {
  constructor(base, manifest, engine, context) {
    Object.assign(this, { base, manifest, engine });
    this.info = manifest.model;
    this.context = Math.min(context, this.info.max_positions || context);
    this.device = engine.kind;
    this.adapter = engine.adapter;
    this.precision = engine.precision;
    this.turn = Promise.resolve();
    this.verifies = Boolean(engine.program.verify);
  }

  /** The tokenizer, loaded at the first call: `encode(text).ids`, `decode(ids)`. */
  async tokenizer() {
    this.loadedTokenizer ??= (async () => {
      const { Tokenizer } = await import("./vendor/tokenizers.mjs");
      const text = new TextDecoder().decode(await readFile(this.base, this.manifest, "tokenizer.json"));
      return new Tokenizer(JSON.parse(text), {});
    })();
    return this.loadedTokenizer;
  }

  /** Text of a growing sequence of tokens after a prompt. */
  async textStream(prompt = []) {
    const [tokenizer, { TextStream }] = await Promise.all([this.tokenizer(), import("./text.js")]);
    return new TextStream(tokenizer, prompt);
  }

  /** A new sequence of tokens, with room for `capacity` of them; of an encoder-decoder, after a source. */
  async session(capacity = this.context, source) {
    const { kind } = this.manifest;
    if (!["decoder", "seq2seq"].includes(kind)) throw new BundleError("request", "only a decoder generates");
    if ((kind === "seq2seq") !== (source !== undefined)) {
      throw new BundleError("request", kind === "seq2seq"
        ? "an encoder-decoder's session begins with a source: give a text or token ids"
        : "a decoder reads no source; give it to the session as tokens");
    }
    checkedNumber("capacity", capacity, 1, this.info.max_positions || undefined);
    if (kind === "seq2seq") {
      const ids = this.checked(await this.idsOf(source));
      const { encoded } = await import("./source.js");
      const { state, inputs, sizes } = await encoded(this, capacity, ids);
      return new Session(this, capacity, state, inputs, sizes);
    }
    const caches = cachesOf(this.engine.program);
    return new Session(this, capacity, await this.engine.state(caches, { B: 1, T: capacity }));
  }

  /** Token ids of a text, or those given. */
  async idsOf(input) {
    return typeof input === "string" ? (await this.tokenizer()).encode(input).ids : [...input];
  }

  /** An encoder's last hidden states of a text or its token ids: `data` [tokens, width], and the shape. */
  async encode(input) {
    if (this.manifest.kind !== "encoder") throw new BundleError("request", "only an encoder encodes");
    const ids = this.checked(await this.idsOf(input));
    const { max_positions: most } = this.info;
    if (!ids.length || (most && ids.length > most)) {
      throw new BundleError("request", `${ids.length} tokens; the model takes between 1 and ${most || "any number"}`);
    }
    return this.exclusively(async () => {
      const sizes = { B: 1, S: ids.length };
      this.state ??= await this.engine.state([], sizes);
      await this.engine.run(this.state, { ids, mask: ids.map(() => 1) }, sizes);
      const shape = this.engine.program.output_shape.slice(1).map((n) => evaluate(n, sizes));
      return { data: await this.engine.output(this.state, shape[0] * shape[1]), shape };
    });
  }

  /** A text's embedding: the mean of its last hidden states, of length 1. */
  async embed(input) {
    const { data, shape: [tokens, width] } = await this.encode(input);
    const sums = Float64Array.from({ length: width }, (_, i) => {
      let sum = 0;
      for (let token = 0; token < tokens; token++) sum += data[token * width + i];
      return sum;
    });
    const length = Math.hypot(...sums);
    return Float32Array.from(sums, (sum) => sum / length);
  }

  /** What an image classifier computes of `batch` inputs, one after another in `values`: `data`, and its shape. */
  async run(values, batch = 1) {
    if (this.manifest.kind !== "module") throw new BundleError("request", "only an image classifier runs on numbers");
    const { inputs: [input], output_shape } = this.engine.program;
    checkedNumber("batch", batch, 1);
    const sizes = Object.fromEntries(input.shape.filter((n) => typeof n === "string").map((name) => [name, batch]));
    const shape = input.shape.map((n) => evaluate(n, sizes));
    const count = shape.reduce((product, n) => product * n, 1);
    if (values?.length !== count || shape[0] !== batch) {
      throw new BundleError("request", `${values?.length} numbers for a batch of ${batch}; the model takes ${shape.join(" x ")}`);
    }
    return this.exclusively(async () => {
      this.state ??= await this.engine.state([], sizes);
      await this.engine.run(this.state, { [input.name]: values }, sizes);
      const found = output_shape.map((n) => evaluate(n, sizes));
      return { data: await this.engine.output(this.state, found.reduce((product, n) => product * n, 1)), shape: found };
    });
  }

  checked(ids) {
    const wrong = ids.find((id) => !Number.isInteger(id) || id < 0 || id >= this.info.vocab_size);
    if (wrong !== undefined) throw new BundleError("request", `token ${wrong} is none of this model's`);
    return ids;
  }

  /** Continue a prompt, text or token ids, or answer it where there is an encoder; yields pieces of text. */
  async *generate(prompt, options = {}) {
    const ids = await this.idsOf(prompt);
    const text = await this.textStream(this.info.encoder_source?.start_ids ?? ids);
    for await (const id of this.generateIds(ids, options)) {
      const piece = text.push(id);
      if (piece) yield piece;
    }
    const rest = text.end();
    if (rest) yield rest;
  }

  /** Continue token ids; yields token ids. */
  async *generateIds(prompt, { maxTokens = 64, temperature = 0, topK = 0, topP = 1, seed, speculate, onSpeculation, signal, session } = {}) {
    const facts = this.info.encoder_source; // how an encoder-decoder's decoder begins and ends: it reads the prompt
    const given = prompt.length || this.info.bos_id == null ? [...prompt] : [this.info.bos_id];
    const ids = facts?.start_ids ?? given;
    if (facts && session) throw new BundleError("request", "a session has its source already, the prompt would be another");
    if (!given.length) throw new BundleError("request", "the prompt is empty, and this model has no token to begin with");
    this.checked(given);
    checkedNumber("maxTokens", maxTokens, 0);
    checkedNumber("temperature", temperature, 0, undefined, true);
    checkedNumber("topK", topK, 0);
    checkedNumber("topP", topP, Number.MIN_VALUE, 1, true);
    if (seed !== undefined) checkedNumber("seed", seed, 0);
    const isDrafted = this.drafts(speculate);
    const own = session ?? await this.session(Math.min(this.context, ids.length + maxTokens), facts && given);
    try {
      const { generator, sample } = temperature > 0 ? await import("./sampling.js") : {};
      const random = generator?.(seed);
      const room = own.capacity - own.position;
      if (ids.length > room) throw new BundleError("request", `a prompt of ${ids.length} tokens, there is room for ${room}`);
      const most = Math.min(maxTokens, room - ids.length + 1);
      const ends = this.info.eos_ids;
      const drafts = isDrafted ? new (await import("./lookup.js")).Drafts(this, ids, ends) : undefined;
      if (drafts) onSpeculation?.(drafts.counts);
      const pick = (logits) => temperature > 0 ? sample(logits, temperature, topK, topP, random)
        : logits.indexOf(logits.reduce((a, b) => Math.max(a, b)));
      let next = ids;
      for (let count = 0; count < most && !signal?.aborted; count++) {
        if (facts?.forced_eos_id != null && count === maxTokens - 1) return; // the end has the last token's place
        const guesses = count && drafts?.draft(most - count - 1);
        if (guesses?.length) {
          const width = this.info.vocab_size;
          const found = await (temperature > 0 ? own.verify([...next, ...guesses]) : own.likeliestOf([...next, ...guesses]));
          const came = [];
          do came.push(temperature > 0 ? pick(found.subarray(came.length * width, (came.length + 1) * width)) : found[came.length]);
          while (came.at(-1) === guesses[came.length - 1]);
          drafts.learn(guesses.length, came, own.ms);
          for (const id of came) {
            own.accept(1); // what the token was chosen after
            if (ends.includes(id)) return;
            yield id;
            if (signal?.aborted) return;
          }
          next = came.slice(-1);
          count += came.length - 1;
          continue;
        }
        const banned = facts ? [...facts.suppressed_ids, ...count ? [] : facts.first_suppressed_ids] : [];
        const some = temperature > 0 || banned.length ? await own.candidates(next, banned.length ? 0 : topK) : undefined;
        for (const id of banned) some[id] = -Infinity;
        const id = some ? pick(some) : await own.likeliest(next);
        if (count) drafts?.learn(0, [id], own.ms);
        else drafts?.begin([id], own.ms);
        if (ends.includes(id)) return;
        yield id;
        next = [id];
      }
    } finally {
      if (!session) own.destroy();
    }
  }

  /** Whether a text is to be drafted: as the recipe says, or a call. */
  drafts(speculate) {
    if (speculate === undefined) return this.verifies && Boolean(this.info.speculate);
    if (!["lookup", "off"].includes(speculate)) throw new BundleError("request", `speculate ${speculate}: give "lookup" or "off"`);
    if (speculate === "lookup" && !this.verifies) {
      throw new BundleError("request", "speculate lookup: there are no kernels here that verify drafted tokens; make the " +
        "bundle with `speculate: lookup` in its recipe");
    }
    return speculate === "lookup";
  }

  /** Find the constants with which kernels are fastest on this device; see runner.d.ts. */
  async tune(options) {
    if (this.device !== "webgpu") return { adapter: this.adapter, seconds: 0, kernels: [] };
    const { tune } = await import("./tune.js");
    return this.exclusively(() => tune(this.engine, options));
  }

  /** Calls take turns: scratch buffers are shared. */
  exclusively(work) {
    const result = this.turn.then(work);
    this.turn = result.catch(() => {});
    return result;
  }

  /** Give all memory back. */
  destroy() {
    this.engine.destroy();
  }
}

/** Keys and values of one sequence; made by `Model.session`. */
export class Session {
  #position = 0;
  #stored = 0; // tokens whose keys and values are there
  #verified = 0; // tokens behind the position that may be accepted
  ms = 0; // that the last call took

  constructor(model, capacity, state, inputs = {}, sizes = {}) { // of a source
    Object.assign(this, { model, capacity, state, inputs, sizes });
  }

  /** Tokens that the next come after; set it back to forget what came after. */
  get position() {
    return this.#position;
  }

  set position(value) {
    this.#position = checkedNumber("position", value, 0, this.#stored);
    this.#verified = 0;
  }

  /** Logits of the last of `ids`: Float32Array. */
  logits(ids) {
    const { engine, info } = this.model;
    return this.advance(ids, "", () => engine.output(this.state, info.vocab_size));
  }

  /** The likeliest token after `ids`, picked on the device. */
  likeliest(ids) {
    const { engine, info } = this.model;
    return this.advance(ids, "argmax", () => engine.picked(this.state, info.vocab_size));
  }

  /** What one of the `count` likeliest tokens (0: all) after `ids` is drawn from: [token, logit] each, or all logits. */
  candidates(ids, count) {
    const { engine, info } = this.model;
    if (!count || !engine.likeliest || !(count <= engine.program.top_k?.most)) return this.logits(ids);
    return this.advance(ids, "top_k", () => engine.likeliest(this.state, info.vocab_size), count);
  }

  /** Logits after each of `ids`, a chain of drafted tokens, one after another: Float32Array. None is appended. */
  verify(ids) {
    const { info } = this.model;
    return this.verified(ids, "", (entry) => entry.output(this.chain, ids.length * info.vocab_size));
  }

  /** The likeliest token after each of `ids`, a chain of drafted tokens, picked on the device: Uint32Array. */
  likeliestOf(ids) {
    const { info } = this.model;
    return this.verified(ids, "argmax", (entry) => entry.pickedOf(this.chain, ids.length, info.vocab_size));
  }

  /** Compute a chain of drafted tokens, and read what came of it, in one piece. */
  verified(ids, pick, read) {
    const { engine, verifies } = this.model;
    if (!verifies) throw new BundleError("request", "there are no kernels here that verify drafted tokens");
    checkedNumber("tokens to verify", ids.length, 1, MOST_VERIFIED);
    this.model.checked(ids);
    return this.model.exclusively(async () => {
      this.checkRoom(ids.length);
      const began = performance.now();
      const keep = ids.map((_, i) => i);
      const row = keep.map((i) => this.position + i);
      const inputs = { ids, position: row, keep, parent: keep.map((i) => i - 1), slot: keep.map(() => 0), row };
      const entry = entryOf(engine, "verify");
      this.chain ??= chainOf(engine, this.state);
      await entry.run(this.chain, inputs, { B: 1, S: ids.length, R: ids.length, T: this.capacity }, pick);
      const found = await read(entry);
      this.#verified = ids.length;
      this.ms = performance.now() - began;
      return found;
    });
  }

  /** Append the first `count` of the tokens that were just verified, or the next of them. */
  accept(count) {
    checkedNumber("tokens to accept", count, 0, this.#verified);
    this.#verified -= count;
    this.#stored = this.#position += count;
  }

  checkRoom(count) {
    if (this.position + count > this.capacity) {
      throw new BundleError("request", `${this.position} + ${count} tokens; the session has room for ${this.capacity}`);
    }
  }

  /** Compute tokens, in parts, move on, and read what came of it. */
  advance(ids, pick, read, count = 0) {
    if (!ids.length) throw new BundleError("request", "no tokens; give at least one");
    this.model.checked(ids);
    return this.model.exclusively(async () => {
      this.checkRoom(ids.length);
      const began = performance.now();
      this.#verified = 0;
      for (let i = 0; i < ids.length; i += PROMPT_PART) {
        const part = Array.from(ids.slice(i, i + PROMPT_PART));
        const position = part.map((_, j) => this.position + j);
        const inputs = { ids: part, position, keep: [part.length - 1], ...this.inputs };
        const sizes = { B: 1, S: part.length, R: 1, T: this.capacity, K: count, ...this.sizes };
        await this.model.engine.run(this.state, inputs, sizes, i + PROMPT_PART < ids.length ? "" : pick);
        this.#stored = this.#position += part.length;
      }
      const found = await read();
      this.ms = performance.now() - began;
      return found;
    });
  }

  /** Give its memory back. */
  destroy() {
    const { engine } = this.model;
    const kept = Object.keys(this.state.buffers).filter((name) => this.chain?.buffers[name] === this.state.buffers[name]);
    for (const name of kept) delete this.chain.buffers[name];
    if (this.chain) engine.release(this.chain);
    engine.release(this.state);
  }
}
