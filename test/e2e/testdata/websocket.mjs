// Talks to an echo: node websocket.mjs URL
const [url] = process.argv.slice(2);
const say = ['short', 'ünïcode', 'long '.repeat(60000), 'last'];
const ws = new WebSocket(url);
const fail = what => { console.log(`failed: ${what}`); process.exit(1); };
let heard = -1; // the greeting comes first, unasked
ws.onerror = e => fail(e.message ?? 'error');
ws.onclose = () => fail(`closed after ${heard} answers`);
ws.onmessage = e => {
  if (heard < 0 ? e.data !== 'welcome' : e.data !== say[heard]) fail(`answer ${heard}: ${String(e.data).slice(0, 80)}`);
  if (++heard < say.length) return ws.send(say[heard]);
  console.log(`${heard} answers`);
  process.exit(0);
};
