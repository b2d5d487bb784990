-- The place of a job that becomes ready again: its own, or the first that takes look at.
CREATE OR REPLACE FUNCTION once.front(p_queue int, p_priority int, p_position bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT greatest(p_position, (SELECT h.low FROM once.queue_hint h WHERE h.queue = p_queue AND h.priority = p_priority)) $$;
