-- The monthly partition of once.intent_history for a time, made if it is not there. DateStyle is pinned: the
-- bounds go through text, and other styles write zones by abbreviations that read back as other zones.
CREATE OR REPLACE FUNCTION once.ensure_history_partition(p_at timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE SET datestyle = 'ISO' AS $$
DECLARE
    v_month date := date_trunc('month', p_at AT TIME ZONE 'UTC')::date;
    v_name text := 'intent_history_' || to_char(v_month, 'YYYY_MM');
BEGIN
    IF to_regclass('once.' || v_name) IS NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended(v_name, 5521)); -- two purges at a month's turn
        EXECUTE format('CREATE TABLE IF NOT EXISTS once.%I PARTITION OF once.intent_history FOR VALUES FROM (%L) TO (%L)',
            v_name, v_month::timestamp AT TIME ZONE 'UTC', (v_month + interval '1 month') AT TIME ZONE 'UTC');
    END IF;
END $$;
