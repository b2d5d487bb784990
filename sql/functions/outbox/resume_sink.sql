-- Lets a disabled sink work again, or forgets one that is not used any more (p_forget): then nothing is kept for it.
CREATE OR REPLACE FUNCTION once.resume_sink(p_sink text, p_actor text, p_reason text, p_forget boolean DEFAULT false)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM once.check_flags(p_forget);
    PERFORM once.check_operator(p_actor, p_reason);
    IF p_forget THEN
        DELETE FROM once.sink s WHERE s.sink = p_sink
            AND NOT EXISTS (SELECT FROM once.relay r WHERE r.sink = s.sink AND r.seen_until > once.clock());
    ELSE
        UPDATE once.sink s SET disabled = NULL WHERE s.sink = p_sink AND s.disabled IS NOT NULL;
    END IF;
    IF FOUND THEN
        INSERT INTO once.audit (actor, action, tenant, scope, key, reason)
        VALUES (p_actor, CASE WHEN p_forget THEN 'outbox:forget_sink' ELSE 'outbox:resume_sink' END, '', 'outbox', p_sink, p_reason);
        RETURN true;
    END IF;
    RETURN false;
END $$;
