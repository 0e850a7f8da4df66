// Runs a bundle that `compress run` made for the target webgpu: loads it, checks it, continues prompts.
//
//   import { load } from "./runner.js";
//   const model = await load(".", { onProgress: ({ loaded, total }) => {} });
//   for await (const piece of model.generate("Once upon a time", { maxTokens: 64 })) console.log(piece);
//
// A program is data: buffers, kernels in WGSL, and the steps that dispatch them (docs/web.md).  Sizes that change from
// call to call are expressions, evaluated here.

const SCHEMA_VERSION = 1;
const UNIFORM_BYTES = 256; // a step's numbers begin at a multiple of this in the uniform buffer
const PROMPT_PART = 128; // tokens of a prompt that are computed at once: scratch buffers are as large as that needs
const CACHE = "compressor-bundles";

/** What went wrong, in words; `code` is one of no-webgpu, missing, damaged, memory, lost, request. */
export class BundleError extends Error {
  constructor(code, message, options) {
    super(message, options);
    this.name = "BundleError";
    this.code = code;
  }
}

/** Load the bundle at `url`. See runner.d.ts for the options. */
export async function load(url = ".", { onProgress = () => {}, context = 2048, signal, gpu } = {}) {
  const base = new URL(String(url).replace(/\/?$/, "/"), globalThis.location?.href);
  const manifest = await readManifest(base, signal);
  const device = await requestDevice(manifest, gpu ?? globalThis.navigator?.gpu);
  const total = manifest.weights.shards.reduce((sum, shard) => sum + shard.bytes, 0);
  const program = JSON.parse(new TextDecoder().decode(await readFile(base, manifest, "webgpu.json", signal)));
  const tensors = await guarded(device, () => allocate(device, manifest.weights.tensors));
  let loaded = 0;
  let start = 0;
  for (const shard of manifest.weights.shards) {
    const seen = (bytes) => onProgress({ loaded: (loaded += bytes), total, file: shard.file });
    const content = await readShard(base, shard, seen, signal);
    upload(device, manifest.weights.tensors, tensors, content, start);
    start += shard.bytes;
  }
  const model = new Model(base, manifest, program, device, tensors, context);
  await model.compile();
  return model;
}

async function readManifest(base, signal) {
  const manifest = await fetchFile(base, "manifest.json", signal).then((response) => response.json()).catch((error) => {
    if (error instanceof BundleError || error.name === "AbortError") throw error;
    throw new BundleError("damaged", `${base}manifest.json is not readable as JSON; copy the bundle again`);
  });
  if (manifest.format !== "compressor web bundle") {
    throw new BundleError("damaged", `${base} holds no bundle for browsers; make one with \`target: webgpu\``);
  }
  if (manifest.schema_version > SCHEMA_VERSION) {
    throw new BundleError("damaged", `${base} has schema ${manifest.schema_version}, this runner reads up to ` +
      `${SCHEMA_VERSION}; use the runner.js inside the bundle`);
  }
  return manifest;
}

