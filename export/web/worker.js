// A thread of the WebAssembly engine: see threads.js.

import { serve } from "./threads.js";

if (globalThis.postMessage && globalThis.self) {
  self.onmessage = ({ data }) => serve(data, () => self.postMessage(0));
} else {
  const { parentPort, workerData } = await import("node:worker_threads");
  await serve(workerData, () => parentPort.postMessage(0));
}
