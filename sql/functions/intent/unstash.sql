-- Takes a spent or released claim out of the transaction's stash: its id opens nothing any more.
CREATE OR REPLACE FUNCTION once.unstash(p_entry text) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF p_entry IS NOT NULL THEN
        PERFORM set_config('once.claims', replace(current_setting('once.claims', true), p_entry, ''), true);
    END IF;
END $$;
