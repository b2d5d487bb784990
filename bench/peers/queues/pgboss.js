// pg-boss: `node pgboss.js add URL JOBS` enqueues in bulk, `node pgboss.js work URL` fetches and completes in batches of 500
// until the queue is empty, both on 2 connections' worth of concurrency. Prints one line of JSON: milliseconds and memory.
const PgBoss = require("pg-boss");

const [, , verb, url, count] = process.argv;
const BATCH = 500;
const data = { customer: "c-1234567890", note: "please deliver in the morning, ring twice" };

async function main() {
  const boss = new PgBoss({ connectionString: url, max: 2, supervise: false, schedule: false });
  boss.on("error", (error) => console.error(error));
  await boss.start();
  await boss.createQueue("noop");
  const started = process.hrtime.bigint();
  let left = Number(count) / BATCH;
  const lane = async () => {
    if (verb === "add") {
      const jobs = Array.from({ length: BATCH }, () => ({ name: "noop", data }));
      while (left-- > 0) await boss.insert(jobs);
      return;
    }
    for (;;) {
      const jobs = await boss.fetch("noop", { batchSize: BATCH });
      if (jobs.length === 0) return;
      await boss.complete("noop", jobs.map((job) => job.id));
    }
  };
  await Promise.all([lane(), lane()]);
  const ms = Number(process.hrtime.bigint() - started) / 1e6;
  process.stdout.write(JSON.stringify({ ms, rss_mb: process.memoryUsage().rss / 1048576 }) + "\n");
  await boss.stop({ graceful: false });
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
