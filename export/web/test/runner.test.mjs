// Tests of the package in Node: `npm test`; with COMPRESSOR_BUNDLE, the folder of a bundle of the reference model, also
// of generation.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { cp, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, test } from "node:test";

import { BundleError, load } from "compressor-web";

import { Drafts, Index, Pace } from "../lookup.js";
import { bytesOf, evaluate, sha256 } from "../program.js";
import { generator, sample } from "../sampling.js";
import { TextStream } from "../text.js";
import { Engine } from "../wasm.js";
import { specialised } from "../webgpu.js";

const bundle = process.env.COMPRESSOR_BUNDLE;

describe("sampling", () => {
  const logits = Float32Array.from({ length: 1000 }, (_, i) => i === 400 ? 2 : i === 7 ? 1 : i === 900 ? 0 : -50);
  const drawn = (temperature, topK, topP) => {
    const random = generator(3), counts = {};
    for (let i = 0; i < 20000; i++) {
      const id = sample(logits, temperature, topK, topP, random);
      counts[id] = (counts[id] ?? 0) + 1 / 20000;
    }
    return counts;
  };

  test("follows the probabilities", () => {
    for (const temperature of [1, 2]) {
      const weights = [2, 1, 0].map((logit) => Math.exp(logit / temperature));
      const sum = weights.reduce((a, b) => a + b);
      const counts = drawn(temperature, 0, 1);
      [400, 7, 900].forEach((id, i) => assert.ok(Math.abs(counts[id] - weights[i] / sum) < 0.015));
      assert.equal(Object.keys(counts).length, 3);
    }
  });

  test("keeps to the likeliest", () => {
    assert.deepEqual(Object.keys(drawn(1, 2, 1)), ["7", "400"]);
    assert.deepEqual(Object.keys(drawn(1, 0, 0.8)), ["7", "400"]); // 0.67 and 0.24
    assert.deepEqual(Object.keys(drawn(1, 0, 0.5)), ["400"]);
    assert.deepEqual(Object.keys(drawn(0.01, 0, 1)), ["400"]);
  });

  test("draws the same from the likeliest as from all", () => {
    const all = Float32Array.from({ length: 300 }, (_, i) => Math.round(40 * Math.sin(i * i)) / 10); // many are equal
    const last = [...all].sort((a, b) => b - a)[19];
    const pairs = [...all.entries()].filter(([, logit]) => logit >= last).reverse();
    const draw = (candidates) => {
      const random = generator(1);
      return Array.from({ length: 50 }, () => sample(candidates, 1, 20, 0.9, random));
    };
    assert.deepEqual(draw(pairs), draw(all));
  });

  test("is repeated by its seed", () => {
    const [a, b, c] = [5, 5, 6].map((seed) => generator(seed)());
    assert.ok(a === b && a !== c);
  });
});

describe("sizes", () => {
  test("are expressions of names and numbers", () => {
    const names = { S: 7, T: 32 };
    assert.equal(evaluate(5, names), 5);
    assert.equal(evaluate("T", names), 32);
    assert.equal(evaluate(["ceil", ["+", "S", ["*", 2, "T"]], 10], names), 8);
    assert.deepEqual(["-", "//", "%", "min", "max"].map((o) => evaluate([o, "S", 3], names)), [4, 2, 1, 3, 7]);
    assert.throws(() => evaluate(["^", 1, 2], names), { code: "damaged" });
  });

  test("of buffers depend on the type", () => {
    assert.equal(bytesOf({ shape: ["S", 2], dtype: "float32" }, { S: 3 }), 24);
    assert.equal(bytesOf({ shape: [], dtype: "int64" }, {}), 8);
  });

  test("constants stand in front of a source", () => {
    assert.equal(specialised({ source: "x", constants: { LANES: 8 } }, { LANES: 4 }), "const LANES: u32 = 4u;\nx");
  });

  test("floats are multiplied in float16 where that is wanted", () => {
    const record = { source: "alias Real = f32;\nx", constants: { LANES: 8 } };
    assert.equal(specialised(record, record.constants, "f16"), "enable f16;\nconst LANES: u32 = 8u;\nalias Real = f16;\nx");
  });

  test("repeated lines are written out, one repetition inside of another", () => {
    const source = "a\n//# for i TILES\nb$i$\n//# for m TOKENS\nc$i$_$m$\n//# end\n//# end\nd";
    const written = specialised({ source, constants: { TILES: 2, TOKENS: 3 } }).split("\n").slice(2).join(" ");
    assert.equal(written, "a b0 c0_0 c0_1 c0_2 b1 c1_0 c1_1 c1_2 d");
  });
});

