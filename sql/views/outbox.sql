-- What operators ask about the outbox.
CREATE OR REPLACE VIEW once.sinks AS
SELECT s.sink, s.topics, s.types, s.tenants, s.disabled, g.messages AS lag_messages, g.seconds AS lag_seconds,
       g.failing, g.parked, g.behind,
       (SELECT count(*) FROM once.relay r WHERE r.sink = s.sink AND r.seen_until > once.clock()) AS relays,
       (SELECT max(l.updated_at) FROM once.lane l WHERE l.sink = s.sink) AS moved_at, s.created_at
FROM once.sink s, once.sink_lag(s.sink) g;

CREATE OR REPLACE VIEW once.outbox_parked AS
SELECT h.sink, h.position, h.message_id, h.tenant, h.message ->> 'topic' AS topic, h.message ->> 'type' AS type, h.lane_key,
       h.state, h.attempts, h.last_error, h.held_at, h.next_at,
       (SELECT count(*) FROM once.held b WHERE b.sink = h.sink AND b.tenant = h.tenant AND b.lane_key = h.lane_key AND b.state = 'behind') AS behind
FROM once.held h WHERE h.state IN ('failing', 'parked');

CREATE OR REPLACE VIEW once.outbox_segments AS
SELECT c.relname AS segment, pg_total_relation_size(c.oid) AS bytes, greatest(c.reltuples, 0)::bigint AS rows_estimated,
       c.relname = 'outbox_' || ((SELECT p.last_value >> 40 FROM once.outbox_position p) & 15) AS current
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid
WHERE i.inhparent = 'once.outbox'::regclass;

CREATE OR REPLACE VIEW once.outbox_replays AS
SELECT r.id, r.sink, r.actor, r.reason, r.selection, r.rate, r.sent, r.position, r.upto, r.asked_at, r.finished_at, r.leased_until
FROM once.outbox_replay r;

CREATE OR REPLACE VIEW once.outbox_log AS
SELECT o.position, o.message_id, o.at, o.tenant, o.topic, o.type, o.ordering_key, o.aggregate_type, o.aggregate_id,
       o.aggregate_version, o.scope, o.key, o.headers, o.payload
FROM once.outbox o;
