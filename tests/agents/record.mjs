// A proxy that writes down what a client sends: record.mjs PORT SERVER_PORT FOLDER NAME.
//
// Each new form of request becomes FOLDER/NAME-N.json with method, path, headers and body, N counting from 1. Texts are
// cut down: what is long is replaced by its length, since the words of others' prompts are theirs, and the server's part is
// the form. Requests that have the form of an earlier one are left out.
import {createServer, request} from "node:http";
import {mkdirSync, writeFileSync} from "node:fs";

const [port, server, folder, name] = process.argv.slice(2);
/** Longest text that is kept, in characters. */
const KEPT = 48;
/** Most tools and list items of a request that are kept. */
const ITEMS = 40;
/** Headers that say something of the client's dialect. */
const HEADERS = /^(accept|accept-encoding|content-type|anthropic-(beta|version)|openai-beta|x-session-.*|x-stainless-lang|x-app|user-agent)$/;

function cut(value, key = "") {
  if (typeof value === "string") {
    // What the server or the tests look at stays.
    if (key === "text" && value.startsWith("x-anthropic-billing-header:")) return value.replace(/[0-9a-f]{5,}/g, "00000");
    if (key === "description") return `(a text of ${value.length} characters)`;
    if (value.length <= KEPT && !/[/\\@]|[0-9a-f]{8}-/.test(value)) return value;
    if (["url", "image_url", "data"].includes(key)) return value;
    if (key === "arguments" || key === "pattern") return "{}";
    return `(a text of ${value.length} characters)`;
  }
  if (Array.isArray(value)) return value.slice(0, ITEMS).map(item => cut(item, key));
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, cut(v, k)]));
  return value;
}
/** The names and kinds of everything in a body, but not how many turns there are. */
function form(value) {
  if (Array.isArray(value)) return [...new Set(value.map(item => JSON.stringify(form(item))))].sort();
  if (value && typeof value === "object") return Object.keys(value).sort().map(k => [k, ["type", "role"].includes(k) ? value[k] : form(value[k])]);
  return typeof value;
}

mkdirSync(folder, {recursive: true});
const known = new Set();
createServer((asked, answer) => {
  const parts = [];
  asked.on("data", part => parts.push(part));
  asked.on("end", () => {
    const body = Buffer.concat(parts);
    if (asked.method === "POST") {
      let json = null;
      try { json = JSON.parse(body); } catch { /* compressed, or none: told by its headers */ }
      const {pathname, search} = new URL(asked.url, "http://x");
      const record = {
        method: asked.method, path: pathname + search,
        headers: Object.fromEntries(Object.entries(asked.headers).filter(([k]) => HEADERS.test(k) || k === "content-encoding")
          .map(([k, v]) => [k, /session|user-agent/.test(k) ? v.slice(0, KEPT) : v])),
        header_bytes: asked.rawHeaders.join("").length, body_bytes: body.length, body: cut(json),
      };
      const kind = JSON.stringify([record.method, record.path, form(json)]);
      if (!known.has(kind)) {
        known.add(kind);
        writeFileSync(`${folder}/${name}-${known.size}.json`, JSON.stringify(record) + "\n");
      }
    }
    const on = request({port: server, host: "127.0.0.1", method: asked.method, path: asked.url, headers: asked.headers}, reply => {
      answer.writeHead(reply.statusCode, reply.headers);
      reply.pipe(answer);
    });
    on.on("error", () => answer.destroy());
    answer.on("close", () => on.destroy());
    on.end(body);
  });
}).listen(Number(port), "127.0.0.1");
