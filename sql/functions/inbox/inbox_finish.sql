-- Ends a message that this worker holds, in the transaction of its effect. A stale worker's call raises, and so takes
-- its effect back. Results: applied, ignored; with a reference to what it made.
CREATE OR REPLACE FUNCTION once.inbox_finish(
    p_id bigint, p_claim_id uuid, p_result text DEFAULT 'applied', p_result_type text DEFAULT NULL,
    p_result_id text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM once.check_result(p_result, p_result_type, p_result_id);
    IF p_result = 'failed_final' THEN
        RAISE EXCEPTION 'a message that failed is not finished' USING ERRCODE = 'P4020', HINT = 'Call once.inbox_fail.';
    END IF;
    UPDATE once.inbox m SET state = 'processed', finished_at = once.clock(), leased_until = NULL,
        result = p_result::once.message_result, result_type = p_result_type, result_id = p_result_id
    WHERE m.id = p_id AND m.claim_id = p_claim_id AND m.state = 'processing';
    IF NOT FOUND THEN
        PERFORM once.inbox_lost();
    END IF;
END $$;
