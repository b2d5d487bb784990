// What orders.js promises, tried against a real database: `node orders.js --self-test`.
'use strict';

const assert = require('node:assert/strict');
const { spawn } = require('node:child_process');
const { randomUUID } = require('node:crypto');
const net = require('node:net');
const { setTimeout: sleep } = require('node:timers/promises');
const { Client } = require('pg');
const orders = require('./orders');

const CALLERS = 20;

async function main(url, argv) {
  if (argv[0] === '--crash-after-insert') return crashAfterInsert(url, ...argv.slice(1));
  const pool = orders.connect(url, CALLERS);
  let passed = 0;
  let failed = 0;
  await orders.setup(pool);
  for (const [name, test] of Object.entries(tests)) {
    try {
      await test(url, pool);
      passed++;
    } catch (error) {
      failed++;
      console.error(`${name}: ${error.stack}`);
    }
  }
  await pool.end();
  console.log(`${passed} passed, ${failed} failed`);
  if (failed) process.exitCode = 1;
}

/** A key and a request of the test's own; the customer's name finds its rows. */
function fresh(amount = 1999) {
  const name = randomUUID();
  return [`checkout-${name}`, { customer: name, amount }];
}

async function count(pool, request, table = 'example_orders') {
  const { rows } = await pool.query(`SELECT count(*)::int AS n FROM ${table} WHERE customer = $1`, [request.customer]);
  return rows[0].n;
}

/** A client that is told to come again does so. */
async function asAClient(call) {
  const deadline = Date.now() + 30_000;
  for (;;) {
    try {
      return await call();
    } catch (error) {
      if (!(error instanceof orders.InProgress) || Date.now() > deadline) throw error;
      await sleep(Math.min(error.retryAfterMs, 200));
    }
  }
}

const tests = {
  async sequentialDuplicates(url, pool) {
    const [key, request] = fresh();
    const first = await orders.createOrder(pool, key, request);
    // The same JSON, spelled otherwise.
    const again = await orders.createOrder(pool, key, { amount: request.amount, customer: request.customer });
    assert.ok(first.equals(again), 'the replay has other bytes');
    assert.equal(await count(pool, request), 1);
  },

  async twentyCallersAtOnce(url, pool) {
    const [key, request] = fresh();
    const callers = Array.from({ length: CALLERS }, () => asAClient(() => orders.createOrder(pool, key, request)));
    const answers = new Set((await Promise.all(callers)).map(String));
    assert.equal(answers.size, 1, 'different answers');
    assert.equal(await count(pool, request), 1);
  },

  async sameKeyOtherPayload(url, pool) {
    const [key, request] = fresh();
    const first = await orders.createOrder(pool, key, request);
    const other = { customer: randomUUID(), amount: 5 };
    await assert.rejects(orders.createOrder(pool, key, other), orders.Conflict);
    assert.equal(await count(pool, other), 0, 'the conflicting request left a row');
    assert.ok(first.equals(await orders.createOrder(pool, key, request)), 'the stored answer changed');
  },

  async crashAfterTheBusinessWrite(url, pool) {
    const [key, request] = fresh();
    const args = [require.resolve('./orders'), '--crash-after-insert', key, request.customer, String(request.amount)];
    const child = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'inherit'], timeout: 30_000 });
    let said = '';
    child.stdout.on('data', (data) => { said += data; });
    const signal = await new Promise((done) => child.on('close', (code, name) => done(name)));
    assert.deepEqual([said, signal], ['inserted\n', 'SIGKILL'], 'the crash did not happen');
    assert.equal(await count(pool, request), 0, 'the crashed attempt left a row');
    const answer = await asAClient(() => orders.createOrder(pool, key, request));
    assert.ok(answer.equals(await orders.createOrder(pool, key, request)), 'the replay has other bytes');
    assert.equal(await count(pool, request), 1);
  },

  async businessFailureIsFinal(url, pool) {
    const [key, request] = fresh(orders.CREDIT_LIMIT + 1);
    for (let i = 0; i < 2; i++) {
      await assert.rejects(orders.createOrder(pool, key, request), (error) =>
        error instanceof orders.Failed && error.code === 'credit_exceeded' && error.message.includes('limit'));
      assert.equal(await count(pool, request), 0, 'the failed attempt left a row');
    }
    assert.equal((await orders.claim(pool, 'create_order', key, request)).kind, 'final_failure');
  },

  async commitOfAnAbortedTransaction(url, pool) {
    const client = await pool.connect();
    try {
      await client.query('BEGIN');
      await assert.rejects(client.query('SELECT 1/0'), { code: '22012' });
      await assert.rejects(orders.commit(client), /ROLLBACK/);
    } finally {
      client.release();
    }
  },

  commitLostOnTheWay: (url, pool) => commitLost(url, pool, false),
  answerToCommitLost: (url, pool) => commitLost(url, pool, true),

  async leaseIsHeldAndRenewed(url, pool) {
    const [key, request] = fresh();
    const never = () => { throw new Error('ran a second time'); };
    const first = await orders.chargeCard(pool, key, request, async (_key, _request, renew) => {
      await assert.rejects(orders.chargeCard(pool, key, request, never), (error) =>
        error instanceof orders.InProgress && error.retryAfterMs > 0);
      const before = await renew();
      await sleep(2); // a Date holds milliseconds
      assert.ok(before < await renew(), 'the lease did not grow');
      return 'ref-1';
    });
    assert.ok(first.equals(await orders.chargeCard(pool, key, request, never)), 'the replay has other bytes');
    assert.equal(await count(pool, request, 'example_payments'), 1);
  },

  async staleOwnerIsFenced(url, pool) {
    const [key, request] = fresh();
    let takeover;
    const pausing = async (_key, _request, renew) => {
      // Paused past its lease: meanwhile another caller keeps asking until it may take over.
      takeover = await asAClient(() => orders.chargeCard(pool, key, request, async () => 'ref-of-the-second'));
      await assert.rejects(renew(), orders.LeaseLost);
      return 'ref-of-the-first';
    };
    await assert.rejects(orders.chargeCard(pool, key, request, pausing, '50 milliseconds'), (error) =>
      error instanceof orders.LeaseLost && error.cause.code === 'P4010');
    assert.equal(await count(pool, request, 'example_payments'), 1);
    assert.ok(takeover.equals(await orders.chargeCard(pool, key, request, pausing)), 'the replay has other bytes');
  },
};

