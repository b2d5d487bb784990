-- Jobs: what is to be done, by whom, under which fence. See docs/guides/queue.md.

-- In which line a job stands, and so in which index it is found. delayed: for later, and not begun yet; retrying: after an
-- attempt. A job that runs is in the line running, or, where it was just taken and nothing needs to count it, in ready
-- still: its claim id says so, and its row is changed without any index. The view once.jobs tells what users see.
CREATE TYPE once.job_state AS ENUM ('ready', 'parked', 'delayed', 'retrying', 'running');
CREATE TYPE once.job_end AS ENUM ('succeeded', 'buried', 'cancelled');
CREATE TYPE once.unique_scope AS ENUM ('waiting', 'alive', 'window');

-- One row a queue, made by its first job or by once.define_queue. Its number keeps jobs, and their indexes, narrow. The row
-- with the empty name holds the defaults, so that they are in one place: here.
CREATE TABLE once.queue (
    id              int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue           text COLLATE "C" NOT NULL UNIQUE CHECK (octet_length(queue) <= 128),
    attempts_max    int NOT NULL DEFAULT 10,
    backoff         interval NOT NULL DEFAULT '1 second',
    backoff_max     interval NOT NULL DEFAULT '5 minutes',
    lease           interval NOT NULL DEFAULT '30 seconds',
    running_max     int,                                    -- NULL: no limit
    key_running_max int NOT NULL DEFAULT 1,
    unique_scope    once.unique_scope NOT NULL DEFAULT 'alive',
    unique_window   interval NOT NULL DEFAULT '1 hour',
    keep            interval,                               -- NULL: a success without a result leaves nothing
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO once.queue (queue) VALUES ('');

-- Ids, and the order of jobs. No cache: a session's kept numbers would come long after others were taken.
CREATE SEQUENCE once.job_id CACHE 1;

-- The jobs that are alive. What has ended leaves: a plain success is deleted, the rest moves to once.job_ended.
-- Lengths are checked by once.check_job; a CHECK for each would be evaluated at every step of every job.
CREATE TABLE once.job (
    -- What is never NULL first, and of a fixed length: PostgreSQL then finds it without walking through the row.
    id            bigint NOT NULL,
    position      bigint NOT NULL,               -- the order among the ready; a key's order is by id
    enqueued_at   timestamptz NOT NULL,
    queue         int NOT NULL,
    priority      int NOT NULL DEFAULT 0,
    attempts      int NOT NULL DEFAULT 0,        -- counted when it is taken
    attempts_max  int NOT NULL,
    state         once.job_state NOT NULL,
    cancel        boolean NOT NULL DEFAULT false, -- it runs, and is asked to stop
    unique_scope  once.unique_scope,
    available_at  timestamptz,                   -- delayed, retrying: until when
    leased_until  timestamptz,                   -- it runs: until when
    rescue_at     timestamptz,                   -- the same, for the index, in the line running
    claim_id      uuid,                          -- it runs: the fence of the take
    tenant        text COLLATE "C" NOT NULL,
    key           text COLLATE "C",
    unique_key    text COLLATE "C",
    worker        text,
    last_error    text,
    payload       jsonb NOT NULL,
    CONSTRAINT job_pkey PRIMARY KEY (id),
    -- The state machine's shape: a lease and a fence belong to those that run, a date to those that are for later.
    CONSTRAINT job_shape CHECK (
        CASE WHEN claim_id IS NULL THEN leased_until IS NULL AND state <> 'running' AND NOT cancel
             ELSE leased_until IS NOT NULL AND (state = 'running' OR state = 'ready' AND key IS NULL) END
        AND (state = 'running') = (rescue_at IS NOT NULL)
        AND (state IN ('delayed', 'retrying')) = (available_at IS NOT NULL))
) WITH (fillfactor = 45, -- room on its page for the version that a take makes: then no index is touched
        autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
        -- Space is used again and the file keeps its length: cutting it would lock out readers.
        vacuum_truncate = off);
-- Take walks this,
CREATE INDEX job_ready ON once.job (queue, priority DESC, position, id) WHERE state = 'ready';
-- promotion this,
CREATE INDEX job_delayed ON once.job (queue, available_at) WHERE available_at IS NOT NULL;
-- and rescue, and the limit of a queue, this. (No index may name what a take changes: attempts, claim_id, leased_until.)
CREATE INDEX job_running ON once.job (queue, rescue_at) WHERE state = 'running';
-- Whose turn it is in a key: those that stand before others. A job that was enqueued for later does not, until it is due.
CREATE INDEX job_key ON once.job (queue, tenant, key, id)
    WHERE key IS NOT NULL AND state <> 'delayed';
CREATE INDEX job_key_running ON once.job (queue, tenant, key) WHERE key IS NOT NULL AND state = 'running';
CREATE INDEX job_key_parked ON once.job (queue, tenant, key, id) WHERE state = 'parked';

-- What was taken and is in the line ready still: when its lease is over, one look finds what became of it. A heartbeat
-- moves a job to the line running, and rescue finds it there.
CREATE TABLE once.job_take (
    queue    int NOT NULL,
    until    timestamptz NOT NULL,
    claim_id uuid NOT NULL,
    ids      int8multirange NOT NULL,
    PRIMARY KEY (queue, until, claim_id)
);

-- Who has a unique key, and until when (NULL: until its job is taken, or has ended).
CREATE TABLE once.job_unique (
    job_id     bigint NOT NULL,
    until      timestamptz,
    queue      int NOT NULL,
    tenant     text COLLATE "C" NOT NULL,
    unique_key text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue, tenant, unique_key)
);
CREATE INDEX job_unique_until ON once.job_unique (until) WHERE until IS NOT NULL;

