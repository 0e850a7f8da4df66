// Runs a program's kernels in WGSL on the browser's graphics processor.

import { BundleError, bytesOf, evaluate, keep, typed } from "./program.js";

const UNIFORM_BYTES = 256; // a step's numbers begin at a multiple of this in the uniform buffer
const padded = (bytes) => Math.max(4, Math.ceil(bytes / 4) * 4);

/** The source that a device compiles: constants, and the kernel's text with its repetitions written out (docs/web.md). */
export function specialised(record, constants = record.constants, precision = "f32") {
  const lines = record.source.split("\n");
  const written = [];
  let i = 0;
  const block = (numbers) => {
    for (; i < lines.length && lines[i].trim() !== "//# end"; i++) {
      const [, name, count] = /^\s*\/\/# for (\w+) (\w+)$/.exec(lines[i]) ?? [];
      if (!name) {
        written.push(lines[i].replace(/\$(\w+)\$/g, (_, number) => numbers[number]));
        continue;
      }
      const start = i + 1;
      for (let n = 0; n < constants[count]; n++) {
        i = start;
        block({ ...numbers, [name]: n });
      }
    }
  };
  block({});
  const declared = Object.entries(constants).map(([name, value]) => `const ${name}: u32 = ${value}u;\n`);
  const text = declared.join("") + written.join("\n");
  return precision === "f16" ? `enable f16;\n${text.replace("alias Real = f32;", "alias Real = f16;")}` : text;
}

/** A device with a program and its tensors; what a session has on it is a state: caches, inputs, bind groups. */
export class Engine {
  kind = "webgpu";

  static async open(manifest, readFile, { precision, isAuto, gpu = globalThis.navigator?.gpu } = {}) {
    const advice = "use a current Chrome, Edge, Firefox or Safari on a machine with a graphics processor";
    if (!gpu) throw new BundleError("no-webgpu", `this browser has no WebGPU here (it needs https or localhost); ${advice}`);
    const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
    if (!adapter) throw new BundleError("no-webgpu", `WebGPU finds no adapter on this device; ${advice}`);
    if (isAuto && adapter.info?.isFallbackAdapter && manifest.engines?.includes("wasm")) {
      throw new BundleError("no-webgpu", "all that WebGPU finds here is software on the processor");
    }
    const largest = Math.max(0, ...Object.values(manifest.weights.tensors).map((tensor) => padded(tensor.bytes)));
    const requiredLimits = {};
    for (const name of ["maxStorageBufferBindingSize", "maxBufferSize"]) {
      const most = requiredLimits[name] = adapter.limits[name];
      if (largest > most) {
        throw new BundleError("memory", `this device takes buffers of ${most} bytes, the model needs one of ${largest}`);
      }
    }
    const program = JSON.parse(new TextDecoder().decode(await readFile("webgpu.json")));
    const wanted = ["timestamp-query", ...precision === "f16" ? ["shader-f16"] : []];
    const requiredFeatures = wanted.filter((name) => adapter.features.has(name));
    const device = await adapter.requestDevice({ requiredLimits, requiredFeatures });
    const engine = new Engine(program, device);
    engine.precision = requiredFeatures.includes("shader-f16") ? "f16" : "f32";
    engine.polyfills = Object.entries(program.polyfills ?? {})
      .filter(([feature]) => !gpu.wgslLanguageFeatures?.has(feature)).map(([, text]) => text).join("");
    const info = adapter.info ?? {};
    engine.adapter = [info.vendor, info.architecture, info.description].filter(Boolean).join(" ") || "unknown adapter";
    const allocate = () => Object.fromEntries(
      Object.entries(manifest.weights.tensors).map(([name, { bytes }]) => [name, engine.storage(bytes)]));
    engine.tensors = await engine.guarded(allocate).catch((error) => { device.destroy(); throw error; });
    return engine;
  }

  constructor(program, device) {
    Object.assign(this, { program, device });
    this.kernels = {};
    this.scratch = program.scratch.map(() => undefined);
    this.generation = 0; // counts reallocations: bind groups of an older one are void
    this.uniforms = device.createBuffer({
      size: UNIFORM_BYTES * (Math.max(...[program, program.encode, program.verify].map((entry) => entry?.steps.length ?? 0)) + 1),
      usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST,
    });
    device.lost.then((info) => { this.lost = info; });
  }

  storage(bytes) {
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC;
    return this.device.createBuffer({ size: padded(bytes), usage });
  }

  /** Part of a tensor's bytes. */
  write(name, offset, content) {
    this.device.queue.writeBuffer(this.tensors[name], offset, content);
  }

