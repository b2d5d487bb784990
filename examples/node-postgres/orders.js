// An order that is created once, however often and by however many it is asked for: node-postgres.
//
//     DATABASE_URL=postgres://… node orders.js KEY CUSTOMER AMOUNT
//     DATABASE_URL=postgres://… node orders.js --self-test
'use strict';

const { setTimeout: sleep } = require('node:timers/promises');
const { Client, DatabaseError, Pool } = require('pg');

const ATTEMPTS_MAX = 8;
const BACKOFF_MS_MAX = 500;
const RESOLVE_ATTEMPTS_MAX = 6;
const CREDIT_LIMIT = 100_000;

// The kinds of claim after which the intent is ours to run.
const OWNED = ['new_claim', 'retryable_failure', 'processing_stale'];

/** The key was used before with another payload. HTTP: 422. */
class Conflict extends Error {}

/** Somebody is at it: ask again, with the same key, after `retryAfterMs`. HTTP: 409 with Retry-After. */
class InProgress extends Error {
  constructor(retryAfterMs) {
    super(`in progress, again in ${retryAfterMs} ms`);
    this.retryAfterMs = retryAfterMs;
  }
}

/** A rule said no: what an effect throws. Nothing of the intent is recorded yet. */
class BusinessError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** The same no, recorded, now or by an earlier attempt: every later attempt gets it. */
class Failed extends BusinessError {}

/** `uncertain`: the effect may be there or not. A person settles it (`pgonce intents settle`). */
class NeedsSettling extends Error {}

/** It was done, but the answer is kept no longer. */
class ResultExpired extends Error {}

/** Somebody took the work over; what this caller did in its transaction was rolled back. */
class LeaseLost extends Error {}

/** COMMIT was sent and not answered: it may have happened. */
class InDoubt extends Error {}

/** It did not happen, and never will: run the transaction again. */
class RolledBack extends Error {}

/** Safe at every start: every call changes nothing when there is nothing to change. */
async function setup(pool) {
  await pool.query(`CREATE TABLE IF NOT EXISTS example_orders
    (id uuid PRIMARY KEY, customer text NOT NULL, amount bigint NOT NULL)`);
  await pool.query(`CREATE TABLE IF NOT EXISTS example_payments
    (provider_reference text NOT NULL, customer text NOT NULL, amount bigint NOT NULL)`);
  const scopes = {
    create_order: { retention: '30d', waiters_max: 32 },
    // The provider gets our key and deduplicates by it, so asking it again is safe: stale = rerun.
    charge_card: { mode: 'leased', lease: '30s', stale: 'rerun', retention: '30d' },
  };
  for (const [scope, policy] of Object.entries(scopes)) {
    await pool.query('SELECT once.define_scope(p_scope => $1, p_policy => $2::jsonb)', [scope, JSON.stringify(policy)]);
  }
}

// --- atomic: claim, effect and outcome in one transaction ---------------------------------------------------

/**
 * The answer's bytes: of this execution, or the stored ones of the first.
 * After any error that is not described above, calling again with the same key is safe.
 */
async function createOrder(pool, key, request) {
  try {
    return await retrying(() => createOrderAttempt(pool, key, request));
  } catch (error) {
    if (!(error instanceof BusinessError) || error instanceof Failed) throw error;
    // The effect is rolled back by now, and a failure noted in that transaction would be gone with it:
    // it is recorded in one of its own.
    return retrying(() => recordFailure(pool, key, request, error));
  }
}

async function createOrderAttempt(pool, key, request) {
  let claimId, body;
  try {
    return await transaction(pool, async (client) => {
      const found = await claim(client, 'create_order', key, request);
      if (!OWNED.includes(found.kind)) return observed(found);
      claimId = found.claim_id;
      const order = await insertOrder(client, request);
      body = Buffer.from(JSON.stringify(order));
      await succeed(client, 'create_order', key, claimId, body, 'order', order.id);
      return body;
    });
  } catch (error) {
    // In doubt without a claim: only the end of a look was lost, and it changed nothing.
    if (!(error instanceof InDoubt) || !claimId) throw error;
    const done = await resolve(pool, 'create_order', key, claimId);
    if (done) return body;
    if (done === null) throw error; // a scope that keeps its rows for less than a minute cannot tell
    throw new RolledBack('the connection was lost and the transaction rolled back');
  }
}

/** The effect. It knows nothing of idempotency. */
async function insertOrder(client, request) {
  const inserted = await client.query(
    'INSERT INTO example_orders (id, customer, amount) VALUES (gen_random_uuid(), $1, $2) RETURNING id',
    [request.customer, request.amount],
  );
  const owed = await client.query(
    'SELECT sum(amount) > $2 AS too_much FROM example_orders WHERE customer = $1',
    [request.customer, CREDIT_LIMIT],
  );
  if (owed.rows[0].too_much) throw new BusinessError('credit_exceeded', `the limit is ${CREDIT_LIMIT}`);
  return { id: inserted.rows[0].id, customer: request.customer, amount: request.amount };
}

