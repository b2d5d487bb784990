-- The straight path of once.emit as one statement, for callers with the role once_direct. The caller has checked the
-- limits and derived the id. No row added: the id is in the log already; once.emit then says whether that is the same
-- message. Held equal to once.emit by the contract suite.
-- $1 topic, $2 type, $3 payload, $4 ordering key, $5 aggregate type, $6 its id, $7 its version, $8 headers, $9 scope,
-- $10 key, $11 message id, $12 tenant.
INSERT INTO once.outbox (segment, position, xid, at, message_id, aggregate_version, tenant, topic, type, ordering_key,
    aggregate_type, aggregate_id, scope, key, headers, payload)
SELECT (p.position >> 40) & 15, p.position, pg_current_xact_id(), once.clock(), $11, $7, $12, $1, $2, $4, $5, $6, $9, $10, $8, $3
FROM (SELECT nextval('once.outbox_position') AS position OFFSET 0) p
WHERE pg_column_size($3::jsonb) <= 16777216
ON CONFLICT DO NOTHING
