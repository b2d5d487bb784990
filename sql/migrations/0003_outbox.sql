-- The outbox: an append-only log, read by snapshot difference. See docs/decisions/0006-outbox.md.

-- Where the log lives. Its xids mean something only in the database that gave them: after a dump and restore the
-- numbers start anew, and every cursor would skip what is new. The relay compares, and refuses.
CREATE TABLE once.outbox_home (
    only_row          boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    system_identifier bigint NOT NULL,
    database_oid      oid NOT NULL,
    retention         interval NOT NULL DEFAULT '1 day' CHECK (retention >= interval '0'), -- kept for replay, once delivered
    rotated_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO once.outbox_home (system_identifier, database_oid)
SELECT c.system_identifier, d.oid FROM pg_control_system() c, pg_database d WHERE d.datname = current_database();

-- A position. Its high part is the turn: which segment it falls into. Rotation moves the sequence to the next turn,
-- so a message costs no look at which segment is the current one. CACHE 1: positions follow the order of emits.
CREATE SEQUENCE once.outbox_position AS bigint MINVALUE 0 START 0 CACHE 1;

-- Fixed-width columns first. Nothing here is ever updated or deleted; whole segments are truncated.
CREATE TABLE once.outbox (
    segment           smallint NOT NULL,
    position          bigint NOT NULL,           -- taken after the aggregate's row lock: commit order of an aggregate
    xid               xid8 NOT NULL,             -- the top transaction: what a snapshot can be asked about
    at                timestamptz NOT NULL,
    message_id        uuid NOT NULL,
    aggregate_version bigint,
    tenant            varchar(255) COLLATE "C" NOT NULL,
    topic             varchar(255) COLLATE "C" NOT NULL,
    type              varchar(255) COLLATE "C" NOT NULL,
    ordering_key      text COLLATE "C",
    aggregate_type    text COLLATE "C",
    aggregate_id      text COLLATE "C",
    scope             varchar(128) COLLATE "C",  -- the intent that emitted it
    key               varchar(255) COLLATE "C",
    headers           jsonb,
    payload           jsonb NOT NULL,
    -- The read: what a snapshot sees and the one before did not is a range of xids and a few single ones.
    CONSTRAINT outbox_pkey PRIMARY KEY (xid, position, segment),
    CONSTRAINT outbox_message UNIQUE (message_id, segment)
) PARTITION BY LIST (segment);
DO $$
BEGIN
    FOR v_segment IN 0..15 LOOP
        EXECUTE format('CREATE TABLE once.outbox_%s PARTITION OF once.outbox FOR VALUES IN (%s) WITH (autovacuum_vacuum_insert_scale_factor = 0.2)',
            v_segment, v_segment);
    END LOOP;
END $$;

-- A place that messages go to, and what it wants.
CREATE TABLE once.sink (
    sink       text COLLATE "C" PRIMARY KEY CHECK (octet_length(sink) BETWEEN 1 AND 255),
    topics     text[] NOT NULL DEFAULT '{}',     -- LIKE patterns; empty: all
    types      text[] NOT NULL DEFAULT '{}',
    tenants    text[] NOT NULL DEFAULT '{}',     -- exact; empty: all
    disabled   text,                             -- why its work stands still
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- A lane is a share of a sink's work, by hash of the ordering key: the unit that relays divide among them. Its cursor
-- is a snapshot: everything that it sees was delivered, refused into once.held, or not wanted. While a difference
-- is under way: up to which snapshot, and up to which position in it.
CREATE TABLE once.lane (
    sink         text COLLATE "C" NOT NULL REFERENCES once.sink ON DELETE CASCADE,
    lane         smallint NOT NULL,
    delivered    pg_snapshot NOT NULL DEFAULT '1:1:',
    target       pg_snapshot,
    position     bigint,
    owner        text,
    claim_id     uuid,
    leased_until timestamptz,
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (sink, lane),
    CHECK ((target IS NULL) = (position IS NULL))
);

-- Which relays are alive, and so how many lanes are each one's share.
CREATE TABLE once.relay (
    sink       text COLLATE "C" NOT NULL REFERENCES once.sink ON DELETE CASCADE,
    relay      text NOT NULL,
    seen_until timestamptz NOT NULL,
    PRIMARY KEY (sink, relay)
);

-- What a sink did not take: the message with its key's place in the queue behind it. A copy, so that the log can go on.
-- failing: tried again at next_at. parked: until somebody resumes it. Messages of the same key queue behind it.
CREATE TABLE once.held (
    sink         text COLLATE "C" NOT NULL REFERENCES once.sink ON DELETE CASCADE,
    position     bigint NOT NULL,
    lane         smallint NOT NULL,
    message_id   uuid NOT NULL,
    tenant       text COLLATE "C" NOT NULL,
    lane_key     text COLLATE "C" NOT NULL,      -- the ordering key, or the message's own id
    state        text NOT NULL CHECK (state IN ('failing', 'parked', 'behind')),
    attempts     int NOT NULL DEFAULT 0,
    next_at      timestamptz,
    last_error   text,
    held_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    message      jsonb NOT NULL,
    PRIMARY KEY (sink, position),
    CHECK ((state = 'failing') = (next_at IS NOT NULL))
);
CREATE INDEX held_key ON once.held (sink, tenant, lane_key, position);
CREATE INDEX held_due ON once.held (sink, lane, next_at) WHERE state = 'failing';

-- A replay that an operator asked for: what, to whom, why, and how far it has come.
CREATE TABLE once.outbox_replay (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sink          text COLLATE "C" NOT NULL REFERENCES once.sink ON DELETE CASCADE,
    actor         text NOT NULL,
    reason        text NOT NULL,
    selection     jsonb NOT NULL,
    rate          int CHECK (rate BETWEEN 1 AND 1000000), -- messages a second; NULL: as fast as the sink takes them
    upto          bigint NOT NULL,
    position      bigint NOT NULL DEFAULT -1,    -- delivered so far
    sent          bigint NOT NULL DEFAULT 0,
    asked_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at   timestamptz,
    owner         text,
    claim_id      uuid,
    leased_until  timestamptz
);