async function fetchFile(base, name, signal) {
  let response;
  try {
    response = await fetch(new URL(name, base), { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new BundleError("missing", `${name} cannot be fetched: no connection to ${base.host}`, { cause: error });
  }
  if (!response.ok) throw new BundleError("missing", `${name} cannot be fetched: the server says ${response.status}`);
  return response;
}

async function readFile(base, manifest, name, signal) {
  const content = new Uint8Array(await fetchFile(base, name, signal).then((response) => response.arrayBuffer()));
  await check(name, content, manifest.files[name]);
  return content;
}

/** A shard's bytes, from the browser's cache where it has them, with its SHA-256 compared either way. */
async function readShard(base, shard, seen, signal) {
  const store = await globalThis.caches?.open(CACHE).catch(() => undefined); // there is none in private windows
  const key = new URL(`${shard.file}?sha256=${shard.sha256}`, base).href;
  const kept = await store?.match(key);
  if (kept) {
    const content = new Uint8Array(await kept.arrayBuffer());
    if (await sha256(content) === shard.sha256) {
      seen(content.length);
      return content;
    }
    await store.delete(key);
  }
  const response = await fetchFile(base, shard.file, signal);
  const content = new Uint8Array(shard.bytes);
  let filled = 0;
  try {
    for (const reader = response.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      if (filled + value.length <= shard.bytes) content.set(value, filled);
      filled += value.length;
      seen(value.length);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new BundleError("missing", `${shard.file}: the connection broke after ${filled} bytes`, { cause: error });
  }
  if (filled !== shard.bytes) {
    throw new BundleError("damaged", `${shard.file} has ${filled} bytes, the manifest says ${shard.bytes}; copy it again`);
  }
  await check(shard.file, content, shard);
  await store?.put(key, new Response(content)).catch(() => {}); // no room: it is fetched again next time
  return content;
}

async function check(name, content, entry) {
  if (!entry || await sha256(content) !== entry.sha256) {
    throw new BundleError("damaged", `${name} is not what the manifest says (SHA-256 differs); copy it again`);
  }
}

async function sha256(content) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function requestDevice(manifest, gpu) {
  const advice = "use a current Chrome, Edge, Firefox or Safari on a machine with a graphics processor";
  if (!gpu) throw new BundleError("no-webgpu", `this browser has no WebGPU here (it needs https or localhost); ${advice}`);
  const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new BundleError("no-webgpu", `WebGPU finds no adapter on this device; ${advice}`);
  const largest = Math.max(0, ...Object.values(manifest.weights.tensors).map((tensor) => padded(tensor.bytes)));
  const limits = { maxStorageBufferBindingSize: largest, maxBufferSize: largest };
  const requiredLimits = {};
  for (const [name, needed] of Object.entries(limits)) {
    if (needed > adapter.limits[name]) {
      throw new BundleError("memory", `this device takes buffers of ${adapter.limits[name]} bytes, the model needs one ` +
        `of ${needed}`);
    }
    requiredLimits[name] = adapter.limits[name];
  }
  const device = await adapter.requestDevice({ requiredLimits });
  device.adapterDescription = [adapter.info?.vendor, adapter.info?.architecture, adapter.info?.description]
    .filter(Boolean).join(" ") || "unknown adapter";
  return device;
}

/** Run `work`; a device without room for what it allocates becomes an error in words. */
async function guarded(device, work) {
  device.pushErrorScope("out-of-memory");
  const result = work();
  const error = await device.popErrorScope();
  if (error) throw new BundleError("memory", `this device has too little memory for the model: ${error.message}`);
  return result;
}

const padded = (bytes) => Math.max(4, Math.ceil(bytes / 4) * 4);

function storage(device, bytes, extra = 0) {
  const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC | extra;
  return device.createBuffer({ size: padded(bytes), usage });
}

function allocate(device, tensors) {
  return Object.fromEntries(Object.entries(tensors).map(([name, { bytes }]) => [name, storage(device, bytes)]));
}

/** Copy what a shard, whose first byte is number `start` of all, holds of each tensor. */
function upload(device, places, tensors, content, start) {
  const end = start + content.length;
  for (const [name, { offset, bytes }] of Object.entries(places)) {
    const first = Math.max(offset, start);
    const last = Math.min(offset + padded(bytes), end);
    if (first < last) device.queue.writeBuffer(tensors[name], first - offset, content, first - start, last - first);
  }
}

/** The value of an expression: a number, a name, or [operator, left, right]. */
export function evaluate(expression, names) {
  if (typeof expression === "number") return expression;
  if (typeof expression === "string") return names[expression];
  const [operator, left, right] = expression;
  const a = evaluate(left, names);
  const b = evaluate(right, names);
  switch (operator) {
    case "+": return a + b;
    case "-": return a - b;
    case "*": return a * b;
    case "//": return Math.floor(a / b);
    case "%": return a - b * Math.floor(a / b);
    case "min": return Math.min(a, b);
    case "max": return Math.max(a, b);
    case "ceil": return Math.ceil(a / b);
    default: throw new BundleError("damaged", `the program has an operator ${operator}; use the bundle's own runner.js`);
  }
}

/** The source that a device compiles: constants in front of the kernel's text. */
export function specialised(record, constants = record.constants) {
  return Object.entries(constants).map(([name, value]) => `const ${name}: u32 = ${value}u;\n`).join("") + record.source;
}

/** A loaded bundle; made by `load`. */
export class Model {
  constructor(base, manifest, program, device, tensors, context) {
    Object.assign(this, { base, manifest, program, device, tensors });
    this.info = manifest.model;
    this.context = Math.min(context, this.info.max_positions || context);
    this.adapter = device.adapterDescription;
    this.kernels = {};
    this.scratch = program.scratch.map(() => undefined);
    this.generation = 0; // counts reallocations: bind groups of an older one are void
    this.turn = Promise.resolve();
    this.uniforms = device.createBuffer({
      size: UNIFORM_BYTES * (program.steps.length + 1),
      usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST,
    });
    device.lost.then((info) => { this.lost = info; });
  }

  /** Compile all kernels. */
  async compile() {
    await Promise.all(Object.entries(this.program.kernels).map(async ([name, record]) => {
      const types = [...record.buffers.map((access) => access === "write" ? "storage" : "read-only-storage"), "uniform"];
      const layout = this.device.createBindGroupLayout({
        entries: types.map((type, binding) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } })),
      });
      const module = this.device.createShaderModule({ code: specialised(record), label: name });
      try {
        const pipeline = await this.device.createComputePipelineAsync({
          label: name,
          layout: this.device.createPipelineLayout({ bindGroupLayouts: [layout] }),
          compute: { module, entryPoint: record.entry ?? "main" },
        });
        this.kernels[name] = { ...record, layout, pipeline };
      } catch (error) {
        this.refuseLost();
        const { messages } = await module.getCompilationInfo();
        throw new BundleError("damaged", `this browser does not compile the kernel ${name}: ` +
          `${messages[0]?.message ?? error.message}`);
      }
    }));
  }

  /** The tokenizer, loaded at the first call: `encode(text).ids`, `decode(ids)`. */
  async tokenizer() {
    this.loadedTokenizer ??= (async () => {
      const { Tokenizer } = await import(new URL("vendor/tokenizers.mjs", this.base).href);
      const text = new TextDecoder().decode(await readFile(this.base, this.manifest, "tokenizer.json"));
      return new Tokenizer(JSON.parse(text), {});
    })();
    return this.loadedTokenizer;
  }

  /** A new sequence of tokens, with room for `capacity` of them. */
  async session(capacity = this.context) {
    this.refuseLost();
    if (this.manifest.kind !== "decoder") throw new BundleError("request", "only a decoder generates");
    const names = { B: 1, T: capacity };
    const caches = this.program.inputs.filter(({ name }) => /_cache_\d+$/.test(name));
    const bytes = ({ shape }) => 4 * shape.reduce((product, n) => product * evaluate(n, names), 1);
    const buffers = await guarded(this.device, () =>
      Object.fromEntries(caches.map((input) => [input.name, storage(this.device, bytes(input))])));
    return new Session(this, capacity, buffers);
  }

  /** Continue a prompt, text or token ids; yields pieces of text. */
  async *generate(prompt, options = {}) {
    const tokenizer = await this.tokenizer();
    const ids = typeof prompt === "string" ? tokenizer.encode(prompt).ids : [...prompt];
    const text = new TextStream(tokenizer, ids);
    for await (const id of this.generateIds(ids, options)) {
      const piece = text.push(id);
      if (piece) yield piece;
    }
    const rest = text.end();
    if (rest) yield rest;
  }

  /** Continue token ids; yields token ids. */
  async *generateIds(prompt, { maxTokens = 64, temperature = 0, topK = 0, topP = 1, seed, signal, session } = {}) {
    const ids = prompt.length || this.info.bos_id == null ? [...prompt] : [this.info.bos_id];
    if (!ids.length) throw new BundleError("request", "the prompt is empty, and this model has no token to begin with");
    const wrong = ids.find((id) => !Number.isInteger(id) || id < 0 || id >= this.info.vocab_size);
    if (wrong !== undefined) throw new BundleError("request", `token ${wrong} is none of this model's`);
    const own = session ?? await this.session(Math.min(this.context, ids.length + maxTokens));
    try {
      const random = generator(seed);
      const room = own.capacity - own.position;
      if (ids.length > room) throw new BundleError("request", `a prompt of ${ids.length} tokens, there is room for ${room}`);
      const most = Math.min(maxTokens, room - ids.length + 1);
      let next = ids;
      for (let count = 0; count < most && !signal?.aborted; count++) {
        const id = temperature > 0
          ? sample(await own.logits(next), temperature, topK, topP, random)
          : await own.likeliest(next);
        if (this.info.eos_ids.includes(id)) return;
        yield id;
        next = [id];
      }
    } finally {
      if (!session) own.destroy();
    }
  }

  /** Calls take turns: scratch buffers are shared. */
  exclusively(work) {
    const result = this.turn.then(work);
    this.turn = result.catch(() => {});
    return result;
  }

  refuseLost() {
    if (this.lost) {
      throw new BundleError("lost", `the graphics device is gone (${this.lost.message || this.lost.reason}); load the ` +
        "model again");
    }
  }

  /** Give all memory back. */
  destroy() {
    this.device.destroy();
  }
}

