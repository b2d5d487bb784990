-- The messages that are first in their ordering keys and due: at most p_limit. The first of a key is the oldest message that
-- is not processed (failed_final ones hold their key, unless the consumer's on_poison is skip); where that one is a version
-- of an entity, the earliest version stands in its place: else a version that comes late could never fill its gap. And
-- nobody may be at the key.
-- Goes from key to key by the index, a few looks a key, however long the keys' queues are. Keys that are not due cost their
-- looks, too: some thousands of them are some tens of milliseconds.
CREATE OR REPLACE FUNCTION once.inbox_heads(p_consumer text, p_tenant text, p_limit int, p_now timestamptz)
RETURNS bigint[] LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    v_head record;
    v_policy once.consumer;
    v_tenant text := coalesce(p_tenant, '');
    v_key text := ''; -- no message has it: once.check_stored
    v_found bigint[] := '{}';
BEGIN
    WHILE cardinality(v_found) < p_limit LOOP
        SELECT m.tenant, m.ordering_key, m.id, m.state, m.entity, m.version, coalesce(m.leased_until, m.next_at) AS due_at
            INTO v_head FROM once.inbox m
            WHERE m.consumer = p_consumer AND (m.tenant, m.ordering_key) > (v_tenant, v_key)
              AND m.ordering_key IS NOT NULL AND m.state <> 'processed'
            ORDER BY m.tenant, m.ordering_key, m.id LIMIT 1;
        EXIT WHEN NOT FOUND OR v_head.tenant <> p_tenant;
        IF v_policy.lease IS NULL OR v_head.tenant <> v_tenant THEN
            SELECT * INTO v_policy FROM once.consumer_policy(v_head.tenant, p_consumer);
        END IF;
        v_tenant := v_head.tenant;
        v_key := v_head.ordering_key;
        CONTINUE WHEN EXISTS (
            SELECT FROM once.inbox o WHERE o.tenant = v_tenant AND o.consumer = p_consumer AND o.ordering_key = v_key
               AND o.state = 'processing' AND o.leased_until > p_now);
        IF v_head.state = 'failed_final' AND v_policy.on_poison = 'skip' THEN
            SELECT m.id, m.state, m.entity, m.version, coalesce(m.leased_until, m.next_at) AS due_at INTO v_head
                FROM once.inbox m
                WHERE m.consumer = p_consumer AND m.tenant = v_tenant AND m.ordering_key = v_key
                  AND m.state NOT IN ('processed', 'failed_final')
                ORDER BY m.id LIMIT 1;
            CONTINUE WHEN NOT FOUND;
        END IF;
        IF v_head.version IS NOT NULL THEN
            SELECT m.id, m.state, coalesce(m.leased_until, m.next_at) AS due_at INTO v_head
                FROM once.inbox m
                WHERE m.tenant = v_tenant AND m.consumer = p_consumer AND m.entity = v_head.entity
                  AND m.version <= v_head.version AND m.version IS NOT NULL AND m.state <> 'processed'
                  AND m.ordering_key = v_key AND (m.state <> 'failed_final' OR v_policy.on_poison = 'block')
                ORDER BY m.version, m.id LIMIT 1;
        END IF;
        IF v_head.state IN ('received', 'failed_retryable', 'processing') AND v_head.due_at <= p_now THEN
            v_found := v_found || v_head.id;
        END IF;
    END LOOP;
    RETURN v_found;
END $$;
