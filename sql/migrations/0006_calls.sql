-- Calls of other people's systems: what was asked for, whether they did it, and how we know. See docs/guides/calls.md.

CREATE TYPE once.call_state AS ENUM ('requested', 'sent', 'unknown', 'confirmed', 'failed', 'escalated');

-- One row a provider; the row with the empty name holds the defaults, so that they are in one place: this INSERT.
-- No secret is here: header_env names variables in the worker's environment.
CREATE TABLE once.provider (
    provider         text COLLATE "C" PRIMARY KEY CHECK (octet_length(provider) <= 128),
    base_url         text,                               -- NULL: served by workers that bring code of their own
    key_header       text NOT NULL DEFAULT 'Idempotency-Key',
    header_env       jsonb NOT NULL DEFAULT '{}',
    timeout          interval NOT NULL DEFAULT '10 seconds',
    grace            interval NOT NULL DEFAULT '10 seconds', -- a lease is timeout and grace
    resend           boolean NOT NULL DEFAULT false,     -- whether the provider knows a call by our key
    accepted         text NOT NULL DEFAULT 'pending' CHECK (accepted IN ('pending', 'confirmed')),
    server_error     text NOT NULL DEFAULT 'unknown' CHECK (server_error IN ('unknown', 'not_done')),
    verify_failed    boolean NOT NULL DEFAULT false,
    reference        text,                               -- where an answer's JSON has the provider's own id
    reconcile        text NOT NULL DEFAULT 'none' CHECK (reconcile IN ('none', 'http', 'sql', 'worker')),
    reconcile_rule   jsonb,
    absent           text NOT NULL DEFAULT 'escalate' CHECK (absent IN ('escalate', 'failed', 'resend')),
    absent_after     interval,
    on_settled       text,
    attempts_max     int NOT NULL DEFAULT 10,
    backoff          interval NOT NULL DEFAULT '1 second',
    backoff_max      interval NOT NULL DEFAULT '5 minutes',
    reconcile_after  interval NOT NULL DEFAULT '5 seconds',
    escalate_after   interval NOT NULL DEFAULT '1 day',
    rate_per_second  int,                                -- NULL: no limit
    breaker_failures int NOT NULL DEFAULT 5,
    breaker_open_for interval NOT NULL DEFAULT '30 seconds',
    retention        interval DEFAULT '90 days',         -- of calls that are settled; NULL: permanent
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO once.provider (provider) VALUES ('');

-- What all workers share of a provider: how much it takes, whether it wants to be left alone, whether it is away.
CREATE TABLE once.provider_state (
    provider     text COLLATE "C" PRIMARY KEY REFERENCES once.provider ON DELETE CASCADE,
    tokens       double precision NOT NULL DEFAULT 1,
    refilled_at  timestamptz NOT NULL,
    paused_until timestamptz,
    failures     int NOT NULL DEFAULT 0,
    opened_until timestamptz                             -- the breaker is open; afterwards one call is let through
) WITH (fillfactor = 50);

CREATE TABLE once.call (
    id            uuid PRIMARY KEY,                      -- also the provider's idempotency key
    state         once.call_state NOT NULL DEFAULT 'requested',
    doubted       boolean NOT NULL DEFAULT false,        -- an earlier send may have reached the provider
    contradicted  boolean NOT NULL DEFAULT false,        -- two things were said that cannot both be true
    attempts      int NOT NULL DEFAULT 0,                -- sends
    asked         int NOT NULL DEFAULT 0,                -- questions what became of it
    ordinal       int NOT NULL,
    requested_at  timestamptz NOT NULL,
    next_at       timestamptz NOT NULL,                  -- when it is sent or asked about next
    sent_at       timestamptz,                           -- the last time: committed before a byte went out
    unknown_since timestamptz,
    settled_at    timestamptz,
    leased_until  timestamptz,
    claim_id      uuid,                                  -- the fence of the last take
    settled_as    once.call_state,                       -- the verdict that on_settled was called with last
    provider      varchar(128) COLLATE "C" NOT NULL,
    operation     varchar(128) COLLATE "C" NOT NULL,
    tenant        varchar(255) COLLATE "C" NOT NULL,
    scope         varchar(128) COLLATE "C",              -- the intent that asked for it
    key           varchar(255) COLLATE "C",
    method        varchar(10) NOT NULL,
    path          text NOT NULL,
    headers       jsonb,
    content_type  text,
    body          bytea,                                 -- bytes, never jsonb: what is sent again is the same
    request_hash  bytea NOT NULL,
    worker        text,
    reference     text COLLATE "C",                      -- the provider's own id for it
    last_note     text,
    -- The state machine's shape: a lease belongs to who sends or asks, an end to what has ended.
    CONSTRAINT call_shape CHECK (
        (leased_until IS NULL OR state IN ('sent', 'unknown'))
        AND (state <> 'sent' OR (leased_until IS NOT NULL AND claim_id IS NOT NULL AND sent_at IS NOT NULL))
        AND (state IN ('confirmed', 'failed')) = (settled_at IS NOT NULL)
        AND (state NOT IN ('confirmed', 'failed') OR settled_as = state)
        AND (state <> 'unknown' OR unknown_since IS NOT NULL))
) WITH (fillfactor = 80);
CREATE INDEX call_due ON once.call (provider, next_at) WHERE state = 'requested';
CREATE INDEX call_sent ON once.call (provider, leased_until) WHERE state = 'sent';
CREATE INDEX call_unknown ON once.call (provider, next_at) WHERE state = 'unknown';
CREATE INDEX call_escalated ON once.call (provider) WHERE state = 'escalated';
CREATE INDEX call_reference ON once.call (provider, reference) WHERE reference IS NOT NULL;
CREATE INDEX call_intent ON once.call (tenant, scope, key) WHERE key IS NOT NULL;
CREATE INDEX call_ended ON once.call (settled_at) WHERE settled_at IS NOT NULL;

-- What was said about a call, by whom, and what it was taken for. Only ever added to; goes with its call.
CREATE TABLE once.call_evidence (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    call_id uuid NOT NULL REFERENCES once.call ON DELETE CASCADE,
    at      timestamptz NOT NULL,
    kind    text NOT NULL CHECK (kind IN ('answer', 'asked', 'notice', 'operator', 'clock')),
    source  text,                                        -- the worker, the notice, the operator
    verdict text NOT NULL,
    state   once.call_state NOT NULL,                    -- what the call became by it
    code    int,
    headers jsonb,
    body    bytea,
    note    text
);
CREATE INDEX call_evidence_call ON once.call_evidence (call_id, id);

-- What providers told by themselves, each once. Without a call: it came before the call's own state was ready, or is
-- about something that is not ours.
CREATE TABLE once.call_notice (
    provider     text COLLATE "C" NOT NULL,
    notice_id    varchar(255) COLLATE "C" NOT NULL,
    received_at  timestamptz NOT NULL,
    look_at      timestamptz NOT NULL,                   -- without a call: when to look for it again
    looked       int NOT NULL DEFAULT 0,
    call_id      uuid REFERENCES once.call ON DELETE CASCADE,
    provider_key text COLLATE "C",
    reference    text COLLATE "C",
    verdict      text NOT NULL CHECK (verdict IN ('confirmed', 'failed', 'pending')),
    content_hash bytea NOT NULL,
    body         bytea,
    PRIMARY KEY (provider, notice_id),
    CHECK (provider_key IS NOT NULL OR reference IS NOT NULL)
);
CREATE INDEX call_notice_key ON once.call_notice (provider, provider_key) WHERE call_id IS NULL AND provider_key IS NOT NULL;
CREATE INDEX call_notice_reference ON once.call_notice (provider, reference) WHERE call_id IS NULL AND reference IS NOT NULL;
CREATE INDEX call_notice_look ON once.call_notice (look_at) WHERE call_id IS NULL;
CREATE INDEX call_notice_call ON once.call_notice (call_id) WHERE call_id IS NOT NULL;