/** Keys and values of one sequence; made by `Model.session`. */
export class Session {
  constructor(model, capacity, caches) {
    Object.assign(this, { model, capacity, caches });
    this.position = 0; // set it back to forget what came after
    this.groups = new Map();
    this.generation = -1;
  }

  /** Logits of the last of `ids`: Float32Array. */
  logits(ids) {
    return this.model.exclusively(async () => {
      await this.advance(ids);
      return new Float32Array(await this.read(this.model.program.output, 4 * this.model.info.vocab_size));
    });
  }

  /** The likeliest token after `ids`, picked on the device. */
  likeliest(ids) {
    return this.model.exclusively(async () => {
      await this.advance(ids, true);
      return new Uint32Array(await this.read("argmax", 4))[0];
    });
  }

  /** Compute tokens, in parts, and move on. */
  async advance(ids, pick = false) {
    if (this.position + ids.length > this.capacity) {
      throw new BundleError("request", `${this.position} + ${ids.length} tokens; the session has room for ${this.capacity}`);
    }
    for (let i = 0; i < ids.length; i += PROMPT_PART) {
      const part = ids.slice(i, i + PROMPT_PART);
      await this.step(part, pick && i + PROMPT_PART >= ids.length);
      this.position += part.length;
    }
  }

  async step(ids, pick) {
    const { model } = this;
    const { device, program } = model;
    model.refuseLost();
    const sizes = { B: 1, S: ids.length, R: 1, T: this.capacity };
    await this.grow(sizes);
    device.queue.writeBuffer(this.caches.ids, 0, Int32Array.from(ids));
    device.queue.writeBuffer(this.caches.position, 0, Int32Array.from(ids, (_, i) => this.position + i));
    device.queue.writeBuffer(this.caches.keep, 0, Int32Array.of(ids.length - 1));
    const steps = pick
      ? [...program.steps, { kernels: [program.argmax.kernel], buffers: [program.output, "argmax"], sizes: ["R"] }]
      : program.steps;
    const words = new Uint32Array(steps.length * UNIFORM_BYTES / 4);
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    steps.forEach((step, i) => {
      const numbers = step.sizes.map((size) => evaluate(size, sizes));
      words.set(numbers, i * UNIFORM_BYTES / 4);
      const [kernel, values] = this.choose(step, numbers);
      pass.setPipeline(kernel.pipeline);
      pass.setBindGroup(0, this.group(step, i, kernel));
      pass.dispatchWorkgroups(...kernel.groups.map((size) => evaluate(size, values)));
    });
    pass.end();
    device.queue.writeBuffer(model.uniforms, 0, words);
    device.queue.submit([encoder.finish()]);
  }