describe("memory", () => {
  const heap = () => {
    const engine = new Engine({ scratch: [], steps: [], inputs: [] });
    engine.holes = [[1000, Infinity]];
    return engine;
  };

  test("holes are filled and grow together again", () => {
    const engine = heap();
    const [a, b, c] = [100, 200, 64].map((bytes) => engine.allot(bytes));
    assert.deepEqual([a, b, c], [1024, 1152, 1408]);
    engine.free(b);
    assert.equal(engine.allot(256), b);
    engine.free(a);
    engine.free(b);
    assert.equal(engine.allot(300), a);
    engine.free(a);
    engine.free(c);
    assert.deepEqual(engine.holes, [[1024, Infinity]]);
  });

  test("any order of allotting and freeing keeps buffers apart", () => {
    const engine = heap();
    const taken = new Map();
    let state = 1;
    const random = (n) => (state = (state * 48271) % 2147483647) % n;
    for (let i = 0; i < 3000; i++) {
      if (taken.size && random(5) < 2) {
        const address = [...taken.keys()][random(taken.size)];
        engine.free(address);
        taken.delete(address);
      } else {
        const bytes = random(500);
        const address = engine.allot(bytes);
        for (const [other, size] of taken) assert(address + bytes <= other || other + size <= address);
        assert.equal(address % 64, 0);
        taken.set(address, bytes);
      }
      const starts = engine.holes.map(([start]) => start);
      assert.deepEqual(starts, [...starts].sort((x, y) => x - y));
    }
  });

  test("too little of it is said in words", () => {
    const engine = heap();
    engine.memory = new WebAssembly.Memory({ initial: 1, maximum: 2 });
    assert.throws(() => engine.allot(1 << 20), { code: "memory", message: /this tab has too little memory/ });
    assert.equal(engine.allot(64), 1024); // and nothing is lost
  });
});

describe("text", () => {
  const tokenizer = { decode: (ids) => new TextDecoder().decode(Uint8Array.from(ids)) };

  test("half a character waits for its end", () => {
    const stream = new TextStream(tokenizer);
    assert.deepEqual([..."é!"].flatMap((c) => [...new TextEncoder().encode(c)]).map((byte) => stream.push(byte)), ["", "é", "!"]);
    assert.equal(stream.end(), "");
  });

  test("after a prompt only what is new is told", () => {
    const stream = new TextStream(tokenizer, [72]);
    assert.equal(stream.push(105), "i");
  });
});

