// The usual choice: express with an idempotency middleware on Redis. SET NX takes the key, the response is stored
// with its fingerprint when it is sent, a retry gets it back. No fence, no lease, and Redis is believed.
const { createHash } = require('node:crypto');
const http = require('node:http');
const express = require('express');
const Redis = require('ioredis');

const [port, redisUrl, upstream] = process.argv.slice(2);
const redis = new Redis(redisUrl);
const agent = new http.Agent({ keepAlive: true, maxSockets: 256 });
const app = express();
app.disable('x-powered-by');
app.use(express.raw({ type: () => true, limit: '1mb' }));

async function idempotent(request, response, next) {
  const key = request.get('idempotency-key');
  if (!key) return next();
  const fingerprint = createHash('sha256').update(`${request.method} ${request.url}\n`).update(request.body).digest('hex');
  const name = `idem:${key}`;
  const fresh = await redis.set(name, JSON.stringify({ fingerprint, processing: true }), 'EX', 86400, 'NX');
  if (!fresh) {
    const known = JSON.parse(await redis.get(name));
    if (known.fingerprint !== fingerprint) return response.status(422).end();
    if (known.processing) return response.status(409).end();
    return response.status(known.status).set('idempotency-replayed', 'true').type(known.type).send(Buffer.from(known.body, 'base64'));
  }
  response.store = (status, type, body) =>
    redis.set(name, JSON.stringify({ fingerprint, status, type, body: body.toString('base64') }), 'EX', 86400);
  next();
}

app.use(idempotent, (request, response) => {
  const target = new URL(request.url, upstream);
  const forwarded = http.request(target, { method: request.method, agent, headers: { 'content-length': request.body?.length ?? 0 } }, (answer) => {
    const pieces = [];
    answer.on('data', (piece) => pieces.push(piece));
    answer.on('end', async () => {
      const body = Buffer.concat(pieces);
      await response.store?.(answer.statusCode, answer.headers['content-type'] ?? 'text/plain', body);
      response.status(answer.statusCode).type(answer.headers['content-type'] ?? 'text/plain').send(body);
    });
  });
  forwarded.on('error', () => response.status(502).end());
  forwarded.end(request.body);
});

http.createServer(app).listen(Number(port), '127.0.0.1', () => console.error('ready'));
