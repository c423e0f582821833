// Reads an event stream, and acknowledges each event, without which the next
// one does not come: node events.mjs BASE-URL STREAM
const [base, stream] = process.argv.slice(2);
const answer = await fetch(`${base}/events?stream=${stream}`);
const text = new TextDecoder();
const seen = [];
let rest = '';
for await (const chunk of answer.body) {
  const parts = (rest + text.decode(chunk, {stream: true})).split('\n\n');
  rest = parts.pop();
  for (const part of parts) {
    const event = part.replace('data: ', '');
    seen.push(event);
    if (event !== 'end') await fetch(`${base}/ack?stream=${stream}&event=${event}`, {method: 'POST'});
  }
}
console.log(seen.join(' '));