describe("drafts", () => {
  /** A pace with a step of 10 ms, and verifications of so many ms by their rows. */
  const paced = (sizes) => {
    const pace = new Pace();
    for (const [rows, ms] of [[1, 10], [1, 10], ...sizes]) pace.note(rows, ms);
    return pace;
  };

  test("are the longest earlier match, the latest of equal ones, as a search finds it", () => {
    let state = 7;
    const random = (n) => (state = (state * 48271) % 2147483647) % n;
    const text = [], index = new Index();
    for (let i = 0; i < 400; i++) {
      text.push(random(i < 200 ? 3 : 40));
      index.append(text.slice(-1));
      const ends = [...text.keys()].slice(2); // places that follow something
      const agreeing = (place) => {
        let n = 0;
        while (n < 8 && n < place && text[place - 1 - n] === text[text.length - 1 - n]) n++;
        return n;
      };
      const near = ends.filter((place) => agreeing(place) >= 2).slice(-16);
      const most = Math.max(0, ...near.map(agreeing));
      const expected = most ? { agreeing: most, place: near.findLast((place) => agreeing(place) === most) } : { agreeing: 0, place: 0 };
      assert.deepEqual(index.longest(), expected, String(i));
    }
    assert.deepEqual([0, 1, 2, 3].map((offset) => index.at(398, offset)), [text[398], text[399], text[398], text[399]]);
  });

  test("are as long as promises most tokens a second", () => {
    assert.equal(paced([[2, 20], [3, 30]]).choose([0.9, 0.8, 0.7]), 0);
    assert.equal(paced([[2, 10], [4, 10]]).choose([0.9, 0.8, 0.7, 0.6]), 4);
    assert.equal(paced([[2, 12], [4, 40]]).choose([0.9, 0.8, 0.7]), 1);
    assert.equal(paced([]).choose(Array(15).fill(0.9)), 3); // unknown sizes are tried with few rows
    assert.equal(new Pace().mayDraft(), false); // nothing was measured
  });

  test("sleep where they cost more than they gain, and wake with time", () => {
    const pace = paced([]);
    assert(pace.mayDraft());
    pace.settle(35, 0); // 25 ms lost, of which two steps are allowed
    assert(!pace.mayDraft());
    pace.wait(2000);
    assert(pace.mayDraft());
    const drafts = new Drafts({ drafting: { pace: paced([[2, 10]]), acceptance: { chance: () => 0.9 } } }, [5, 6, 7, 5, 6], [7]);
    assert.deepEqual(drafts.draft(4), []); // an end needs no row
  });

  test("do not change texts", { skip: bundle ? false : "COMPRESSOR_BUNDLE is not set" }, async (t) => {
    const model = await load(bundle, { device: "wasm", threads: 1 });
    assert(model.verifies);
    const code = (await model.tokenizer()).encode("def add(a, b):\n    return a + b\n\ndef add(a, b):\n").ids;
    const run = async (options, position) => {
      const ids = [], session = await model.session(200);
      let counts;
      const given = { maxTokens: 60, session, onSpeculation: (now) => { counts = now; }, ...options };
      for await (const id of model.generateIds(code, given)) {
        ids.push(id);
        if (ids.length === position) break;
      }
      const end = session.position;
      const logits = await session.logits([5]); // keys and values are those of plain steps
      session.destroy();
      return [{ ids, end, logits }, counts];
    };
    // Once there is a step to compare with, every draft is verified, whether it pays or not.
    t.mock.method(Pace.prototype, "mayDraft", function () { return this.sizes.has(1); });
    t.mock.method(Pace.prototype, "choose", (chances) => chances.length);
    t.mock.method(Pace.prototype, "leastChance", () => 0.02);
    const eos = model.info.eos_ids, all = [];
    for (const options of [{}, { temperature: 0.6, topK: 20, topP: 0.9, seed: 4 }]) {
      const [plain] = await run({ ...options, speculate: "off" });
      const [drafted, counts] = await run(options);
      assert.deepEqual(drafted, plain);
      all.push(counts);
      assert.equal(counts.tokens, counts.steps + counts.verifications + counts.accepted);
      assert.equal(counts.tokens, 59);
      for (let length = 1; length < 40; length += 5) { // also inside accepted runs
        const some = { ...options, maxTokens: length };
        assert.deepEqual((await run(some))[0], (await run({ ...some, speculate: "off" }))[0]);
        assert.deepEqual((await run(options, length))[0], (await run({ ...options, speculate: "off" }, length))[0]);
        const stop = new AbortController(), ids = [];
        for await (const id of model.generateIds(code, { ...options, maxTokens: 60, signal: stop.signal })) {
          if (ids.push(id) === length) stop.abort();
        }
        assert.deepEqual(ids, plain.ids.slice(0, length));
        model.info.eos_ids = [plain.ids[length]];
        assert.deepEqual((await run(options))[0], (await run({ ...options, speculate: "off" }))[0]);
        model.info.eos_ids = eos;
      }
    }
    const sum = (what) => all.reduce((total, counts) => total + counts[what], 0);
    assert(sum("accepted") > 10 && sum("accepted") < sum("drafted") && sum("verifications") > 3, JSON.stringify(all));
    t.mock.restoreAll();
    assert.deepEqual((await run({}))[0], (await run({ speculate: "off" }))[0]);
    await assert.rejects(model.generateIds([1], { speculate: "recycle" }).next(), { code: "request", message: /give "lookup" or "off"/ });
    model.verifies = false;
    await assert.rejects(model.generateIds([1], { speculate: "lookup" }).next(), { code: "request", message: /in its recipe/ });
    model.destroy();
  });

  test("have the bits of single steps", { skip: bundle ? false : "COMPRESSOR_BUNDLE is not set" }, async () => {
    for (const threads of [1, 3]) {
      const model = await load(bundle, { device: "wasm", threads });
      const session = await model.session(40);
      await session.logits([1, 403, 263, 77, 5]);
      const ids = Array.from({ length: 32 }, (_, i) => 3 + (i * 37) % 2000);
      const bits = (logits) => Buffer.from(logits.buffer);
      const alone = [];
      for (const id of ids) alone.push(bits(await session.logits([id])));
      for (const count of [1, 2, 3, 5, 8, 16, 17, 31, 32]) {
        session.position = 5;
        const found = await session.verify(ids.slice(0, count));
        assert(bits(found).equals(Buffer.concat(alone.slice(0, count))), `${count} rows`);
        assert.equal(session.position, 5);
      }
      session.accept(3);
      session.accept(2);
      assert(bits(await session.logits(ids.slice(5, 6))).equals(alone[5]));
      assert.throws(() => session.accept(1), { code: "request", message: /tokens to accept 1/ });
      assert.throws(() => session.verify(Array(33).fill(5)), { code: "request", message: /from 1 to 32/ });
      await assert.rejects(session.verify(Array(32).fill(5)), { code: "request", message: /has room for 40/ });
      model.destroy();
    }
  });
});

