-- How many jobs of a queue are in which state, and how old the oldest is: for metrics. Reads every live job of it.
CREATE OR REPLACE FUNCTION once.count_jobs(p_queue text)
RETURNS TABLE (state text, jobs bigint, oldest_seconds float8)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT n.state, count(j.id), coalesce(extract(epoch FROM once.clock() - min(j.enqueued_at)), 0)::float8
    FROM once.queue q CROSS JOIN unnest('{ready,parked,delayed,running}'::text[]) n (state)
    LEFT JOIN once.jobs j ON j.queue = q.queue AND j.state = n.state
    WHERE q.queue = p_queue GROUP BY n.state
    UNION ALL
    SELECT 'buried', count(*), coalesce(extract(epoch FROM once.clock() - min(e.ended_at)), 0)::float8
    FROM once.queue q JOIN once.job_ended e ON e.queue = q.id AND e.state = 'buried' WHERE q.queue = p_queue;
END $$;
