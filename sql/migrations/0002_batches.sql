-- What the set-based forms of claim, peek, succeed and renew answer: one row an intent.

-- once.claim_result with its place in the batch, and what would have been raised for it alone.
CREATE TYPE once.claim_answer AS (
    ordinal          int,
    error            text,                       -- a SQLSTATE; NULL: none
    message          text,
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
    lease_ms         bigint,
    expires_in_ms    bigint                      -- until expires_at, by the database's clock
);

CREATE TYPE once.completion_answer AS (
    ordinal          int,
    verdict          text,                       -- recorded, before, lost, busy, too_large
    status           text,                       -- before: what the row says, and its outcome below
    response_code    int,
    response_headers jsonb,
    response_body    bytea,
    result_type      text,
    result_id        text,
    failure_code     text,
    failure_message  text,
    expires_in_ms    bigint
);

CREATE TYPE once.renewal_answer AS (
    ordinal          int,
    verdict          text,                       -- renewed, settled, busy, lost
    locked_until     timestamptz,
    lease_ms         bigint
);

-- These take more parameters from here on; without this the old forms would stay beside the new ones.
DROP FUNCTION IF EXISTS once.claim_any(text, text, bytea, text, text, interval, interval, text);
DROP FUNCTION IF EXISTS once.own(once.intent, once.scope, text, text, text, bytea, bigint, text);
DROP FUNCTION IF EXISTS once.own_existing(once.intent, once.scope, text);
DROP FUNCTION IF EXISTS once.sort_stale(once.intent, once.scope, text);
