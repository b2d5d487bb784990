-- Hands out messages, oldest first, each under a lease and with a claim id that every later word about it must carry.
-- Attempts are counted here, before anything can go wrong: a message that kills its worker is counted too, and one whose
-- attempts are used up becomes failed_final in place of being handed out again. What a vanished worker held is taken
-- over when its lease has ended. Of one ordering key only the first message is handed out: once.inbox_pick says which.
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
        INTO v_taken, v_leases, v_spent FROM once.inbox_pick(p_consumer, p_tenant, p_limit, p_lease) d;
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
