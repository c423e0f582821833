// Says everything, shuts down its side, and prints the answer:
// node halfclose.mjs HOST PORT
import net from 'node:net';
const [host, port] = process.argv.slice(2);
const words = ['half a line', 'many lines\n'.repeat(50000)];
for (const say of words) {
  await new Promise((done, failed) => {
    const c = net.connect({host, port, allowHalfOpen: true}, () => c.end(say));
    c.on('data', b => process.stdout.write(b)).on('end', done).on('error', failed);
  });
}
