// Runs a program's kernels in WebAssembly, where there is no WebGPU: one memory, in which buffers are addresses.

import { BundleError, bytesOf, evaluate, keep, typed } from "./program.js";
import { BROKEN, Team, caller, imports } from "./threads.js";

const PAGE_BYTES = 65536;
const ALIGNMENT_BYTES = 64;
const MOST_THREADS = 32;
const MOST_UNASKED = 8;
const SHARED = 3; // in place of 1, where the module says what its memory is

/** A module with a program and its tensors; a state is where a session's caches and inputs lie. */
export class Engine {
  kind = "wasm";
  adapter = "one processor core";
  precision = "f32";

  static async open(manifest, readFile, { threads } = {}) {
    if (!manifest.engines?.includes("wasm")) throw new BundleError("no-wasm", "the bundle has no WebAssembly in it");
    if (!globalThis.WebAssembly) throw new BundleError("no-wasm", "there is no WebAssembly here");
    const count = threads ?? await cores();
    if (!(Number.isInteger(count) && count >= 1 && count <= MOST_THREADS)) {
      throw new BundleError("request", `${count} threads; it takes between 1 and ${MOST_THREADS}`);
    }
    if (count > 1 && !globalThis.SharedArrayBuffer) {
      throw new BundleError("request", `${count} threads: this page is not isolated, so workers cannot share its memory; ` +
        "serve it with the headers Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp");
    }
    const program = JSON.parse(new TextDecoder().decode(await readFile("wasm/program.json")));
    const engine = Engine.made(program, count, threads === undefined);
    const module = await engine.link(await readFile("wasm/kernels.wasm"));
    engine.tensors = Object.fromEntries(Object.entries(manifest.weights.tensors).map(([name, { bytes }]) =>
      [name, engine.allot(bytes)]));
    if (engine.isShared) engine.hired = engine.hire(module, count, threads === undefined);
    engine.hired?.catch(() => {}); // the loading, which goes on meanwhile, may fail first
    return engine;
  }

  /** With a memory that threads share, which takes addresses for all that it may grow to: some phones have too few. */
  static made(program, threads, isOptional) {
    try {
      return new Engine(program, threads > 1);
    } catch (error) {
      if (!(error instanceof RangeError) || threads === 1) throw error;
      if (isOptional) return new Engine(program);
      throw new BundleError("memory", `this tab has no room for a memory of ${threads} threads: ${error.message}`, { cause: error });
    }
  }

  constructor(program, isShared = false) {
    this.program = program;
    this.isShared = isShared;
    this.memory = new WebAssembly.Memory({ initial: 64, maximum: PAGE_BYTES, shared: isShared });
    this.taken = new Map(); // address -> bytes
    this.scratch = [];
  }

  /** Link the kernels to the memory; returns the module. */
  async link(content) {
    if (this.isShared) content[this.program.memory_flag] = SHARED;
    const launch = (run, data) => this.launch(run, data);
    const asked = imports(this.memory, (bytes) => this.allot(bytes), (address) => this.free(address), launch);
    let linked;
    try {
      linked = await WebAssembly.instantiate(content, asked);
    } catch (error) {
      if (!(error instanceof WebAssembly.CompileError)) throw error;
      throw new BundleError("no-wasm", `WebAssembly with 128-bit vectors is not understood here: ${error.message}`);
    }
    this.functions = linked.instance.exports;
    this.holes = [[Number(this.functions.__heap_base.value), Infinity]];
    const call = caller(this.functions, this.group(1));
    this.launch = (run, data) => call(run, 0, data);
    return linked.module;
  }

  /** Compute with other threads from now on; those that nobody asked for may be kept from starting. */
  async hire(module, threads, isOptional) {
    try {
      this.team = await Team.start(this, module, threads);
    } catch (error) {
      if (isOptional) return;
      throw new BundleError("request", `${threads} threads: workers cannot be started: ${error.message}`, { cause: error });
    }
    this.launch = (run, data) => this.team.launch(run, data);
    this.adapter = `${threads} processor cores`;
  }

  /** The address of what kernels are told of a launch: how many tasks it has. */
  group(tasks) {
    const address = this.allot(8);
    new Int32Array(this.memory.buffer, address, 2).set([0, tasks]);
    return address;
  }

