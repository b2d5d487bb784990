-- Records that an attempt failed: call it after the rollback, in a transaction of its own. Retryable: again after
-- p_delay, or after a random pause up to the consumer's backoff, doubled with every attempt. Not retryable, or the
-- attempts are used up: failed_final. Returns the new state.
CREATE OR REPLACE FUNCTION once.inbox_fail(
    p_id bigint, p_claim_id uuid, p_retryable boolean, p_error text, p_delay interval DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_message once.inbox;
    v_policy once.consumer;
BEGIN
    PERFORM once.check_flags(p_retryable);
    SELECT * INTO v_message FROM once.inbox m
        WHERE m.id = p_id AND m.claim_id = p_claim_id AND m.state = 'processing' FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM once.inbox_lost();
    END IF;
    IF p_delay NOT BETWEEN interval '0' AND interval '100 days' THEN
        RAISE EXCEPTION 'delay out of range' USING ERRCODE = 'P4020', HINT = 'A delay is 0 to 100 days.';
    END IF;
    SELECT * INTO v_policy FROM once.consumer_policy(v_message.tenant, v_message.consumer);
    IF p_retryable IS TRUE AND v_message.attempts < v_policy.attempts_max THEN
        UPDATE once.inbox m SET state = 'failed_retryable', leased_until = NULL, last_error = left(p_error, 2000),
            next_at = once.clock() + coalesce(p_delay, random() * least(v_policy.backoff_max,
                v_policy.backoff * power(2, least(v_message.attempts - 1, 30))))
        WHERE m.id = p_id;
        RETURN 'failed_retryable';
    END IF;
    UPDATE once.inbox m SET state = 'failed_final', result = 'failed_final', leased_until = NULL, finished_at = once.clock(),
        last_error = left(CASE WHEN p_retryable IS TRUE THEN format('poison: %s attempts, none finished; last error: %s',
                                                                    m.attempts, p_error) ELSE p_error END, 2000)
    WHERE m.id = p_id;
    RETURN 'failed_final';
END $$;
