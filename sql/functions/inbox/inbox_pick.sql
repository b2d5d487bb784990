-- Which messages a take may hand out, oldest first, locked: with the lease that they get, and whether their attempts are
-- used up. Of an ordering key, the first is the oldest message that is not processed (failed_final ones hold their key,
-- unless the consumer's on_poison is skip); where that one is a version of an entity, the earliest version stands in its
-- place: else a version that comes late could never fill its gap. And nobody may be at the key.
CREATE OR REPLACE FUNCTION once.inbox_pick(p_consumer text, p_tenant text, p_limit int, p_lease interval)
RETURNS TABLE (id bigint, lease interval, spent boolean) LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := once.clock();
BEGIN
    RETURN QUERY
    SELECT m.id, coalesce(p_lease, p.lease), m.attempts >= p.attempts_max
    FROM once.inbox m CROSS JOIN LATERAL once.consumer_policy(m.tenant, m.consumer) p
    LEFT JOIN LATERAL (
        SELECT f.id, f.entity, f.version FROM once.inbox f
        WHERE f.tenant = m.tenant AND f.consumer = m.consumer AND f.ordering_key = m.ordering_key
          AND f.state <> 'processed' AND (f.state <> 'failed_final' OR p.on_poison = 'block')
        ORDER BY f.id LIMIT 1) first ON m.ordering_key IS NOT NULL
    WHERE m.consumer = p_consumer AND (p_tenant IS NULL OR m.tenant = p_tenant)
      AND m.state IN ('received', 'failed_retryable', 'processing') AND coalesce(m.leased_until, m.next_at) <= v_now
      AND (m.ordering_key IS NULL OR (
          (m.id = first.id OR (m.entity = first.entity AND m.version < first.version))
          AND NOT EXISTS (
              SELECT 1 FROM once.inbox e
              WHERE e.tenant = m.tenant AND e.consumer = m.consumer AND e.entity = m.entity AND e.version < m.version
                AND e.ordering_key = m.ordering_key AND e.state <> 'processed'
                AND (e.state <> 'failed_final' OR p.on_poison = 'block'))
          AND NOT EXISTS (
              SELECT 1 FROM once.inbox o
              WHERE o.tenant = m.tenant AND o.consumer = m.consumer AND o.ordering_key = m.ordering_key
                AND o.state = 'processing' AND o.leased_until > v_now AND o.id <> m.id)))
    ORDER BY m.id LIMIT p_limit FOR UPDATE OF m SKIP LOCKED;
END $$;
