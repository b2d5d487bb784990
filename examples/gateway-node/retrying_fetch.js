// A client that retries until it knows: fetch, with a loop that can be read.
//
//     node retrying_fetch.js http://127.0.0.1:8080 PREFIX COUNT [CLIENTS]
//
// Sends COUNT orders, each with its key, from each of CLIENTS at once; prints what each was told, as JSON.
'use strict';

const { setTimeout: sleep } = require('node:timers/promises');

const ATTEMPTS_MAX = 30;

// What says "not known" or "not now". Everything else is definite: 201, and 400, 413 or 422 as well.
const AGAIN = [409, 425, 429, 500, 502, 503, 504];

/** One intent: the same key and the same bytes, however often. */
async function send(url, key, order) {
  const request = {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'idempotency-key': `"${key}"` },
    body: JSON.stringify(order),
  };
  for (let attempt = 1; ; attempt++) {
    let answer, body;
    try {
      answer = await fetch(`${url}/orders`, { ...request, signal: AbortSignal.timeout(30_000) });
      body = await answer.text();
    } catch (error) {
      // Refused, reset, timed out, or broken off in the body: it may have happened, and the key makes asking safe.
      if (attempt === ATTEMPTS_MAX) throw error;
      await sleep(pause(attempt));
      continue;
    }
    if (!AGAIN.includes(answer.status) || attempt === ATTEMPTS_MAX) {
      const replayed = answer.headers.get('idempotency-replayed') === 'true';
      return { key, status: answer.status, body, attempts: attempt, replayed };
    }
    await sleep(pause(attempt, answer.headers.get('retry-after')));
  }
}

function pause(attempt, retryAfter) {
  if (/^\d+$/.test(retryAfter ?? '')) return Number(retryAfter) * 1000;
  // Full jitter: clients that failed together must not come back in step.
  return Math.random() * Math.min(1000, 50 * 2 ** attempt);
}

async function client(url, prefix, count) {
  const told = [];
  for (let n = 0; n < count; n++) {
    told.push(await send(url, `${prefix}-${n}`, { customer: `${prefix}-${n}`, amount: 100 + n }));
  }
  return told;
}

async function main([url, prefix, count, clients = '1']) {
  const told = await Promise.all(Array.from({ length: Number(clients) }, () => client(url, prefix, Number(count))));
  console.log(JSON.stringify(told.flat(), null, 1));
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