  /** Run `work`; a device without room for what it allocates becomes an error in words. */
  async guarded(work) {
    this.device.pushErrorScope("out-of-memory");
    const result = work();
    const error = await this.device.popErrorScope();
    if (error) throw new BundleError("memory", `this device has too little memory for the model: ${error.message}`);
    return result;
  }

  /** Begin to compile, first what prompts take: runs wait for what they need. */
  compile() {
    const { steps, argmax, kernels, encode } = this.program;
    const hasStorage = (() => { try { return globalThis.localStorage?.length > 0; } catch { return false; } })();
    this.tuned = hasStorage ? import("./tune.js") : {};
    const first = [...[...encode?.steps ?? [], ...steps].map((step) => step.kernels.at(-1)), ...argmax ? [argmax.kernel] : []];
    for (const name of [...first, ...Object.keys(kernels)]) this.compiled(name).catch(() => {});
  }

  /** A kernel, with the constants of an earlier tuning where there was one, or the lanes of the kernel whose order it keeps. */
  compiled(name) {
    this.kernels[name] ??= (async () => {
      const record = this.program.kernels[name];
      if (record.order_of) {
        const { constants: { LANES } } = await this.compiled(record.order_of);
        return this.pipeline(name, record, { ...record.constants, LANES });
      }
      const { kept } = await this.tuned;
      return this.pipeline(name, record, record.space && await kept?.(this, name));
    })();
    return this.kernels[name];
  }