async function recordFailure(pool, key, request, refusal) {
  const found = await transaction(pool, async (client) => {
    const { rows } = await client.query(
      `SELECT * FROM once.record_failure(p_scope => 'create_order', p_key => $1,
         p_fingerprint => once.fingerprint($2::jsonb), p_retryable => false, p_code => $3, p_message => $4)`,
      [key, JSON.stringify(request), refusal.code, refusal.message],
    );
    return rows[0];
  });
  if (OWNED.includes(found.kind)) throw new Failed(refusal.code, refusal.message);
  // Between our rollback and this call another attempt settled the intent: its outcome is the outcome.
  return observed(found);
}

// --- leased: work that cannot live in one transaction -------------------------------------------------------

/**
 * Charges through `provider(key, request, renew)`, which resolves to the provider's reference.
 *
 * The claim commits before the provider is called. The payment's row commits with the outcome, fenced: an
 * owner that was paused for longer than its lease cannot write over whoever took over. What the fence does
 * not cover is the call itself: the provider may be called twice, so it must take our key.
 */
async function chargeCard(pool, key, request, provider, lease = '30 seconds') {
  const found = await transaction(pool, (client) => claim(client, 'charge_card', key, request, lease));
  if (!OWNED.includes(found.kind)) return observed(found);
  const claimId = found.claim_id;

  /** To be called well before the lease ends; rejects with LeaseLost when it is too late. */
  const renew = () => fenced(pool, async (client) => {
    const { rows } = await client.query(
      `SELECT once.renew(p_scope => 'charge_card', p_key => $1, p_claim_id => $2, p_lease => $3::interval) AS until`,
      [key, claimId, lease],
    );
    return rows[0].until;
  });

  let reference;
  try {
    reference = await provider(key, request, renew);
  } catch (error) {
    // Only a definite no is recorded. After a timeout the claim is left alone: we do not know, and when the
    // lease ends the scope's policy decides.
    if (!(error instanceof BusinessError)) throw error;
    await fenced(pool, (client) => client.query(
      `SELECT once.fail(p_scope => 'charge_card', p_key => $1, p_claim_id => $2,
         p_retryable => false, p_code => $3, p_message => $4)`,
      [key, claimId, error.code, error.message],
    ));
    throw new Failed(error.code, error.message);
  }
  const body = Buffer.from(JSON.stringify({ reference }));
  try {
    await retrying(() => fenced(pool, async (client) => {
      await client.query(
        'INSERT INTO example_payments (provider_reference, customer, amount) VALUES ($1, $2, $3)',
        [reference, request.customer, request.amount],
      );
      await succeed(client, 'charge_card', key, claimId, body, 'payment', reference);
    }));
  } catch (error) {
    if (!(error instanceof InDoubt)) throw error;
    const done = await resolve(pool, 'charge_card', key, claimId);
    // null: our completion may still be on its way. The next call with this key gets a definite answer.
    if (done === null) throw new InProgress(1000);
    if (!done) throw new LeaseLost('the claim was taken over');
  }
  return body;
}

/** A transaction that says LeaseLost where succeed, fail or renew say that the claim is not ours any more. */
async function fenced(pool, work) {
  try {
    return await transaction(pool, work);
  } catch (error) {
    const lost = ['P4010', 'P4011', 'P4012'].includes(error.code);
    throw lost ? new LeaseLost('the claim was taken over', { cause: error }) : error;
  }
}

// --- the calls, thin ----------------------------------------------------------------------------------------

async function claim(client, scope, key, request, lease = null) {
  try {
    const { rows } = await client.query(
      `SELECT * FROM once.claim(p_scope => $1, p_key => $2,
         p_fingerprint => once.fingerprint($3::jsonb), p_lease => $4::interval)`,
      [scope, key, JSON.stringify(request), lease],
    );
    return rows[0];
  } catch (error) {
    if (error.code === 'P4002') throw new Conflict('the key was used before with another payload', { cause: error });
    throw error;
  }
}

function succeed(client, scope, key, claimId, body, resultType, resultId) {
  return client.query(
    `SELECT once.succeed(p_scope => $1, p_key => $2, p_claim_id => $3, p_response_body => $4,
       p_response_code => 201, p_result_type => $5, p_result_id => $6)`,
    [scope, key, claimId, body, resultType, resultId],
  );
}

/** The answer of an intent that is not ours to run. */
function observed(found) {
  switch (found.kind) {
    case 'replay_success': return found.response_body;
    case 'final_failure': throw new Failed(found.failure_code, found.failure_message);
    case 'processing_active': throw new InProgress(Number(found.retry_after_ms)); // a bigint comes as a string
    case 'uncertain': throw new NeedsSettling('the outcome is not known');
    case 'result_expired': throw new ResultExpired('done, but the answer is kept no longer');
    default: throw new Error(`a kind of claim that this program does not know: ${found.kind}`);
  }
}

