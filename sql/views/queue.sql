-- What operators ask about jobs. Payloads and results are not shown; ids and keys are.

CREATE OR REPLACE VIEW once.queues AS
SELECT nullif(q.queue, '') AS queue, q.attempts_max, q.backoff, q.backoff_max, q.lease, q.running_max, q.key_running_max,
       q.unique_scope::text AS unique_scope, q.unique_window, coalesce(q.keep::text, 'none') AS keep, q.updated_at,
       q.queue = '' AS is_default
FROM once.queue q;

-- The one place that says what a job is to users: ready, parked, delayed or running.
CREATE OR REPLACE VIEW once.jobs AS
SELECT j.id, q.queue, j.tenant,
       CASE WHEN j.claim_id IS NOT NULL THEN 'running' WHEN j.state = 'retrying' THEN 'delayed' ELSE j.state::text END AS state,
       j.priority, j.attempts, j.attempts_max, j.key, j.unique_key,
       j.enqueued_at, j.available_at, j.leased_until, j.claim_id, j.worker, j.cancel AS asked_to_stop, j.last_error,
       pg_column_size(j.payload) AS payload_bytes
FROM once.job j JOIN once.queue q ON q.id = j.queue;

CREATE OR REPLACE VIEW once.jobs_ended AS
SELECT e.id, q.queue, e.tenant, e.state::text AS state, e.priority, e.attempts, e.attempts_max, e.key, e.unique_key,
       e.enqueued_at, e.ended_at, e.expires_at, e.worker, e.last_error, e.result IS NOT NULL AS has_result
FROM once.job_ended e JOIN once.queue q ON q.id = e.queue;

CREATE OR REPLACE VIEW once.jobs_buried AS
SELECT e.id, q.queue, e.tenant, e.attempts, e.key, e.unique_key, e.enqueued_at, e.ended_at AS buried_at, e.worker, e.last_error
FROM once.job_ended e JOIN once.queue q ON q.id = e.queue WHERE e.state = 'buried';

CREATE OR REPLACE VIEW once.queue_status AS
SELECT q.queue, s.state, s.jobs, s.oldest_at, once.clock() - s.oldest_at AS oldest_age
FROM once.queue q JOIN (
    SELECT j.queue, j.state, count(*) AS jobs, min(j.enqueued_at) AS oldest_at FROM once.jobs j GROUP BY j.queue, j.state
    UNION ALL
    SELECT e.queue, e.state, count(*), min(e.ended_at) FROM once.jobs_ended e GROUP BY e.queue, e.state) s ON s.queue = q.queue;

CREATE OR REPLACE VIEW once.schedules AS
SELECT s.schedule, s.queue, s.cron, s.timezone, s.priority, s.attempts_max, s.key, s.tenant, s.missed, s.paused, s.next_at,
       s.last_at, s.last_job, s.last_error, s.updated_at
FROM once.schedule s;
