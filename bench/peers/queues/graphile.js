// graphile-worker: `node graphile.js add URL JOBS` enqueues by its `addJobs`, in batches of 500 on 2 connections;
// `node graphile.js work URL` works until the queue is empty. Prints one line of JSON: milliseconds and memory.
const { Logger, run, makeWorkerUtils } = require("graphile-worker");
const { Pool } = require("pg");

const [, , verb, url, count] = process.argv;
const BATCH = 500;
const payload = { customer: "c-1234567890", note: "please deliver in the morning, ring twice" };

async function add() {
  const pool = new Pool({ connectionString: url, max: 2 });
  const utils = await makeWorkerUtils({ pgPool: pool });
  await utils.migrate();
  const specs = Array.from({ length: BATCH }, () => ({ identifier: "noop", payload }));
  await utils.addJobs([]);
  const started = process.hrtime.bigint();
  let left = Number(count) / BATCH;
  const lane = async () => {
    while (left-- > 0) await utils.addJobs(specs);
  };
  await Promise.all([lane(), lane()]);
  tell(started);
  await utils.release();
  await pool.end();
}

async function work() {
  const pool = new Pool({ connectionString: url, max: 1 });
  const started = process.hrtime.bigint();
  const runner = await run({
    connectionString: url,
    taskList: { noop: async () => {} },
    noHandleSignals: true,
    logger: new Logger(() => () => {}),
    preset: {
      worker: {
        connectionString: url,
        concurrentJobs: 24,
        maxPoolSize: 4,
        pollInterval: 100,
        localQueue: { size: 500 },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    },
  });
  for (;;) {
    const { rows } = await pool.query("SELECT EXISTS (SELECT FROM graphile_worker._private_jobs) AS more");
    if (!rows[0].more) break;
    await new Promise((done) => setTimeout(done, 5));
  }
  tell(started);
  await runner.stop();
  await pool.end();
}

function tell(started) {
  const ms = Number(process.hrtime.bigint() - started) / 1e6;
  process.stdout.write(JSON.stringify({ ms, rss_mb: process.memoryUsage().rss / 1048576 }) + "\n");
}

(verb === "add" ? add() : work()).then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