-- Keys whose parked jobs somebody must look at: written by whoever could not do it itself. Only added to and removed from.
CREATE TABLE once.job_wake (
    id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue  int NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL
);
CREATE INDEX job_wake_queue ON once.job_wake (queue, id);

-- Where a look may begin. Index entries of jobs that are gone stay for as long as any transaction is open anywhere in the
-- database; a take that began at the first of them would walk over all. Only hints: a look from the beginning follows
-- about every second, for whoever committed late. Written about once a second a queue, for their old versions stay, too.
CREATE TABLE once.queue_mark (
    queue     int PRIMARY KEY,
    kept_at   timestamptz NOT NULL DEFAULT '-infinity', -- the last upkeep
    looked_at timestamptz NOT NULL DEFAULT '-infinity', -- the last look from the beginning
    look_ms   int NOT NULL DEFAULT 0,                   -- how long it took: the longer, the rarer
    due_low   timestamptz NOT NULL DEFAULT '-infinity',
    lease_low timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);
CREATE TABLE once.queue_hint (
    queue    int NOT NULL,
    priority int NOT NULL,
    low      bigint NOT NULL,
    PRIMARY KEY (queue, priority)
) WITH (fillfactor = 50);

CREATE TABLE once.job_ended (
    id          bigint PRIMARY KEY,
    ended_at    timestamptz NOT NULL,
    expires_at  timestamptz,                     -- NULL: kept until somebody decides
    enqueued_at timestamptz NOT NULL,
    queue       int NOT NULL,
    priority    int NOT NULL,
    attempts    int NOT NULL,
    attempts_max int NOT NULL,
    state       once.job_end NOT NULL,
    tenant      text COLLATE "C" NOT NULL,
    key         text COLLATE "C",
    unique_key  text COLLATE "C",
    worker      text,
    last_error  text,
    payload     jsonb NOT NULL,
    result      jsonb
);
CREATE INDEX job_ended_expiry ON once.job_ended (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX job_ended_queue ON once.job_ended (queue, state, id);

-- What is enqueued at set times. The next time is computed by workers, and moved by compare-and-set.
CREATE TABLE once.schedule (
    schedule     text COLLATE "C" PRIMARY KEY CHECK (octet_length(schedule) BETWEEN 1 AND 128),
    queue        text COLLATE "C" NOT NULL,
    cron         text NOT NULL,
    timezone     text NOT NULL,
    payload      jsonb NOT NULL,
    priority     int NOT NULL,
    attempts_max int,
    key          text COLLATE "C",
    tenant       text COLLATE "C" NOT NULL,
    missed       text NOT NULL CHECK (missed IN ('one', 'skip')),
    paused       boolean NOT NULL DEFAULT false,
    revision     int NOT NULL DEFAULT 1,         -- moved by every change: a worker that computed by an older rule loses
    next_at      timestamptz,                    -- NULL: to be computed
    last_at      timestamptz,
    last_job     bigint,
    last_error   text,                           -- why no next time could be computed
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX schedule_next ON once.schedule (next_at);
