// Builds the pages into ../dist. It fails if they are too large, or if a source uses a way to
// turn text into markup or code: all text of a guest must go through h() in dom.ts.
import { cp, readFile, readdir, rm } from "node:fs/promises";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const out = "../dist";
const limit = 400_000; // bytes, compressed
const forbidden = /\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|srcdoc|eval|new Function|setHTML\w*)\b/;

for (const name of await readdir("src", { recursive: true })) {
  if (!name.endsWith(".ts")) continue;
  for (const [i, line] of (await readFile(`src/${name}`, "utf8")).split("\n").entries()) {
    const found = forbidden.exec(line);
    if (found) fail(`src/${name}:${i + 1}: ${found[0]} is forbidden; use h() of dom.ts`);
  }
}

for (const name of await readdir(out)) {
  if (name !== ".gitignore") await rm(`${out}/${name}`, { recursive: true });
}
await build({
  entryPoints: { app: "src/main.ts", style: "src/style.css" },
  outdir: out,
  bundle: true,
  splitting: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "eof", // the licences require their notices
  chunkNames: "chunk-[hash]",
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) await cp(`src/${name}`, `${out}/${name}`);

let total = 0;
for (const name of await readdir(out)) {
  const size = gzipSync(await readFile(`${out}/${name}`), { level: 9 }).length;
  total += size;
  console.log(`${String(size).padStart(7)}  ${name}`);
}
console.log(`${String(total).padStart(7)}  compressed, of at most ${limit}`);
if (total > limit) fail(`the pages have ${total} bytes compressed, and must have at most ${limit}`);

function fail(message) {
  console.error(`build.mjs: ${message}`);
  process.exit(1);
}