  /** Of the kernels that compute a step the first whose limits the numbers keep, and what its expressions know. */
  choose(step, numbers) {
    for (const name of step.kernels) {
      const kernel = this.model.kernels[name];
      const values = { ...kernel.constants };
      kernel.sizes.forEach((size, i) => { values[size] = numbers[i]; });
      if (Object.entries(kernel.limits ?? {}).every(([size, most]) => values[size] <= most)) return [kernel, values];
    }
    throw new BundleError("damaged", `no kernel of ${step.kernels} serves; use the bundle's own runner.js`);
  }

  group(step, index, kernel) {
    const key = `${index}:${kernel.pipeline.label}`;
    if (!this.groups.has(key)) {
      const entries = step.buffers.map((name, binding) => ({ binding, resource: { buffer: this.buffer(name) } }));
      const size = Math.ceil(kernel.sizes.length / 4) * 16;
      entries.push({
        binding: entries.length,
        resource: { buffer: this.model.uniforms, offset: index * UNIFORM_BYTES, size },
      });
      this.groups.set(key, this.model.device.createBindGroup({ layout: kernel.layout, entries }));
    }
    return this.groups.get(key);
  }

  buffer(reference) {
    const at = reference.indexOf(":");
    const [kind, name] = [reference.slice(0, at), reference.slice(at + 1)];
    if (at < 0) return this.caches[reference];
    if (kind === "scratch") return this.model.scratch[Number(name)];
    return kind === "input" ? this.caches[name] : this.model.tensors[name];
  }

