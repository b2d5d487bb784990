-- Gives up messages whose attempts are used up (poison): the reason stays with them, and with their key.
CREATE OR REPLACE FUNCTION once.inbox_bury(p_ids bigint[]) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE once.inbox m SET state = 'failed_final', result = 'failed_final', finished_at = once.clock(), leased_until = NULL,
        last_error = left(format('poison: %s attempts, none finished; last error: %s', m.attempts,
            CASE WHEN m.state = 'processing' THEN 'none, the worker vanished' ELSE coalesce(m.last_error, 'none') END), 2000)
    WHERE m.id = ANY (p_ids);
END $$;
