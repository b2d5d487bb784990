-- Hands out messages, oldest first, each under a lease and with a claim id that every later word about it must carry.
-- Attempts are counted here, before anything can go wrong: a message that kills its worker is counted too, and one whose
-- attempts are used up becomes failed_final in place of being handed out again. What a vanished worker held is taken
-- over when its lease has ended. Of one ordering key only the oldest message that is not processed is handed out:
--   failed_final  holds its key, unless the consumer's on_poison is skip;
--   waiting       (for an earlier version) lets earlier versions of its own entity pass, and nothing else of its key.
-- p_tenant NULL: of every tenant. What others hold is skipped, never waited for.
CREATE OR REPLACE FUNCTION once.inbox_take(
    p_consumer text, p_worker text DEFAULT NULL, p_limit int DEFAULT 1, p_lease interval DEFAULT NULL,
    p_tenant text DEFAULT NULL)
RETURNS TABLE (id bigint, claim_id uuid, tenant text, source text, message_id text, topic text, type text,
               ordering_key text, entity text, version bigint, headers jsonb, content_type text, body bytea,
               attempts int, received_at timestamptz, leased_until timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_taken bigint[];
    v_leases interval[];
    v_spent bigint[];
BEGIN
    PERFORM once.check_stream(coalesce(p_tenant, ''), p_consumer, 'source');
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 OR octet_length(p_worker) > 255
       OR p_lease NOT BETWEEN interval '10 milliseconds' AND interval '1 day' THEN
        RAISE EXCEPTION 'limit, lease or worker out of range' USING ERRCODE = 'P4020',
            HINT = 'Take 1 to 1000 messages, for 10 ms to 1 day; a worker''s name has at most 255 bytes.';
    END IF;
    LOOP
        SELECT array_agg(d.id) FILTER (WHERE NOT d.spent), array_agg(d.lease) FILTER (WHERE NOT d.spent),
               array_agg(d.id) FILTER (WHERE d.spent)
        INTO v_taken, v_leases, v_spent FROM (
            SELECT m.id, coalesce(p_lease, p.lease) AS lease, m.attempts >= p.attempts_max AS spent
            FROM once.inbox m CROSS JOIN LATERAL once.consumer_policy(m.tenant, m.consumer) p
            WHERE m.consumer = p_consumer AND (p_tenant IS NULL OR m.tenant = p_tenant)
              AND m.state IN ('received', 'failed_retryable', 'processing')
              AND coalesce(m.leased_until, m.next_at) <= once.clock()
              AND (m.ordering_key IS NULL OR NOT EXISTS (
                  SELECT 1 FROM once.inbox o
                  WHERE o.tenant = m.tenant AND o.consumer = m.consumer AND o.ordering_key = m.ordering_key
                    AND o.id < m.id AND o.state <> 'processed'
                    AND NOT (o.state = 'failed_final' AND p.on_poison = 'skip')
                    AND (o.state = 'waiting' AND o.entity = m.entity AND o.version > m.version) IS NOT TRUE))
            ORDER BY m.id LIMIT p_limit FOR UPDATE OF m SKIP LOCKED) d;
        PERFORM once.inbox_bury(v_spent);
        EXIT WHEN v_taken IS NOT NULL OR v_spent IS NULL;
    END LOOP;
    RETURN QUERY
    WITH taken AS (
        UPDATE once.inbox m SET state = 'processing', attempts = m.attempts + 1, claim_id = gen_random_uuid(),
            worker = p_worker, leased_until = once.clock() + t.lease
        FROM unnest(v_taken, v_leases) t (id, lease) WHERE m.id = t.id
        RETURNING m.*
    )
    SELECT t.id, t.claim_id, t.tenant::text, t.source::text, t.message_id::text, t.topic, t.type, t.ordering_key, t.entity,
           t.version, t.headers, t.content_type, t.body, t.attempts, t.received_at, t.leased_until
    FROM taken t ORDER BY t.id;
END $$;