  /** See to it that all buffers are as large as these sizes need. */
  async grow(sizes) {
    const { model, caches } = this;
    const wanted = model.program.scratch.map((size) => evaluate(size, sizes));
    const short = wanted.some((bytes, i) => !(model.scratch[i]?.size >= bytes));
    if (short || !caches.ids) {
      await guarded(model.device, () => {
        wanted.forEach((bytes, i) => {
          if (model.scratch[i]?.size >= bytes) return;
          model.scratch[i]?.destroy();
          model.scratch[i] = storage(model.device, bytes);
        });
        model.generation += short ? 1 : 0;
        for (const [name, bytes] of [["ids", 4 * PROMPT_PART], ["position", 4 * PROMPT_PART], ["keep", 4], ["argmax", 4]]) {
          caches[name] ??= storage(model.device, bytes);
        }
      });
    }
    if (this.generation !== model.generation) {
      this.groups.clear();
      this.generation = model.generation;
    }
  }

  async read(reference, bytes) {
    const { device } = this.model;
    const copy = device.createBuffer({ size: bytes, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(this.buffer(reference), 0, copy, 0, bytes);
    device.queue.submit([encoder.finish()]);
    try {
      await copy.mapAsync(GPUMapMode.READ);
    } catch (error) {
      await Promise.race([this.model.device.lost, new Promise((resolve) => setTimeout(resolve, 1000))]);
      this.model.refuseLost();
      throw error;
    }
    const content = copy.getMappedRange().slice(0);
    copy.destroy();
    return content;
  }

  /** Give its memory back. */
  destroy() {
    Object.values(this.caches).forEach((buffer) => buffer.destroy());
  }
}

/** Text of a growing sequence of tokens: what is certain, as soon as it is. */
export class TextStream {
  constructor(tokenizer, prompt = []) {
    this.tokenizer = tokenizer;
    this.ids = [...prompt];
    this.shown = prompt.length ? tokenizer.decode(this.ids) : "";
  }

  push(id) {
    this.ids.push(id);
    const text = this.tokenizer.decode(this.ids);
    if (text.endsWith("\ufffd")) return ""; // half a character
    const piece = text.slice(this.shown.length);
    this.shown = text;
    return piece;
  }

  end() {
    return this.ids.length ? this.tokenizer.decode(this.ids).slice(this.shown.length) : "";
  }
}

/** Random numbers in [0, 1): mulberry32; without a seed, another sequence each time. */
function generator(seed = Math.floor(Math.random() * 2 ** 32)) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** A token by its probability, among the `topK` likeliest (0: all) and the fewest that reach `topP` together. */
function sample(logits, temperature, topK, topP, random) {
  const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a]).slice(0, topK || logits.length);
  const weights = order.map((id) => Math.exp((logits[id] - logits[order[0]]) / temperature));
  let limit = topP * weights.reduce((sum, weight) => sum + weight, 0);
  let kept = 0;
  for (; kept < weights.length && limit > 0; kept++) limit -= weights[kept];
  let point = random() * weights.slice(0, Math.max(1, kept)).reduce((sum, weight) => sum + weight, 0);
  return order[weights.findIndex((weight) => (point -= weight) < 0)] ?? order[0];
}
