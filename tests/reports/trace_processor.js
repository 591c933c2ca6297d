// Perfetto's trace_processor in WebAssembly, as a filter of RPC messages from standard input to standard output.
// It is that of a web worker: what it expects of one is put into place first.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const node = process;
const read = (url) => fs.readFileSync(path.join(folder, path.basename(String(url))));

node.on("unhandledRejection", (error) => {
  console.error(String(error && error.message).slice(0, 500));
  node.exit(1);
});

class FileRequest {
  open(method, url) {
    this.url = url;
  }
  send() {
    const data = read(this.url);
    this.status = 200;
    this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
  }
}

Object.assign(globalThis, {
  self: globalThis,
  location: { href: "http://localhost/engine_bundle.js" },
  WorkerGlobalScope: class {},
  importScripts: () => {},
  fetch: async (url) => new Response(read(url), { headers: { "Content-Type": "application/wasm" } }),
  XMLHttpRequest: FileRequest,
});
console.log = console.error;
const messages = fs.readFileSync(0);
// It would take this for Node, for which it is not built.
delete globalThis.process;
vm.runInThisContext(read("engine_bundle.js").toString(), { filename: "engine_bundle.js" });
const port = { postMessage: (data) => fs.writeSync(1, data) };
globalThis.onmessage({ data: port });
setTimeout(() => port.onmessage({ data: new Uint8Array(messages) }), 0);