  /** One kernel, with its constants or others. */
  async pipeline(name, record, constants = record.constants) {
    const types = [...record.buffers.map((access) => access === "write" ? "storage" : "read-only-storage"), "uniform"];
    const layout = this.device.createBindGroupLayout({
      entries: types.map((type, binding) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } })),
    });
    const code = specialised(record, constants, this.precision) + this.polyfills;
    const module = this.device.createShaderModule({ code, label: name });
    try {
      const pipeline = await this.device.createComputePipelineAsync({
        label: name,
        layout: this.device.createPipelineLayout({ bindGroupLayouts: [layout] }),
        compute: { module, entryPoint: record.entry ?? "main" },
      });
      return { ...record, name, constants, layout, pipeline };
    } catch (error) {
      this.refuseLost();
      const { messages } = await module.getCompilationInfo();
      throw new BundleError("damaged", `this browser does not compile the kernel ${name}: ` +
        `${messages[0]?.message ?? error.message}; WebAssembly may serve: device: "wasm"`);
    }
  }

  refuseLost() {
    if (this.lost) {
      throw new BundleError("lost", `the graphics device is gone (${this.lost.message || this.lost.reason}); load the ` +
        "model again");
    }
  }

  /** Room for what a session keeps, by the names of inputs. */
  async state(inputs, sizes) {
    this.refuseLost();
    const buffers = await this.guarded(() =>
      Object.fromEntries(inputs.map((input) => [input.name, this.storage(bytesOf(input, sizes))])));
    return { buffers, plans: new Map(), generation: -1 };
  }

  release(state) {
    Object.values(state.buffers).forEach((buffer) => buffer.destroy());
  }

  /** Run all steps; `pick`: and `argmax`, the likeliest token, or `top_k`, the `sizes.K` likeliest. */
  async run(state, inputs, sizes, pick = "") {
    this.refuseLost();
    const { device } = this;
    await this.grow(state, inputs, sizes);
    for (const [name, values] of Object.entries(inputs)) {
      device.queue.writeBuffer(state.buffers[name], 0, typed(this.program, name, values));
    }
    const { words, steps } = await this.plan(state, sizes, pick);
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    for (const { kernel, group, groups } of steps) {
      pass.setPipeline(kernel.pipeline);
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(...groups);
    }
    pass.end();
    device.queue.writeBuffer(this.uniforms, 0, words);
    device.queue.submit([encoder.finish()]);
  }

  /** What to dispatch for these sizes, which are the same for every token of a text but the first ones. */
  async plan(state, sizes, pick) {
    const key = `${Object.values(sizes)} ${pick}`;
    if (!state.plans.has(key)) {
      const { program } = this;
      const size = pick === "top_k" ? "K" : "R";
      const steps = pick
        ? [...program.steps, { kernels: [program[pick].kernel], buffers: [program.output, pick], sizes: [size] }]
        : program.steps;
      const words = new Uint32Array(steps.length * UNIFORM_BYTES / 4);
      const planned = await Promise.all(steps.map(async (step, i) => {
        const numbers = step.sizes.map((size) => evaluate(size, sizes));
        words.set(numbers, i * UNIFORM_BYTES / 4);
        const kernel = await this.compiled(this.choose(step, numbers));
        const buffers = step.buffers.map((name) => this.buffer(state, name));
        return { kernel, numbers, group: this.bind(kernel, buffers, i), groups: this.groupsOf(kernel, numbers) };
      }));
      keep(state.plans, key, { words, steps: planned });
    }
    return state.plans.get(key);
  }

  /** Of the kernels that compute a step the first whose limits the numbers keep. */
  choose(step, numbers) {
    const serves = ({ sizes, limits = {} }) => sizes.every((size, i) => !(numbers[i] > limits[size]));
    const found = step.kernels.find((name) => serves(this.program.kernels[name]));
    if (!found) throw new BundleError("damaged", `no kernel of ${step.kernels} serves; use the bundle's own runner.js`);
    return found;
  }

  /** Workgroups along x, y and z. */
  groupsOf(kernel, numbers) {
    const values = { ...kernel.constants, ...Object.fromEntries(kernel.sizes.map((size, i) => [size, numbers[i]])) };
    return kernel.groups.map((n) => evaluate(n, values));
  }

  /** Buffers for a kernel, and the numbers that stand at a step's place. */
  bind(kernel, buffers, step) {
    const size = Math.ceil(kernel.sizes.length / 4) * 16;
    const resources = [...buffers.map((buffer) => ({ buffer })), { buffer: this.uniforms, offset: step * UNIFORM_BYTES, size }];
    const entries = resources.map((resource, binding) => ({ binding, resource }));
    return this.device.createBindGroup({ layout: kernel.layout, entries });
  }

  buffer(state, reference) {
    const at = reference.indexOf(":");
    const [kind, name] = [reference.slice(0, at), reference.slice(at + 1)];
    if (at < 0) return state.buffers[reference];
    if (kind === "scratch") return this.scratch[Number(name)];
    return kind === "input" ? state.buffers[name] : this.tensors[name];
  }

  /** See to it that all buffers are as large as these sizes need. */
  async grow(state, inputs, sizes) {
    const wanted = this.program.scratch.map((size) => evaluate(size, sizes));
    const short = (buffer, bytes) => !(buffer?.size >= bytes);
    const given = [...Object.entries(inputs).map(([name, values]) => [name, 4 * values.length]), ["argmax", 4 * (sizes.R ?? 1)],
      ["top_k", 4 + 16 * (this.program.top_k?.most ?? 0)]];
    const isShort = wanted.some((bytes, i) => short(this.scratch[i], bytes));
    const isNarrow = given.some(([name, bytes]) => short(state.buffers[name], bytes));
    if (isShort || isNarrow) {
      await this.guarded(() => {
        wanted.forEach((bytes, i) => {
          if (!short(this.scratch[i], bytes)) return;
          this.scratch[i]?.destroy();
          this.scratch[i] = this.storage(bytes);
        });
        this.generation += isShort ? 1 : 0;
        for (const [name, bytes] of given) {
          if (!short(state.buffers[name], bytes)) continue;
          state.buffers[name]?.destroy();
          state.buffers[name] = this.storage(bytes);
        }
      });
    }
    if (isNarrow || state.generation !== this.generation) {
      state.plans.clear();
      state.generation = this.generation;
    }
  }

  /** Copy what a reference stands for to another buffer. */
  copy(state, reference, target, bytes) {
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(this.buffer(state, reference), 0, target, 0, bytes);
    this.device.queue.submit([encoder.finish()]);
  }

  /** The output, as float32. */
  async output(state, count) {
    return new Float32Array(await this.read(this.buffer(state, this.program.output), 4 * count));
  }

  /** The token that `run` picked. */
  async picked(state) {
    return (await this.pickedOf(state, 1))[0];
  }

  /** The tokens that `run` picked, one of each row. */
  async pickedOf(state, rows) {
    return new Uint32Array(await this.read(state.buffers.argmax, 4 * rows));
  }

  /** What `run` found likeliest, in no order: [token, logit] each; all logits where too many were equal to store. */
  async likeliest(state, count) {
    const words = new Uint32Array(await this.read(state.buffers.top_k, state.buffers.top_k.size));
    const logits = new Float32Array(words.buffer);
    if (words[0] > 2 * this.program.top_k.most) return this.output(state, count);
    return Array.from({ length: words[0] }, (_, i) => [words[1 + 2 * i], logits[2 + 2 * i]]);
  }

  async read(buffer, bytes) {
    const { device } = this;
    const copy = device.createBuffer({ size: bytes, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, copy, 0, bytes);
    device.queue.submit([encoder.finish()]);
    try {
      await copy.mapAsync(GPUMapMode.READ);
    } catch (error) {
      await Promise.race([device.lost, new Promise((resolve) => setTimeout(resolve, 1000))]);
      this.refuseLost();
      throw error;
    }
    const content = copy.getMappedRange().slice(0);
    copy.destroy();
    return content;
  }

  destroy() {
    this.device.destroy();
  }
}
