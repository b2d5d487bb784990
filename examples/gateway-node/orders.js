// An orders service behind `pgonce gateway`: the order and its answer commit in one transaction.
//
//     DATABASE_URL=postgres://… node orders.js PORT
//     pgonce gateway --listen 127.0.0.1:8080 --upstream http://127.0.0.1:PORT --require-key --stale rerun
'use strict';

const http = require('node:http');
const { Pool } = require('pg');

const { crashAt } = require('./crash'); // for the tests: see crash.js

const BODY_BYTES_MAX = 64 * 1024;

/** Inserts the order, and with it the answer that the gateway gives to this request and to every repetition. */
async function createOrder(pool, claim, request) {
  crashAt('before_effect');
  const answer = await transaction(pool, async (client) => {
    const order = await insertOrder(client, claim, request);
    crashAt('after_effect');
    const headers = [['content-type', 'application/json'], ['location', `/orders/${order.id}`]];
    const answer = { status: 201, headers, body: Buffer.from(JSON.stringify(order)) };
    if (claim) await succeed(client, claim, answer);
    crashAt('after_succeed');
    return answer;
  });
  crashAt('after_commit');
  return answer;
}

/** The effect. It knows nothing of idempotency. */
async function insertOrder(client, claim, { customer, amount }) {
  const { rows } = await client.query(
    'INSERT INTO gateway_orders (tenant, customer, amount) VALUES ($1, $2, $3) RETURNING id',
    [claim ? claim.tenant : '', customer, amount],
  );
  return { id: rows[0].id, customer, amount };
}

/**
 * The outcome. The last statement before COMMIT: it locks the intent's row, which the gateway's renewals need.
 * Rejects with P4010 where the claim is not the current one any more: somebody else runs this intent, or ran it.
 */
function succeed(client, claim, { status, headers, body }) {
  return client.query(
    `SELECT once.succeed(p_tenant => $1, p_scope => $2, p_key => $3, p_claim_id => $4,
       p_response_code => $5, p_response_headers => $6::jsonb, p_response_body => $7)`,
    [claim.tenant, claim.scope, claim.key, claim.claimId, status, JSON.stringify(headers), body],
  );
}

/** One transaction around `work(client)`. */
async function transaction(pool, work) {
  const client = await pool.connect();
  // A connection that breaks while it is ours emits an error besides failing its query; without a listener that
  // ends the process.
  const ignore = () => {};
  client.on('error', ignore);
  let broken = true;
  try {
    await client.query('BEGIN');
    const result = await work(client);
    await client.query('COMMIT');
    broken = false;
    return result;
  } catch (error) {
    // Where the rollback fails too, the connection is thrown away and the server rolls back by itself.
    broken = await client.query('ROLLBACK').then(() => false, () => true);
    throw error;
  } finally {
    client.off('error', ignore);
    client.release(broken);
  }
}

async function answerTo(pool, claim, body) {
  const request = parse(body);
  if (!request) return problem(400, 'an order is {customer: text, amount: a whole number from 1}');
  try {
    return await createOrder(pool, claim, request);
  } catch (error) {
    if (error.code === 'P4010') {
      return problem(409, 'this attempt came too late and did nothing: another has the request, or it is done');
    }
    // Also a COMMIT that was not answered. The gateway asks the intent's row, which waits for the transaction's end:
    // if it did commit, the client gets the answer all the same.
    console.error(`${error.constructor.name}: ${error.message}`);
    return problem(503, 'the database did not do it');
  }
}

function parse(body) {
  let request;
  try {
    request = JSON.parse(body.toString());
  } catch {
    return null;
  }
  const { customer, amount } = request ?? {};
  if (typeof customer !== 'string' || !/^\P{C}{1,200}$/u.test(customer)) return null;
  if (!Number.isInteger(amount) || amount < 1 || amount > 1e12) return null;
  return { customer, amount };
}

function problem(status, title) {
  const body = Buffer.from(JSON.stringify({ title, status }));
  return { status, headers: [['content-type', 'application/problem+json']], body };
}

/** Null where the service is called directly: then nobody deduplicates. */
function claimOf(headers) {
  if (!headers['pgonce-claim']) return null;
  // A header's bytes come as Latin-1; the gateway sent UTF-8.
  const text = (name) => Buffer.from(headers[name] ?? '', 'latin1').toString();
  return {
    tenant: text('pgonce-tenant'), scope: text('pgonce-scope'), key: text('pgonce-key'), claimId: text('pgonce-claim'),
  };
}

async function serve(pool, request, response) {
  const pieces = [];
  let bytes = 0;
  for await (const piece of request) {
    bytes += piece.length;
    if (bytes > BODY_BYTES_MAX) {
      // The rest is not read, so the connection cannot go on.
      return send(response, problem(413, `the limit is ${BODY_BYTES_MAX} bytes`), { connection: 'close' });
    }
    pieces.push(piece);
  }
  if (request.method !== 'POST' || request.url !== '/orders') {
    return send(response, problem(404, 'there are orders here, nothing else'));
  }
  return send(response, await answerTo(pool, claimOf(request.headers), Buffer.concat(pieces)));
}

function send(response, { status, headers, body }, more = {}) {
  crashAt('before_answer');
  response.writeHead(status, { ...Object.fromEntries(headers), ...more, 'content-length': body.length });
  const half = Math.floor(body.length / 2);
  crashAt('in_answer', (die) => response.write(body.subarray(0, half), die)) || response.end(body);
}

async function main(argv) {
  const url = process.env.DATABASE_URL;
  if (!url || argv.length !== 1 || !/^\d+$/.test(argv[0])) {
    throw new Error('usage: DATABASE_URL=postgres://… node orders.js PORT');
  }
  // The gateway's own database: the claim is there, and the order has to be where the claim is.
  const pool = new Pool({ connectionString: url, max: 10, connectionTimeoutMillis: 10_000 });
  pool.on('error', () => {}); // an idle connection broke: the pool replaces it
  await pool.query(`CREATE TABLE IF NOT EXISTS gateway_orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant text NOT NULL, customer text NOT NULL, amount bigint NOT NULL)`);
  const server = http.createServer((request, response) => {
    serve(pool, request, response).catch((error) => {
      // The request broke off: whoever sent it is gone, and meant to say more.
      console.error(`${error.constructor.name}: ${error.message}`);
      response.destroy();
    });
  });
  server.keepAliveTimeout = 60_000; // longer than the gateway keeps a silent connection
  server.listen(Number(argv[0]), '127.0.0.1', () => console.error(`ready http://127.0.0.1:${server.address().port}`));
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