/** One transaction around `work(client)`. */
async function transaction(pool, work) {
  const client = await pool.connect();
  // A connection that breaks while it is ours emits an error besides failing its query; without a listener
  // that ends the process.
  const ignore = () => {};
  client.on('error', ignore);
  let broken = true;
  try {
    await client.query('BEGIN');
    const result = await work(client);
    await commit(client);
    broken = false;
    return result;
  } catch (error) {
    // Where the rollback fails too, the connection is thrown away and the server rolls back by itself.
    if (!(error instanceof InDoubt)) broken = await client.query('ROLLBACK').then(() => false, () => true);
    throw error;
  } finally {
    client.off('error', ignore);
    client.release(broken);
  }
}

/**
 * COMMIT, and only a real one returns: to the COMMIT of an aborted transaction PostgreSQL answers ROLLBACK
 * without an error, and node-postgres resolves the promise. An effect whose error somebody caught on the way
 * would be reported as done. The answer is in `command`.
 */
async function commit(client) {
  let result;
  try {
    result = await client.query('COMMIT');
  } catch (error) {
    // Not from the server (EPIPE and its like): the connection broke. 57P01 and its like: the server may say that
    // it stops after it has committed. Anything else that the server says is certain: not committed.
    if (!(error instanceof DatabaseError) || /^(08|57P0|40003)/.test(error.code)) {
      throw new InDoubt('COMMIT was not answered', { cause: error });
    }
    throw error;
  }
  if (result.command !== 'COMMIT') {
    throw new Error(`the transaction was not committed: the server answered ${result.command}`);
  }
}

/**
 * What became of a COMMIT that was not answered, asked of the intent's row: true, false, or null (cannot tell).
 * Over a new connection: those that wait in the pool may be as dead as the one that was lost.
 */
async function resolve(pool, scope, key, claimId) {
  for (let attempt = 1; ; attempt++) {
    const client = new Client(pool.options);
    client.on('error', () => {}); // see transaction()
    try {
      await client.connect();
      const { rows } = await client.query(
        'SELECT once.resolve(p_scope => $1, p_key => $2, p_claim_id => $3) AS done', [scope, key, claimId],
      );
      return rows[0].done;
    } catch (error) {
      // 55P03: the lost transaction is still open. Or the server is still away (a restart, a failover).
      if (attempt === RESOLVE_ATTEMPTS_MAX) {
        throw new InDoubt('not resolved yet: ask again with the same key', { cause: error });
      }
    } finally {
      await client.end().catch(() => {});
    }
    await backOff(attempt);
  }
}

/**
 * Runs a whole transaction again after a serialization failure or a deadlock, a bounded number of times.
 * The whole of it, from the claim on: after 40001 another attempt may have won, and only a new claim sees it.
 */
async function retrying(work) {
  for (let attempt = 1; ; attempt++) {
    try {
      return await work();
    } catch (error) {
      const again = error instanceof RolledBack || error.code === '40001' || error.code === '40P01';
      if (!again || attempt === ATTEMPTS_MAX) throw error;
      await backOff(attempt);
    }
  }
}

// Full jitter: rivals that collided once must not come back in step.
const backOff = (attempt) => sleep(Math.random() * Math.min(BACKOFF_MS_MAX, 10 * 2 ** attempt));

function connect(url, size = 20) {
  const pool = new Pool({ connectionString: url, max: size });
  pool.on('error', () => {}); // an idle connection broke: the pool replaces it
  return pool;
}

async function main(argv) {
  const url = process.env.DATABASE_URL;
  if (!url) throw new Error('DATABASE_URL is not set: start a database with `pgonce up`, which prints it');
  if (argv[0] === '--self-test' || argv[0] === '--crash-after-insert') return require('./selftest').main(url, argv);
  if (argv.length !== 3 || !/^\d{1,15}$/.test(argv[2])) {
    throw new Error('usage: orders.js KEY CUSTOMER AMOUNT | orders.js --self-test');
  }
  const pool = connect(url, 1);
  try {
    await setup(pool);
    const answer = await createOrder(pool, argv[0], { customer: argv[1], amount: Number(argv[2]) });
    console.log(answer.toString());
  } finally {
    await pool.end();
  }
}

module.exports = {
  CREDIT_LIMIT, Conflict, Failed, InProgress, LeaseLost, chargeCard, claim, commit, connect, createOrder, insertOrder,
  setup,
};

if (require.main === module) {
  main(process.argv.slice(2)).catch((error) => {
    console.error(`${error.constructor.name}: ${error.message}`);
    process.exitCode = 1;
  });
}