describe("bundles", () => {
  test("that are none are refused in words", async () => {
    const folder = await mkdtemp(join(tmpdir(), "bundle-"));
    await assert.rejects(load(folder), (e) => e instanceof BundleError && e.code === "missing");
    await writeFile(join(folder, "manifest.json"), "{");
    await assert.rejects(load(folder), { code: "damaged", message: /not readable as JSON/ });
    await writeFile(join(folder, "manifest.json"), "{}");
    await assert.rejects(load(folder), { code: "damaged", message: /holds no bundle for browsers/ });
    const later = { format: "compressor web bundle", schema_version: 99 };
    await writeFile(join(folder, "manifest.json"), JSON.stringify(later));
    await assert.rejects(load(folder), { code: "damaged", message: /has schema 99/ });
    const bare = { format: "compressor web bundle", schema_version: 1, weights: { shards: [], tensors: {} }, files: {} };
    await writeFile(join(folder, "manifest.json"), JSON.stringify(bare));
    await assert.rejects(load(folder), { code: "no-webgpu", message: /no WebGPU here/ });
    await assert.rejects(load(folder, { device: "wasm" }), { code: "no-wasm", message: /has no WebAssembly in it/ });
    await rm(folder, { recursive: true });
  });

  test("are not read unchecked where a page came over http", async (t) => {
    t.mock.getter(globalThis, "crypto", () => ({}));
    await assert.rejects(sha256(new Uint8Array(3)), { code: "insecure", message: /serve the bundle over https/ });
  });

  test("continue prompts", { skip: bundle ? false : "COMPRESSOR_BUNDLE is not set" }, async () => {
    const seen = [];
    const model = await load(bundle, { onProgress: (progress) => seen.push(progress) });
    assert.equal(model.device, "wasm");
    assert.match(model.fallback, /no WebGPU here/);
    assert.equal(seen.at(-1).loaded, seen.at(-1).total);
    const texts = async (options) => {
      const pieces = [];
      for await (const piece of model.generate("Return the", { maxTokens: 12, ...options })) pieces.push(piece);
      return pieces.join("");
    };
    const text = await texts({});
    assert(text.length > 12);
    assert.deepEqual(await Promise.all([texts({}), texts({})]), [text, text]);
    const sampled = await Promise.all([1, 1, 2].map((seed) => texts({ temperature: 1, topK: 50, topP: 0.9, seed })));
    assert.equal(sampled[0], sampled[1]);
    assert.notEqual(sampled[1], sampled[2]);
    const session = await model.session(64);
    const logits = await session.logits([1, 403, 263]);
    session.position = 0;
    assert.deepEqual(await session.logits([1, 403, 263]), logits);
    await session.logits([5]);
    assert.equal(session.position, 4);
    await assert.rejects(session.logits(Array(61).fill(5)), { code: "request", message: /has room for 64/ });
    for (const position of [-1, 5, 0.5, NaN, "1"]) {
      assert.throws(() => { session.position = position; }, { code: "request", message: /whole number from 0 to 4/ });
    }
    for (const ids of [[], [-1], [1e9], [0.5]]) assert.throws(() => session.logits(ids), { code: "request" });
    for (const capacity of [0, NaN, 1e9]) await assert.rejects(model.session(capacity), { code: "request" });
    const wrong = [{ maxTokens: -1 }, { temperature: NaN }, { topK: 0.5 }, { topP: 0 }, { topP: 2 }, { seed: -1 }];
    for (const options of wrong) await assert.rejects(model.generateIds([1], options).next(), { code: "request" });
    session.destroy();
    const stop = new AbortController();
    let count = 0;
    for await (const _ of model.generateIds([1], { maxTokens: 50, signal: stop.signal })) if (++count === 3) stop.abort();
    assert.equal(count, 3);
    assert.deepEqual((await model.tune()).kernels, []);
    model.destroy();
  });

  test("give the same bits on any number of threads", { skip: bundle ? false : "COMPRESSOR_BUNDLE is not set" }, async () => {
    const long = Array.from({ length: 150 }, (_, i) => 3 + (i * 37) % 2000);
    const found = [];
    for (const threads of [1, 2, 5]) {
      const model = await load(bundle, { device: "wasm", threads });
      assert.equal(model.adapter, threads > 1 ? `${threads} processor cores` : "one processor core");
      const { engine } = model;
      const { launch } = engine;
      let launches = 0;
      engine.launch = (...about) => { launches++; return launch(...about); };
      const session = await model.session(256);
      const all = [];
      for (let turn = 0; turn < 4; turn++) {
        session.position = 0;
        for (const ids of [long, ...long.slice(0, 30).map((id) => [id])]) all.push(...await session.logits(ids));
        await new Promise((resolve) => { setTimeout(resolve, 20); }); // workers fall asleep
      }
      assert.deepEqual(all.slice(0, all.length / 4), all.slice(-all.length / 4));
      assert(launches > 100);
      found.push(all);
      model.destroy();
    }
    assert.deepEqual(found[1], found[0]);
    assert.deepEqual(found[2], found[0]);
    for (const threads of [0, 1.5, 33, "2"]) {
      await assert.rejects(load(bundle, { device: "wasm", threads }), { code: "request", message: /it takes between 1 and 32/ });
    }
  });

  test("do not keep a process that has nothing else to do", { skip: bundle ? false : "COMPRESSOR_BUNDLE is not set" }, () => {
    const script = `const { load } = await import("compressor-web");
      const model = await load(${JSON.stringify(bundle)}, { device: "wasm", threads: 2 });
      for await (const id of model.generateIds([1], { maxTokens: 2 })) console.log(id);`;
    const options = { cwd: new URL("..", import.meta.url), timeout: 60_000 };
    const { status, stderr } = spawnSync(process.execPath, ["--input-type=module", "-e", script], options);
    assert.equal(status, 0, stderr);
  });

  test("whose workers find no memory say so", { skip: bundle ? false : "COMPRESSOR_BUNDLE is not set" }, async () => {
    const model = await load(bundle, { device: "wasm", threads: 2 });
    const { engine } = model;
    const session = await model.session(256);
    const ids = Array.from({ length: 100 }, (_, i) => 3 + i);
    const answer = engine.team.answer;
    const allot = engine.allot;
    engine.team.answer = () => { // of its own requests the engine's thread hears by itself
      engine.allot = () => { throw new BundleError("memory", "none"); };
      answer.call(engine.team);
      engine.allot = allot;
    };
    await assert.rejects(async () => {
      for (let turn = 0; turn < 50; turn++) { // until a worker takes a task that asks
        session.position = 0;
        await session.logits(ids);
      }
    }, { code: "memory", message: /found no memory/ });
    engine.team.answer = answer;
    session.position = 0;
    const logits = await session.logits(ids);
    const alone = await load(bundle, { device: "wasm", threads: 1 });
    assert.deepEqual(await (await alone.session(256)).logits(ids), logits); // it goes on
    model.destroy();
  });

  test("that are damaged are refused", { skip: bundle ? false : "COMPRESSOR_BUNDLE is not set" }, async () => {
    const folder = await mkdtemp(join(tmpdir(), "bundle-"));
    await cp(bundle, folder, { recursive: true });
    for (const name of ["wasm/kernels.wasm", "wasm/program.json", "weights/0000.bin"]) {
      const path = join(folder, name);
      const content = await readFile(path);
      await writeFile(path, content.map((byte, i) => i === 100 ? byte ^ 1 : byte));
      await assert.rejects(load(folder, { threads: 2 }), { code: "damaged", message: new RegExp(`${name} is not what the manifest says`) });
      await writeFile(path, content);
    }
    await rm(folder, { recursive: true });
  });
});
