-- The log's xids and every cursor belong to one database of one cluster. A physical standby is the same cluster; a dump
-- that was restored is not, and there the old cursors would pass over new messages. So: refuse, and say what to do.
-- Where there is no cursor yet, nothing can be passed over (a copy of a template): such a log is simply at home, unless
-- it holds numbers of another cluster.
CREATE OR REPLACE FUNCTION once.check_home() RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF once.is_home() THEN
        RETURN;
    END IF;
    PERFORM FROM once.outbox_home FOR UPDATE;
    IF once.is_home() THEN -- somebody was first
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM once.sink)
       OR EXISTS (SELECT FROM once.outbox_home h, pg_control_system() c WHERE h.system_identifier <> c.system_identifier)
          AND EXISTS (SELECT FROM once.outbox) THEN
        RAISE EXCEPTION 'the outbox was made in another database than this one' USING ERRCODE = 'P4070',
            DETAIL = 'It was restored from a dump, copied or upgraded: its cursors do not fit the transaction numbers here. Nothing is relayed until they do.',
            HINT = 'Run: pgonce outbox adopt --reason "restored from …". What cannot be proven delivered is then sent again.';
    END IF;
    PERFORM once.settle_home();
END $$;