async function crashAfterInsert(url, key, customer, amount) {
  const client = new Client({ connectionString: url });
  await client.connect();
  const request = { customer, amount: Number(amount) };
  await client.query('BEGIN');
  assert.equal((await orders.claim(client, 'create_order', key, request)).kind, 'new_claim');
  await orders.insertOrder(client, request);
  require('node:fs').writeSync(1, 'inserted\n');
  process.kill(process.pid, 'SIGKILL');
}

async function commitLost(url, pool, answerOnly) {
  const [key, request] = fresh();
  const wire = await commitCutter(url, answerOnly);
  const cut = orders.connect(wire.url, 1);
  const answer = await asAClient(() => orders.createOrder(cut, key, request));
  await cut.end();
  assert.equal(wire.cuts, 1, 'nothing was cut');
  assert.ok(answer.equals(await orders.createOrder(pool, key, request)), 'not the answer that was stored');
  assert.equal(await count(pool, request), 1);
}

/**
 * A wire that breaks once: at the first COMMIT, before it arrives or before its answer comes back.
 * It reads the protocol in the clear, so it asks for a connection without TLS.
 */
async function commitCutter(url, answerOnly) {
  const { host, port, user, password, database } = new Client({ connectionString: url });
  const wire = { cuts: 0 };
  const listener = net.createServer((client) => {
    const server = host.startsWith('/') ? net.connect(`${host}/.s.PGSQL.${port}`) : net.connect(port, host);
    const hangUp = () => { client.destroy(); server.destroy(); };
    let cut = false;
    client.on('data', (data) => {
      if (wire.cuts === 0 && /\bCOMMIT\b/i.test(data.toString('latin1'))) {
        wire.cuts++;
        cut = true;
        if (!answerOnly) return hangUp();
      }
      server.write(data);
    });
    // Once cut, an answer that arrives here means that the transaction is committed; the client never hears of it.
    server.on('data', (data) => (cut ? hangUp() : client.write(data)));
    for (const end of [client, server]) end.on('close', hangUp).on('error', hangUp);
  });
  await new Promise((done) => listener.listen(0, '127.0.0.1', done));
  listener.unref(); // a test that fails must not keep the process
  const login = [user, password ?? ''].map(encodeURIComponent).join(':');
  const address = `127.0.0.1:${listener.address().port}/${encodeURIComponent(database)}`;
  return Object.assign(wire, { url: `postgres://${login}@${address}?sslmode=disable` });
}

module.exports = { main };
