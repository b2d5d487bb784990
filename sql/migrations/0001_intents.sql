-- The intent record and everything that describes it. See docs/reference/sql.md.
-- Times are the database's clock. Texts that identify something compare bytewise (COLLATE "C"):
-- cheaper, and the same on every machine whatever its locale library says.

CREATE TYPE once.intent_status AS ENUM
    ('processing', 'succeeded', 'failed_retryable', 'failed_final', 'uncertain');

-- One row a scope (and, where a tenant needs its own rules, a tenant). The row with the empty scope
-- holds the defaults, so that they are in one place: this INSERT.
CREATE TABLE once.scope (
    scope        text COLLATE "C" NOT NULL,
    tenant       text COLLATE "C" NOT NULL DEFAULT '',
    mode         text NOT NULL DEFAULT 'atomic' CHECK (mode IN ('atomic', 'leased')),
    retention    interval DEFAULT '7 days',      -- NULL: permanent; zero: no window at all
    tombstone    interval,                       -- NULL: none
    lease        interval NOT NULL DEFAULT '30 seconds',
    in_progress  text CHECK (in_progress IN ('wait', 'refuse', 'status')), -- NULL: atomic waits, leased refuses
    wait_max     interval NOT NULL DEFAULT '5 seconds',
    waiters_max  int NOT NULL DEFAULT 16 CHECK (waiters_max BETWEEN 0 AND 1000),
    stale        text NOT NULL DEFAULT 'hold' CHECK (stale IN ('rerun', 'probe', 'hold')),
    probe        text,
    response     text NOT NULL DEFAULT 'full' CHECK (response IN ('full', 'reference', 'status', 'error')),
    attempts_max int CHECK (attempts_max BETWEEN 1 AND 1000000),
    key_pattern  text,
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (scope, tenant),
    CHECK (octet_length(scope) <= 128 AND octet_length(tenant) <= 255),
    CHECK (stale <> 'probe' OR probe IS NOT NULL)
);
INSERT INTO once.scope (scope) VALUES ('');

-- Fixed-width columns first: a narrow row is what a protected write costs.
CREATE TABLE once.intent (
    claim_id         uuid NOT NULL,
    created_at       timestamptz NOT NULL,
    expires_at       timestamptz,                -- NULL: not terminal, or permanent
    status           once.intent_status NOT NULL,
    attempt_count    int NOT NULL,
    response_code    int,
    updated_at       timestamptz,                -- NULL: equal to created_at (written once)
    completed_at     timestamptz,                -- NULL on a terminal row: equal to created_at
    locked_until     timestamptz,
    tombstone_until  timestamptz,
    fence            bigint,                     -- leased claims: grows with every claim, for resources that can compare
    stripped         boolean NOT NULL DEFAULT false,
    tenant           varchar(255) COLLATE "C" NOT NULL,
    scope            varchar(128) COLLATE "C" NOT NULL,
    key              varchar(255) COLLATE "C" NOT NULL,
    fingerprint      bytea NOT NULL,
    result_type      text,
    result_id        text,
    response_headers jsonb,
    response_body    bytea,                      -- bytes, never jsonb: a replay is what was sent
    failure_code     text,
    failure_message  text,
    claimed_by       text,
    CONSTRAINT intent_pkey PRIMARY KEY (tenant, scope, key),
    -- PostgreSQL reads a CHECK anew for every INSERT, and a long one costs: so the lengths are in the types
    -- (once.check_intent counts bytes and says what is wrong), and the one CHECK is the state machine's
    -- shape: a lease belongs to processing, and only to it.
    CONSTRAINT intent_shape CHECK ((status = 'processing') = (locked_until IS NOT NULL))
);
-- Purge walks this, oldest first.
CREATE INDEX intent_expires_at ON once.intent (expires_at) WHERE expires_at IS NOT NULL;
-- Recovery and operators walk this: what is not over. Atomic rows are born terminal and never enter it;
-- renewals stay HOT, because the lease's end is in no index.
CREATE INDEX intent_open ON once.intent (status, created_at) WHERE status IN ('processing', 'uncertain');

CREATE SEQUENCE once.fence_seq;

-- What operators, recovery and takeovers did: never updated, never deleted by pgonce.
CREATE TABLE once.audit (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor       text NOT NULL,
    action      text NOT NULL,
    tenant      text COLLATE "C" NOT NULL,
    scope       text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    from_status text,
    to_status   text,
    from_claim  uuid,
    to_claim    uuid,
    reason      text
);
CREATE INDEX audit_intent ON once.audit (tenant, scope, key);

-- How often each kind of answer was given. A replay writes nothing by itself, so callers add up and
-- flush (once.tally); SQL callers that do not tally are not counted.
CREATE TABLE once.tally_day (
    day    date NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    scope  text COLLATE "C" NOT NULL,
    kind   text NOT NULL,
    count  bigint NOT NULL,
    PRIMARY KEY (day, tenant, scope, kind)
);

-- Sizes over time, sampled by purge at most once an hour: growth without scanning anything.
CREATE TABLE once.size_sample (
    at          timestamptz PRIMARY KEY,
    rows        bigint NOT NULL,
    table_bytes bigint NOT NULL,
    index_bytes bigint NOT NULL
);

-- What purge archived, by month of archiving. Partitions are made as they are needed.
CREATE TABLE once.intent_history (
    archived_at timestamptz NOT NULL,
    tenant      text COLLATE "C" NOT NULL,
    scope       text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    record      jsonb NOT NULL                   -- the row, bytea as hex
) PARTITION BY RANGE (archived_at);
CREATE INDEX intent_history_intent ON once.intent_history (tenant, scope, key);

CREATE TYPE once.claim_result AS (
    kind             text,
    claim_id         uuid,
    attempt_count    int,
    response_code    int,
    response_headers jsonb,
    response_body    bytea,
    result_type      text,
    result_id        text,
    failure_code     text,
    failure_message  text,
    locked_until     timestamptz,
    retry_after_ms   bigint,
    expires_at       timestamptz,
    fence            bigint,
    lease_ms         bigint
);
