// Workers that share a WebAssembly engine's memory and take tasks of its parallel loops.
//
// All look at the same words.  A launch is a function, its data, and a ticket, which has the launch's number and its next
// task in one word: who comes late takes no task of another launch, and what sleeps is not waited for.

import { BundleError } from "./program.js";

const TICKET = 0;
const FUNCTION = 1;
const DATA = 2;
const ASLEEP = 16; // workers that are to be woken; words that others write have a cache line of their own
const DONE = 32; // tasks of the launch
const FAILED = 48; // what a task returned instead of 0
const MAIL = 64; // of each worker, in a line of its own: bytes that it asks for, and the address that it gets
const LINE = 16;
const TASK_BITS = 8;
const TASKS_A_THREAD = 4; // so that a thread that is held up leaves its share to others
const STACK_BYTES = 1 << 18; // as many as the linker gives the engine's thread
const LOOKS = 20_000; // at the ticket before a worker goes to sleep: some 0.1 ms
const NONE = -1; // in place of an address
export const BROKEN = 2; // a task did not return

/** Take tasks of the current launch while there are some; returns the ticket that has none. */
function work(control, tasks, perform) {
  for (;;) {
    const ticket = Atomics.load(control, TICKET);
    const task = ticket & (2 ** TASK_BITS - 1);
    if (task >= tasks) return ticket;
    const run = Atomics.load(control, FUNCTION);
    const data = Atomics.load(control, DATA); // both this launch's if the ticket is still the same
    if (Atomics.compareExchange(control, TICKET, ticket, ticket + 1) !== ticket) continue;
    const failed = perform(run, task, data);
    if (failed) Atomics.store(control, FAILED, failed);
    Atomics.add(control, DONE, 1);
  }
}

/** What calls a module's function by its number for a task. */
export function caller({ __indirect_function_table: table }, group) {
  const known = [];
  return (run, task, data) => (known[run] ??= table.get(run))(task, group, data);
}

/** What a module asks of its host. */
export function imports(memory, allot, free, launch) {
  return {
    env: {
      memory,
      TVMBackendAllocWorkspace: (_type, _device, bytes) => allot(Number(bytes)),
      TVMBackendFreeWorkspace: (_type, _device, address) => free(address >>> 0),
      TVMBackendParallelLaunch: launch,
      TVMFFIEnvModRegisterSystemLibSymbol: () => 0, // never called
    },
  };
}

/** The same call, which tells what is thrown: whoever waits for the task goes on. */
function guarded(call, tell) {
  return (run, task, data) => {
    try {
      return call(run, task, data);
    } catch (error) {
      tell(error);
      return BROKEN;
    }
  };
}

/** The engine's thread, and its workers. */
export class Team {
  /** Start workers; resolves when they all look for tasks. */
  static async start(engine, module, threads) {
    const team = new Team(engine, threads);
    try {
      await Promise.all(team.mail.map((_, i) => team.hire(module, i)));
    } catch (error) {
      team.destroy();
      throw error;
    }
    return team;
  }

  constructor(engine, threads) {
    this.engine = engine;
    this.tasks = Math.min(threads * TASKS_A_THREAD, 2 ** TASK_BITS - 1);
    this.mail = Array.from({ length: threads - 1 }, (_, i) => MAIL + i * LINE);
    this.control = new Int32Array(new SharedArrayBuffer(4 * (MAIL + threads * LINE)));
    this.control[TICKET] = this.tasks; // none
    this.group = engine.group(this.tasks);
    this.perform = guarded(caller(engine.functions, this.group), (error) => { this.thrown ??= error; });
    this.workers = [];
  }

  async hire(module, i) {
    const { engine: { memory }, control, tasks, group } = this;
    const stack = this.engine.allot(STACK_BYTES) + STACK_BYTES;
    const given = { module, memory, control, tasks, group, stack, mail: this.mail[i] };
    if (globalThis.Worker) {
      const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
      this.workers.push(worker);
      await new Promise((resolve, reject) => {
        worker.onmessage = resolve;
        worker.onerror = (event) => reject(new Error(event.message ?? "worker.js cannot be loaded"));
        worker.postMessage(given);
      });
    } else {
      const { Worker: Thread } = await import("node:worker_threads");
      const options = { workerData: given, execArgv: [] }; // not the process's own, of which -e keeps files from running
      const worker = new Thread(new URL("./worker.js", import.meta.url), options);
      this.workers.push(worker);
      await new Promise((resolve, reject) => worker.once("message", resolve).once("error", reject));
      worker.unref(); // the process may end
    }
  }

  /** Run all tasks of a function; returns 0, or what a task that failed returned. */
  launch(run, data) {
    const { control, tasks } = this;
    this.thrown = undefined;
    Atomics.store(control, FUNCTION, run);
    Atomics.store(control, DATA, data);
    Atomics.store(control, DONE, 0);
    Atomics.store(control, TICKET, ((control[TICKET] >> TASK_BITS) + 1) << TASK_BITS);
    if (Atomics.load(control, ASLEEP)) Atomics.notify(control, TICKET);
    work(control, tasks, this.perform);
    while (Atomics.load(control, DONE) < tasks) this.answer();
    const failed = Atomics.exchange(control, FAILED, 0);
    if (this.thrown) throw this.thrown; // after all others are done
    return failed;
  }

  /** Give workers the memory that they ask for. */
  answer() {
    for (const mail of this.mail) {
      const bytes = Atomics.exchange(this.control, mail, 0);
      if (!bytes) continue;
      let address = NONE;
      try {
        address = this.engine.allot(bytes);
      } catch (error) {
        if (!(error instanceof BundleError)) throw error;
      }
      Atomics.store(this.control, mail + 1, address);
      Atomics.notify(this.control, mail + 1);
    }
  }

  destroy() {
    this.workers.forEach((worker) => worker.terminate());
  }
}

/** What a worker does, for good. */
export async function serve({ module, memory, control, tasks, group, stack, mail }, ready) {
  const free = []; // blocks that this worker has asked for: [address, bytes]
  const taken = new Map();
  const allot = (bytes) => {
    const i = free.findIndex(([, size]) => size >= bytes);
    if (i >= 0) {
      const [[address, size]] = free.splice(i, 1);
      taken.set(address, size);
      return address;
    }
    Atomics.store(control, mail + 1, 0);
    Atomics.store(control, mail, bytes);
    Atomics.wait(control, mail + 1, 0);
    const found = Atomics.load(control, mail + 1);
    if (found === NONE) return 0;
    const address = found >>> 0;
    taken.set(address, bytes);
    return address;
  };
  const release = (address) => {
    free.push([address, taken.get(address)]);
    taken.delete(address);
    return 0;
  };
  const launch = () => BROKEN; // a loop in a loop; there is none
  const { exports } = await WebAssembly.instantiate(module, imports(memory, allot, release, launch));
  exports.__stack_pointer.value = stack;
  const perform = guarded(caller(exports, group), console.error);
  ready();
  for (;;) {
    const seen = work(control, tasks, perform);
    let looks = 0;
    while (Atomics.load(control, TICKET) === seen && looks < LOOKS) looks++;
    if (looks < LOOKS) continue;
    Atomics.add(control, ASLEEP, 1);
    Atomics.wait(control, TICKET, seen);
    Atomics.sub(control, ASLEEP, 1);
  }
}