  /** The address of so many bytes, in the first hole that has room. */
  allot(bytes) {
    const size = Math.ceil(Math.max(bytes, 1) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES;
    const aligned = (address) => Math.ceil(address / ALIGNMENT_BYTES) * ALIGNMENT_BYTES;
    const i = this.holes.findIndex(([start, end]) => aligned(start) + size <= end);
    const address = aligned(this.holes[i][0]);
    this.holes[i][0] = address + size;
    if (this.holes[i][0] === this.holes[i][1]) this.holes.splice(i, 1);
    this.taken.set(address, size);
    const missing = address + size - this.memory.buffer.byteLength;
    try {
      if (missing > 0) this.memory.grow(Math.ceil(missing / PAGE_BYTES));
    } catch (error) {
      this.free(address);
      throw new BundleError("memory", `this tab has too little memory for the model: ${size} bytes more than ` +
        `${this.memory.buffer.byteLength}`, { cause: error });
    }
    return address;
  }

  free(address) {
    const end = address + this.taken.get(address);
    this.taken.delete(address);
    const i = this.holes.findIndex(([start]) => start >= end);
    const before = this.holes[i - 1]?.[1] === address;
    if (this.holes[i][0] === end) {
      this.holes[i][0] = before ? this.holes[i - 1][0] : address;
      if (before) this.holes.splice(i - 1, 1);
    } else if (before) {
      this.holes[i - 1][1] = end;
    } else {
      this.holes.splice(i, 0, [address, end]);
    }
    return 0;
  }

  /** Part of a tensor's bytes. */
  write(name, offset, content) {
    new Uint8Array(this.memory.buffer).set(content, this.tensors[name] + offset);
  }

  /** Room for what a session keeps, by the names of inputs. */
  async state(inputs, sizes) {
    const buffers = {};
    for (const input of inputs) {
      const bytes = bytesOf(input, sizes);
      buffers[input.name] = this.allot(bytes);
      new Uint8Array(this.memory.buffer).fill(0, buffers[input.name], buffers[input.name] + bytes);
    }
    return { buffers, plans: new Map() };
  }

  release(state) {
    Object.values(state.buffers).forEach((address) => this.free(address));
  }

  /** Run all steps. */
  async run(state, inputs, sizes) {
    await breathe();
    this.grow(sizes);
    const given = {};
    try {
      for (const [name, values] of Object.entries(inputs)) {
        const content = typed(this.program, name, values);
        given[name] = this.allot(content.byteLength);
        new Uint8Array(this.memory.buffer).set(new Uint8Array(content.buffer), given[name]);
      }
      for (const { name, numbers, buffers } of this.plan(state, sizes)) {
        const addresses = buffers.map((reference) => this.address(state, given, reference));
        const failed = this.functions[name](...addresses, ...numbers);
        if (failed === BROKEN) throw new Error(`${name} broke off in a worker; the console says why`);
        if (failed) throw new BundleError("memory", `${name} found no memory`);
      }
    } finally {
      Object.values(given).forEach((address) => this.free(address));
    }
  }

  plan(state, sizes) {
    const key = String(Object.values(sizes));
    if (!state.plans.has(key)) {
      keep(state.plans, key, this.program.steps.map((step) => ({
        name: step.kernels[0], buffers: step.buffers, numbers: step.sizes.map((size) => evaluate(size, sizes)),
      })));
    }
    return state.plans.get(key);
  }

  address(state, given, reference) {
    const at = reference.indexOf(":");
    const [kind, name] = [reference.slice(0, at), reference.slice(at + 1)];
    if (kind === "scratch") return this.scratch[Number(name)].address;
    return kind === "input" ? given[name] ?? state.buffers[name] : this.tensors[name];
  }

  grow(sizes) {
    this.program.scratch.forEach((size, i) => {
      const bytes = evaluate(size, sizes);
      if (this.scratch[i]?.bytes >= bytes) return;
      if (this.scratch[i]) this.free(this.scratch[i].address);
      this.scratch[i] = { address: this.allot(bytes), bytes };
    });
  }

  /** Copy what a reference stands for to another address. */
  copy(state, reference, target, bytes) {
    const address = this.address(state, {}, reference);
    new Uint8Array(this.memory.buffer).copyWithin(target, address, address + bytes);
  }

  /** The output, as float32. */
  async output(state, count) {
    const address = this.address(state, {}, this.program.output);
    return new Float32Array(this.memory.buffer, address, count).slice();
  }

  /** The likeliest token of the last run. */
  async picked(state, count) {
    return (await this.pickedOf(state, 1, count))[0];
  }

  /** The likeliest tokens of the last run, one of each row. */
  async pickedOf(state, rows, count) {
    const logits = new Float32Array(this.memory.buffer, this.address(state, {}, this.program.output), rows * count);
    return Uint32Array.from({ length: rows }, (_, row) => {
      let best = row * count;
      for (let i = best + 1; i < (row + 1) * count; i++) if (logits[i] > logits[best]) best = i;
      return best - row * count;
    });
  }

  destroy() {
    this.hired?.catch(() => {}).then(() => this.team?.destroy()); // they may still be starting
    this.functions = this.memory = undefined;
  }
}

/** Threads where nobody says how many: half of the logical processors, since two of them often share a core. */
async function cores() {
  if (!globalThis.SharedArrayBuffer) return 1;
  const all = globalThis.navigator?.hardwareConcurrency ?? (await import("node:os")).availableParallelism();
  return Math.min(Math.ceil(all / 2), MOST_UNASKED);
}

/** Lets the page draw and listen between two steps. */
function breathe() {
  if (globalThis.setImmediate) return new Promise((resolve) => { setImmediate(resolve); });
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => { port1.close(); resolve(); };
    port2.postMessage(0);
  });
}
