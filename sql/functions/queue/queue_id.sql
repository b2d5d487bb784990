-- The number of a queue, which gets its row by its first job. Two first jobs at once: the second waits for the first's
-- commit. Queues that were defined before need no waiting; so define them where many start at once.
CREATE OR REPLACE FUNCTION once.queue_id(p_queue text) RETURNS int LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_id int;
BEGIN
    LOOP
        SELECT q.id INTO v_id FROM once.queue q WHERE q.queue = p_queue AND p_queue <> '';
        IF FOUND THEN
            RETURN v_id;
        END IF;
        PERFORM once.check_queue('', p_queue);
        INSERT INTO once.queue (queue) VALUES (p_queue) ON CONFLICT DO NOTHING RETURNING id INTO v_id;
        IF FOUND THEN
            RETURN v_id;
        END IF;
    END LOOP;
END $$;
