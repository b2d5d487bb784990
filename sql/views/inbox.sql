-- What operators ask about inbound messages. Bodies are not shown; ids are.

CREATE OR REPLACE VIEW once.consumers AS
SELECT nullif(c.consumer, '') AS consumer, c.tenant, coalesce(c.retention::text, 'permanent') AS retention, c.attempts_max,
       c.backoff, c.backoff_max, c.gap_max, c.on_poison, c.lease, c.updated_at, c.consumer = '' AS is_default
FROM once.consumer c;

CREATE OR REPLACE VIEW once.admitted_messages AS
SELECT s.tenant, s.consumer, s.source, a.message_id, a.at, coalesce(a.result::text, 'applied') AS result,
       a.result_type, a.result_id, a.body_hash
FROM once.admitted a JOIN once.inbox_stream s ON s.id = a.stream;

CREATE OR REPLACE VIEW once.inbox_messages AS
SELECT m.id, m.tenant, m.consumer, m.source, m.message_id, m.state::text AS state, m.attempts, m.topic, m.type,
       m.ordering_key, m.entity, m.version, m.headers, m.content_type, octet_length(m.body) AS body_bytes, m.body_hash,
       m.next_at, m.leased_until, m.claim_id, m.worker, m.last_error, m.received_at, m.finished_at,
       m.result::text AS result, m.result_type, m.result_id
FROM once.inbox m;

CREATE OR REPLACE VIEW once.inbox_status AS
SELECT m.tenant, m.consumer, m.state::text AS state, count(*) AS messages, min(m.received_at) AS oldest_at,
       once.clock() - min(m.received_at) AS oldest_age
FROM once.inbox m GROUP BY m.tenant, m.consumer, m.state;

-- What does not go on by itself, or not soon, and how many messages of its ordering key stand behind it.
CREATE OR REPLACE VIEW once.inbox_parked AS
SELECT m.id, m.tenant, m.consumer, m.source, m.message_id, m.state::text AS state, m.attempts, m.last_error, m.type,
       m.ordering_key, m.entity, m.version, m.received_at, m.finished_at AS failed_at,
       CASE WHEN m.state = 'waiting' THEN m.next_at END AS waits_until,
       (SELECT count(*) FROM once.inbox o WHERE o.tenant = m.tenant AND o.consumer = m.consumer
            AND o.ordering_key = m.ordering_key AND o.id > m.id AND o.state <> 'processed') AS behind
FROM once.inbox m WHERE m.state IN ('failed_final', 'waiting');
